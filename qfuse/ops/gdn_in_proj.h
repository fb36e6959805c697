#include "gemv.h"
#include "silu.h"
// One value of w_qkv.n, column c of row b: the window moves on by it; silu of its convolution.
template <int C, int Kc, typename S, typename I, typename W>
inline float gdn_conv(float value, int b, int c, I conv_state, device S* next, W w_conv) {
  const S last = S(value);
  float conv = float(last) * float(w_conv[c * Kc + Kc - 1]);
  for (int t = 0; t < Kc - 1; ++t) {
    const int at = (b * (Kc - 1) + t) * C + c;
    conv += float(conv_state[at]) * float(w_conv[c * Kc + t]);
    next[at] = t < Kc - 2 ? conv_state[at + C] : last;
  }
  return silu(conv);
}
inline float gdn_decay(float x, float A_log) {
  const float softplus = metal::max(x, 0.0f) + metal::log(1.0f + metal::exp(-metal::abs(x)));
  return metal::exp(-metal::exp(A_log) * softplus);
}
