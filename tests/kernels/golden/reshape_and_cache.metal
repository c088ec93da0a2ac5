template <int PIECE, int KEY_PIECES, int VALUE_PIECES, int BLOCK_SIZE>
[[kernel]] void custom_kernel_mlx_paged_reshape_and_cache__16_8_8_16_bfloat16_t_bfloat16_t_bfloat16_t_bfloat16_t_int32_t_int32_t_int32_t(
  const device bfloat16_t* key_rows [[buffer(0)]],
  const device bfloat16_t* value_rows [[buffer(1)]],
  const device bfloat16_t* key_slab [[buffer(2)]],
  const device bfloat16_t* value_slab [[buffer(3)]],
  const device int32_t* slot_mapping [[buffer(4)]],
  const device int32_t* fence_in [[buffer(5)]],
  device int32_t* fence_out [[buffer(6)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]],
  uint3 threads_per_grid [[threads_per_grid]]) {
// the body of the kernel
}

template [[host_name("custom_kernel_mlx_paged_reshape_and_cache__16_8_8_16_bfloat16_t_bfloat16_t_bfloat16_t_bfloat16_t_int32_t_int32_t_int32_t")]] [[kernel]] decltype(custom_kernel_mlx_paged_reshape_and_cache__16_8_8_16_bfloat16_t_bfloat16_t_bfloat16_t_bfloat16_t_int32_t_int32_t_int32_t<16, 8, 8, 16>) custom_kernel_mlx_paged_reshape_and_cache__16_8_8_16_bfloat16_t_bfloat16_t_bfloat16_t_bfloat16_t_int32_t_int32_t_int32_t<16, 8, 8, 16>;
