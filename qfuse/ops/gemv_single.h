#include "gemv_load.h"
// One value, where a word would hold two.
template <typename X>
inline void gemv_load(thread float (&v)[1], const device X* x, int row, int k) {
  v[0] = float(x[row + k]);
}
