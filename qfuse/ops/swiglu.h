#include "gemv_rows.h"
#include "silu.h"
// gate and up += their rows of matrix e times x, each complete in every lane; x is read once for both.
template <int GB, int GG, int UB, int UG, int N, int K, int V, int R, int B, typename X, typename GS, typename US>
inline void gate_up(
    thread float (&gate)[R][B], thread float (&up)[R][B], X x, long e, const device uint* gw, GS gs, GS gb,
    const device uint* uw, US us, US ub, int row, uint lane) {
  const long n = e * N * K;
  for (int k = lane * V; k < K; k += 32 * V) {
    float v[B][V], sum[B];
    gemv_inputs<K>(v, sum, x, k);
    gemv_rows<GB, GG, K>(gate, v, sum, gw + n / 32 * GB, gs + n / GG, gb + n / GG, row, N - 1, k);
    gemv_rows<UB, UG, K>(up, v, sum, uw + n / 32 * UB, us + n / UG, ub + n / UG, row, N - 1, k);
  }
  gemv_sum(gate);
  gemv_sum(up);
}
