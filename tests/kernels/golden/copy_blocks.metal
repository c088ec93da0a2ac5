template <int PIECE, int KEY_PIECES, int VALUE_PIECES>
[[kernel]] void custom_kernel_mlx_paged_copy_blocks__16_8_8_bfloat16_t_bfloat16_t_int32_t_int32_t_int32_t(
  const device bfloat16_t* key_slab [[buffer(0)]],
  const device bfloat16_t* value_slab [[buffer(1)]],
  const device int32_t* src_dst_pairs [[buffer(2)]],
  const device int32_t* fence_in [[buffer(3)]],
  device int32_t* fence_out [[buffer(4)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]],
  uint3 threads_per_grid [[threads_per_grid]]) {
// the body of the kernel
}

template [[host_name("custom_kernel_mlx_paged_copy_blocks__16_8_8_bfloat16_t_bfloat16_t_int32_t_int32_t_int32_t")]] [[kernel]] decltype(custom_kernel_mlx_paged_copy_blocks__16_8_8_bfloat16_t_bfloat16_t_int32_t_int32_t_int32_t<16, 8, 8>) custom_kernel_mlx_paged_copy_blocks__16_8_8_bfloat16_t_bfloat16_t_int32_t_int32_t_int32_t<16, 8, 8>;
