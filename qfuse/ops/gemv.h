// Rows of an affine-quantised matrix times B vectors, one simdgroup for R rows.
// acc[r][b] += this lane's part of row r of w times x[b]; simd_sum over the lanes makes the product.
// A row past the last repeats it, so that no load is out of bounds: the caller masks the store.
template <int BITS, int GROUP, int K, int V, int R, int B, typename X, typename W, typename S>
inline void gemv(thread float (&acc)[R][B], X x, int x_stride, W w, S scales, S biases, long row, long last, uint lane) {
  constexpr int WORDS = V * BITS / 32, PER = 32 / BITS;
  constexpr uint MASK = (1u << BITS) - 1u;
  for (int k = lane * V; k < K; k += 32 * V) {
    float v[B][V], sum[B];
    for (int b = 0; b < B; ++b) {
      sum[b] = 0;
      for (int i = 0; i < V; ++i) {
        v[b][i] = static_cast<float>(x[b * x_stride + k + i]);
        sum[b] += v[b][i];
      }
    }
    for (int r = 0; r < R; ++r) {
      const long n = row + r < last ? row + r : last;
      const float scale = static_cast<float>(scales[n * (K / GROUP) + k / GROUP]);
      const float bias = static_cast<float>(biases[n * (K / GROUP) + k / GROUP]);
      float dot[B];
      for (int b = 0; b < B; ++b) dot[b] = 0;
      for (int i = 0; i < WORDS; ++i) {
        const uint word = w[n * (K / PER) + k / PER + i];
        for (int j = 0; j < PER; ++j) {
          const float code = float((word >> (BITS * j)) & MASK);
          for (int b = 0; b < B; ++b) dot[b] += code * v[b][i * PER + j];
        }
      }
      for (int b = 0; b < B; ++b) acc[r][b] += scale * dot[b] + bias * sum[b];
    }
  }
}
