[[kernel]] void custom_kernel_dtype_uint16_uint16_t_float(
  const device uint16_t* row [[buffer(0)]],
  device float* out [[buffer(1)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]]) {
uint i = thread_position_in_grid.x; out[i] = row[i];
}
