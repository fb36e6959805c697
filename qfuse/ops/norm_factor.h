// 1 / sqrt(mean + eps) from P partial sums of H squares, in every lane.
template <int P, typename X>
inline float norm_factor(X x2, int H, float eps, int lane) {
  float sum = 0;
  for (int p = lane; p < P; p += 32) sum += x2[p];
  return metal::rsqrt(simd_sum(sum) / H + eps);
}
