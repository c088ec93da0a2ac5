template <typename T, int HEAD_DIM>
[[kernel]] void custom_kernel_mlx_paged_merge_partitions__bfloat16_t_512_float_int32_t_float_bfloat16_t(
  const device float* partials [[buffer(0)]],
  const device int32_t* plan [[buffer(1)]],
  const device float* sinks [[buffer(2)]],
  device bfloat16_t* out [[buffer(3)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
  uint3 threadgroups_per_grid [[threadgroups_per_grid]]) {
// the body of the kernel
}

template [[host_name("custom_kernel_mlx_paged_merge_partitions__bfloat16_t_512_float_int32_t_float_bfloat16_t")]] [[kernel]] decltype(custom_kernel_mlx_paged_merge_partitions__bfloat16_t_512_float_int32_t_float_bfloat16_t<bfloat16_t, 512>) custom_kernel_mlx_paged_merge_partitions__bfloat16_t_512_float_int32_t_float_bfloat16_t<bfloat16_t, 512>;
