inline float sigmoid(float x) { return 1.0f / (1.0f + metal::exp(-x)); }
inline float silu(float x) { return x * sigmoid(x); }
