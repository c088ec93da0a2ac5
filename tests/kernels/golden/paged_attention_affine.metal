template <typename T, typename Index, int KEY_DIM, int VALUE_DIM, int KEY_BITS, int VALUE_BITS, int KEY_GROUP, int VALUE_GROUP, typename Out, int BLOCK_SIZE, bool HOLDS_LATENTS, int GROUP, int RUN, int STREAMS, int ROW_SPLITS, int ROW_PARTS, bool PARTIAL, int SOFTCAP>
[[kernel]] void custom_kernel_mlx_paged_paged_attention_affine__bfloat16_t_uint32_t_64_64_8_4_64_64_float_16_0_4_1_4_1_1_1_0_uint32_t_bfloat16_t_bfloat16_t_uint32_t_bfloat16_t_bfloat16_t_bfloat16_t_int32_t_float_floats_int32_t_float_int32_t(
  const device uint32_t* key_slab [[buffer(0)]],
  const device bfloat16_t* key_scales [[buffer(1)]],
  const device bfloat16_t* key_biases [[buffer(2)]],
  const device uint32_t* value_slab [[buffer(3)]],
  const device bfloat16_t* value_scales [[buffer(4)]],
  const device bfloat16_t* value_biases [[buffer(5)]],
  const device bfloat16_t* queries [[buffer(6)]],
  const device int32_t* plan [[buffer(7)]],
  const device float* sinks [[buffer(8)]],
  const constant float& softmax_scale [[buffer(9)]],
  const device int32_t* fence_in [[buffer(10)]],
  device float* out [[buffer(11)]],
  device int32_t* fence_out [[buffer(12)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
  uint3 threadgroups_per_grid [[threadgroups_per_grid]]) {
// the body of the kernel
}

template [[host_name("custom_kernel_mlx_paged_paged_attention_affine__bfloat16_t_uint32_t_64_64_8_4_64_64_float_16_0_4_1_4_1_1_1_0_uint32_t_bfloat16_t_bfloat16_t_uint32_t_bfloat16_t_bfloat16_t_bfloat16_t_int32_t_float_floats_int32_t_float_int32_t")]] [[kernel]] decltype(custom_kernel_mlx_paged_paged_attention_affine__bfloat16_t_uint32_t_64_64_8_4_64_64_float_16_0_4_1_4_1_1_1_0_uint32_t_bfloat16_t_bfloat16_t_uint32_t_bfloat16_t_bfloat16_t_bfloat16_t_int32_t_float_floats_int32_t_float_int32_t<bfloat16_t, uint32_t, 64, 64, 8, 4, 64, 64, float, 16, 0, 4, 1, 4, 1, 1, 1, 0>) custom_kernel_mlx_paged_paged_attention_affine__bfloat16_t_uint32_t_64_64_8_4_64_64_float_16_0_4_1_4_1_1_1_0_uint32_t_bfloat16_t_bfloat16_t_uint32_t_bfloat16_t_bfloat16_t_bfloat16_t_int32_t_float_floats_int32_t_float_int32_t<bfloat16_t, uint32_t, 64, 64, 8, 4, 64, 64, float, 16, 0, 4, 1, 4, 1, 1, 1, 0>;
