[[kernel]] void custom_kernel_shapes_and_strides_float_int32_tc_int32_ts_float(
  const device float* rows [[buffer(0)]],
  const constant int* rows_shape [[buffer(1)]],
  const constant int64_t* rows_strides [[buffer(2)]],
  const constant int& rows_ndim [[buffer(3)]],
  const constant int32_t* table [[buffer(4)]],
  const constant int* table_shape [[buffer(5)]],
  const constant int32_t& scalar [[buffer(6)]],
  device float* out [[buffer(7)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]]) {
uint i = thread_position_in_grid.x; out[i] = rows_shape[0] + rows_strides[1] + rows_ndim + table_shape[0] + scalar_shape;
}
