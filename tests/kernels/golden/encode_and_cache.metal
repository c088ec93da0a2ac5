template <typename T, typename Index, int KEY_DIM, int VALUE_DIM, int KEY_BITS, int VALUE_BITS, int KEY_GROUP, int VALUE_GROUP, int BLOCK_SIZE, bool ROTATES>
[[kernel]] void custom_kernel_mlx_paged_encode_and_cache__bfloat16_t_uint32_t_64_64_8_4_64_64_16_0_uint32_t_bfloat16_t_bfloat16_t_uint32_t_bfloat16_t_bfloat16_t_bfloat16_t_bfloat16_t_bfloat16_t_int32_t_int32_ts_floats_int32_t_bfloat16_t_int32_t(
  const device uint32_t* key_slab [[buffer(0)]],
  const device bfloat16_t* key_scales [[buffer(1)]],
  const device bfloat16_t* key_biases [[buffer(2)]],
  const device uint32_t* value_slab [[buffer(3)]],
  const device bfloat16_t* value_scales [[buffer(4)]],
  const device bfloat16_t* value_biases [[buffer(5)]],
  const device bfloat16_t* key_rows [[buffer(6)]],
  const device bfloat16_t* value_rows [[buffer(7)]],
  const device bfloat16_t* queries [[buffer(8)]],
  const device int32_t* slot_mapping [[buffer(9)]],
  const constant int32_t& num_tokens [[buffer(10)]],
  const constant float& rotation_scale [[buffer(11)]],
  const device int32_t* fence_in [[buffer(12)]],
  device bfloat16_t* rotated [[buffer(13)]],
  device int32_t* fence_out [[buffer(14)]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 thread_position_in_grid [[thread_position_in_grid]],
  uint3 threads_per_grid [[threads_per_grid]]) {
// the body of the kernel
}

template [[host_name("custom_kernel_mlx_paged_encode_and_cache__bfloat16_t_uint32_t_64_64_8_4_64_64_16_0_uint32_t_bfloat16_t_bfloat16_t_uint32_t_bfloat16_t_bfloat16_t_bfloat16_t_bfloat16_t_bfloat16_t_int32_t_int32_ts_floats_int32_t_bfloat16_t_int32_t")]] [[kernel]] decltype(custom_kernel_mlx_paged_encode_and_cache__bfloat16_t_uint32_t_64_64_8_4_64_64_16_0_uint32_t_bfloat16_t_bfloat16_t_uint32_t_bfloat16_t_bfloat16_t_bfloat16_t_bfloat16_t_bfloat16_t_int32_t_int32_ts_floats_int32_t_bfloat16_t_int32_t<bfloat16_t, uint32_t, 64, 64, 8, 4, 64, 64, 16, 0>) custom_kernel_mlx_paged_encode_and_cache__bfloat16_t_uint32_t_64_64_8_4_64_64_16_0_uint32_t_bfloat16_t_bfloat16_t_uint32_t_bfloat16_t_bfloat16_t_bfloat16_t_bfloat16_t_bfloat16_t_int32_t_int32_ts_floats_int32_t_bfloat16_t_int32_t<bfloat16_t, uint32_t, 64, 64, 8, 4, 64, 64, 16, 0>;
