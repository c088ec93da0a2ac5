template <int N>
[[kernel]] void custom_kernel_negative_template___3_float_float(
  const device float* row [[buffer(0)]],
  device float* out [[buffer(1)]]) {
out[0] = N;
}

template [[host_name("custom_kernel_negative_template___3_float_float")]] [[kernel]] decltype(custom_kernel_negative_template___3_float_float<-3>) custom_kernel_negative_template___3_float_float<-3>;
