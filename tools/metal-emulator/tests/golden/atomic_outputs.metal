[[kernel]] void custom_kernel_atomic_outputs_float_float_uint32_t(
  const device float* row [[buffer(0)]],
  device atomic<float>* out [[buffer(1)]],
  device atomic<uint32_t>* count [[buffer(2)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]]) {
uint i = thread_position_in_grid.x; atomic_fetch_add_explicit(&out[0], row[i], memory_order_relaxed);
}
