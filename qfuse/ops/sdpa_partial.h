#include "gemv_single.h"
// V values of C pieces of each of a block's keys from key n on, as words; an odd value has one of its own. Past the
// last key, that one.
template <int BLOCKS, int V, int KEYS, int C, int N, typename X>
inline void sdpa_load(thread uint (&w)[KEYS][C][N], const device X* cache, int n, int last, int lane) {
  for (int i = 0; i < KEYS; ++i) {
    const long key = metal::max(metal::min(n + i * BLOCKS, last), 0);
    for (int c = 0; c < C; ++c) {
      const auto x = cache + (key * C + c) * 32 * V + lane * V;
      if (V * sizeof(X) % 4 == 0) {
        gemv_words<true>(w[i][c], reinterpret_cast<const device uint*>(x));
      } else {
        w[i][c][0] = *reinterpret_cast<const device ushort*>(x);
      }
    }
  }
}

// One key's values as floats.
template <typename X, int V, int PER, int C, int N>
inline void sdpa_values(thread float (&x)[PER], thread uint (&w)[C][N]) {
  constexpr int IN = 4 / sizeof(X);
  for (int d = 0; d < PER; ++d) x[d] = gemv_value<X>(w[d / V][d % V / IN], d % V % IN);
}

// The greatest power of two up to x, or 32.
constexpr int sdpa_power(int x) { return x < 2 ? 1 : x < 4 ? 2 : x < 8 ? 4 : x < 16 ? 8 : x < 32 ? 16 : 32; }

// Sums over the lanes of N values, a power of two up to 32: the i-th is in the lanes 32 / N * i and on.
template <int N>
inline float sdpa_sums(thread float (&s)[N], int lane) {
  for (int o = 16, n = N / 2; o > 0; o /= 2, n /= 2) {
    for (int i = 0; i < n; ++i) {
      const float keep = lane & o ? s[i + n] : s[i], give = lane & o ? s[i] : s[i + n];
      s[i] = keep + simd_shuffle_xor(give, o);
    }
    if (n == 0) s[0] += simd_shuffle_xor(s[0], o);
  }
  return s[0];
}

// A lane's V values to p.
template <int V>
inline void sdpa_store(device float* p, thread float* o) {
  int i = 0;
  for (; V % 4 == 0 && i < V; i += 4) {
    const uint4 four = {as_type<uint>(o[i]), as_type<uint>(o[i + 1]), as_type<uint>(o[i + 2]), as_type<uint>(o[i + 3])};
    *reinterpret_cast<device uint4*>(p + i) = four;
  }
  for (; i < V; ++i) p[i] = o[i];
}
