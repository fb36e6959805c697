// The vector x * w, made as it is read.
template <typename X, typename W>
struct Scaled {
  const device X* x;
  const device W* w;
};
template <typename X, typename W>
inline Scaled<X, W> scaled(const device X* x, const device W* w) {
  return {x, w};
}
template <int V, typename X, typename W>
inline void gemv_load(thread float (&v)[V], Scaled<X, W> s, int row, int k) {
  float w[V];
  gemv_load(v, s.x, row, k);
  gemv_load(w, s.w, 0, k);
  for (int i = 0; i < V; ++i) v[i] *= w[i];
}
