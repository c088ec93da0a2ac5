[[kernel]] void custom_kernel_several_outputs_without_attribute_float_float16_t_uint8_t(
  const device float* row [[buffer(0)]],
  device float16_t* partial [[buffer(1)]],
  device uint8_t* token [[buffer(2)]]) {
partial[0] = row[0]; token[0] = 1;
}
