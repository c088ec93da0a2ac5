// row_shape thread_position_in_grid
inline float first(const device float* row) { return row[0]; }
[[kernel]] void custom_kernel_header_is_not_searched_float_float(
  const device float* row [[buffer(0)]],
  device float* out [[buffer(1)]]) {
out[0] = first(row);
}
