[[kernel]] void custom_kernel_broken_by_a_shape_without_attribute_float_float16_t_uint8_t(
  const device float* row [[buffer(0)]],
  const constant int* row_shape [[buffer(1)]],
  device float16_t* partial [[buffer(2)]]) {
  device uint8_t* token [[buffer(3)]]) {
partial[0] = row_shape[0]; token[0] = 1;
}
