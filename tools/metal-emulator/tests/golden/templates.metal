template <typename T, int Count, bool Flag, bool Off, typename I>
[[kernel]] void custom_kernel_templates__bfloat16_t_64_1_0_int64_t_float16_t_bfloat16_t(
  const device float16_t* row [[buffer(0)]],
  device bfloat16_t* out [[buffer(1)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]]) {
uint i = thread_position_in_grid.x; out[i] = Flag ? T(row[i]) : T(Count);
}

template [[host_name("custom_kernel_templates__bfloat16_t_64_1_0_int64_t_float16_t_bfloat16_t")]] [[kernel]] decltype(custom_kernel_templates__bfloat16_t_64_1_0_int64_t_float16_t_bfloat16_t<bfloat16_t, 64, 1, 0, int64_t>) custom_kernel_templates__bfloat16_t_64_1_0_int64_t_float16_t_bfloat16_t<bfloat16_t, 64, 1, 0, int64_t>;
