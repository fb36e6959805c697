#include "gemv_rows.h"
#include "silu.h"
// gate and up += their rows of matrix e times x, each complete in every lane; x is read once for both. A lane takes
// V inputs of both, half of DEPTH times before it multiplies the first.
template <
    int GB, int GG, int UB, int UG, int N, int K, int V, int DEPTH, int R, int B, typename X, typename GS, typename US>
inline void gate_up(
    thread float (&gate)[R][B], thread float (&up)[R][B], X x, long e, const device uint* gw, GS gs, GS gb,
    const device uint* uw, US us, US ub, int row, uint lane) {
  const long n = e * N * K;
  constexpr int HALF = (DEPTH + 1) / 2;
  GemvRun<GB, V> g[HALF][R];
  GemvRun<UB, V> u[HALF][R];
  for (int first = 0; first < K; first += 32 * V * HALF) {
    int k = first + lane * V;
    gemv_take<GB, GG, K>(g, gw + n / 32 * GB, gs + n / GG, gb + n / GG, row, N - 1, k);
    gemv_take<UB, UG, K>(u, uw + n / 32 * UB, us + n / UG, ub + n / UG, row, N - 1, k);
    UNROLL
    for (int i = 0; i < HALF && k < K; ++i, k += 32 * V) {
      float v[B][V], sum[B];
      gemv_inputs<K>(v, sum, x, k);
      gemv_dot(gate, v, sum, g[i]);
      gemv_dot(up, v, sum, u[i]);
    }
  }
  gemv_sum(gate);
  gemv_sum(up);
}
