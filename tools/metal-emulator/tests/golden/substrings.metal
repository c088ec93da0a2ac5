[[kernel]] void custom_kernel_substrings_float_bool_float(
  const device float* k [[buffer(0)]],
  const constant int* k_shape [[buffer(1)]],
  const device bool* mask [[buffer(2)]],
  const constant int* mask_shape [[buffer(3)]],
  device float* out [[buffer(4)]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 thread_position_in_grid [[thread_position_in_grid]]) {
// thread_index_in_simdgroup is in a comment
uint i = thread_position_in_grid.x; out[i] = k[i] + mask_shape[0];  // so k has one
}
