template <typename T, int MODE, int BITS, int ROWS, int COLUMNS>
[[kernel]] void custom_kernel_mlx_paged_rows_matmul__bfloat16_t_1_4_1_8_bfloat16_t_uint32_t_bfloat16_t_bfloat16_t_int32_ts_int32_ts_bfloat16_t(
  const device bfloat16_t* x [[buffer(0)]],
  const device uint32_t* weight [[buffer(1)]],
  const constant int* weight_shape [[buffer(2)]],
  const device bfloat16_t* scales [[buffer(3)]],
  const device bfloat16_t* biases [[buffer(4)]],
  const constant int32_t& num_rows [[buffer(5)]],
  const constant int32_t& log2_group_size [[buffer(6)]],
  device bfloat16_t* out [[buffer(7)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 thread_position_in_grid [[thread_position_in_grid]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
  uint3 threads_per_grid [[threads_per_grid]]) {
// the body of the kernel
}

template [[host_name("custom_kernel_mlx_paged_rows_matmul__bfloat16_t_1_4_1_8_bfloat16_t_uint32_t_bfloat16_t_bfloat16_t_int32_ts_int32_ts_bfloat16_t")]] [[kernel]] decltype(custom_kernel_mlx_paged_rows_matmul__bfloat16_t_1_4_1_8_bfloat16_t_uint32_t_bfloat16_t_bfloat16_t_int32_ts_int32_ts_bfloat16_t<bfloat16_t, 1, 4, 1, 8>) custom_kernel_mlx_paged_rows_matmul__bfloat16_t_1_4_1_8_bfloat16_t_uint32_t_bfloat16_t_bfloat16_t_int32_ts_int32_ts_bfloat16_t<bfloat16_t, 1, 4, 1, 8>;
