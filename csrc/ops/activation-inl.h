// Gated activations of one row.

// x * sigmoid(y) = x / (1 + e^-y); e^89 is infinite already.
inline F16 times_sigmoid(F16 x, F16 y) {
  const F16 e = vec_exp(min(set1(89.0f), sub(set1(0.0f), y)));
  return div(x, add(set1(1.0f), e));
}

inline F16 activate(const Activation& act, F16 gate, F16 up) {
  const F16 g = min(set1(act.limit), gate), u = max(set1(-act.limit), min(set1(act.limit), up));
  if (act.gating == Gating::kSilu) return mul(times_sigmoid(g, g), u);
  return mul(times_sigmoid(g, mul(set1(act.alpha), g)), add(u, set1(1.0f)));
}

inline void activate_row(const Activation& act, const float* gate, const float* up, int64_t size,
                         float* out) noexcept {
  int64_t k = 0;
  for (; k + 16 <= size; k += 16) store(out + k, activate(act, load(gate + k), load(up + k)));
  if (const int n = static_cast<int>(size - k); n > 0)
    store_first(out + k, activate(act, load_first(gate + k, n), load_first(up + k, n)), n);
}
