#include "gemv.h"
// acc += rows of a plain matrix times x, K a multiple of 8; the caller sums over the lanes.
template <int K, int R, int B, typename X, typename W>
inline void dense(thread float (&acc)[R][B], X x, W w, int row, int last, uint lane) {
  constexpr int V = 8;
  for (int k = lane * V; k < K; k += 32 * V) {
    float v[B][V], sum[B], u[V];
    gemv_inputs<K>(v, sum, x, k);
    for (int r = 0; r < R; ++r) {
      gemv_load(u, w, metal::min(row + r, last) * K, k);
      for (int b = 0; b < B; ++b)
        for (int i = 0; i < V; ++i) acc[r][b] += u[i] * v[b][i];
    }
  }
}
