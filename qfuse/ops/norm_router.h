#include "gemv.h"
// The vector (x + r) * w, made as it is read.
template <typename X, typename W>
struct Normed {
  const device X* x;
  const device X* r;
  const device W* w;
};
template <typename X, typename W>
inline Normed<X, W> normed(const device X* x, const device X* r, const device W* w) {
  return {x, r, w};
}
template <int V, typename X, typename W>
inline void gemv_load(thread float (&v)[V], Normed<X, W> n, int row, int k) {
  float r[V], w[V];
  gemv_load(v, n.x, row, k);
  gemv_load(r, n.r, row, k);
  gemv_load(w, n.w, 0, k);
  for (int i = 0; i < V; ++i) v[i] = (v[i] + r[i]) * w[i];
}
