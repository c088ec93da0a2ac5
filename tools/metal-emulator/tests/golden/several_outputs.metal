[[kernel]] void custom_kernel_several_outputs_float_float16_t_uint8_t(
  const device float* row [[buffer(0)]],
  device float16_t* partial [[buffer(1)]],
  device uint8_t* token [[buffer(2)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]]) {
uint i = thread_position_in_grid.x; partial[i] = row[i]; token[0] = 1;
}
