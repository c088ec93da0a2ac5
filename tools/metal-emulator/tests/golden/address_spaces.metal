[[kernel]] void custom_kernel_address_spaces_float_floatc_int32_ts_float16_tc_bfloat16_tc_float(
  const device float* eight [[buffer(0)]],
  const constant float* seven [[buffer(1)]],
  const constant int32_t& scalar [[buffer(2)]],
  const constant float16_t* empty [[buffer(3)]],
  const constant bfloat16_t* matrix [[buffer(4)]],
  device float* out [[buffer(5)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]]) {
uint i = thread_position_in_grid.x; out[i] = eight[i] + seven[0] + scalar + empty[0] + matrix[0];
}
