#include "gemv.h"
// acc += rows of a plain matrix times x, K a multiple of 8; the caller sums over the lanes. A lane takes 8 inputs DEPTH
// times before it multiplies the first.
template <int K, int DEPTH, int R, int B, typename X, typename W>
inline void dense(thread float (&acc)[R][B], X x, W w, int row, int last, uint lane) {
  constexpr int V = 8;
  float u[DEPTH][R][V];
  for (int first = 0; first < K; first += 32 * V * DEPTH) {
    UNROLL
    for (int i = 0, k = first + lane * V; i < DEPTH && k < K; ++i, k += 32 * V)
      for (int r = 0; r < R; ++r) gemv_load(u[i][r], w, metal::min(row + r, last) * K, k);
    if (DEPTH > 1) simdgroup_barrier(mem_flags::mem_none);
    UNROLL
    for (int i = 0, k = first + lane * V; i < DEPTH && k < K; ++i, k += 32 * V) {
      float v[B][V], sum[B];
      gemv_inputs<K>(v, sum, x, k);
      UNROLL
      for (int r = 0; r < R; ++r)
        UNROLL
        for (int b = 0; b < B; ++b)
          for (int j = 0; j < V; ++j) acc[r][b] += u[i][r][j] * v[b][j];
    }
  }
}
