[[kernel]] void custom_kernel_one_output_float_float(
  const device float* row [[buffer(0)]],
  device float* out [[buffer(1)]]) {
out[0] = row[0];
}
