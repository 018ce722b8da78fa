// RMS norm of one row. The squares are summed in 4 x 16 lanes (element k in vector k / 16 % 4, lane k % 16),
// then (0 + 1) + (2 + 3), then the lane tree of reduce_add.

inline float sum_of_squares(const float* x, int64_t size) {
  F16 sums[4] = {set1(0.0f), set1(0.0f), set1(0.0f), set1(0.0f)};
  int64_t k = 0;
  for (; k + 64 <= size; k += 64)
    for (int i = 0; i < 4; ++i) {
      const F16 v = load(x + k + 16 * i);
      sums[i] = fma(v, v, sums[i]);
    }
  for (int i = 0; k < size; k += 16, ++i) {
    const F16 v = size - k >= 16 ? load(x + k) : load_first(x + k, static_cast<int>(size - k));
    sums[i] = fma(v, v, sums[i]);
  }
  return reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

inline void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* out) noexcept {
  const float mean = sum_of_squares(x, size) / static_cast<float>(size);
  const F16 factor = set1(1.0f / __builtin_sqrtf(mean + eps));
  int64_t k = 0;
  for (; k + 16 <= size; k += 16) store(out + k, mul(mul(load(x + k), factor), load(weight + k)));
  if (const int n = static_cast<int>(size - k); n > 0)
    store_first(out + k, mul(mul(load_first(x + k, n), factor), load_first(weight + k, n)), n);
}

inline void add_rms_norm(float* residual, const float* delta, const float* weight, float eps, int64_t size,
                         float* out) noexcept {
  int64_t k = 0;
  for (; k + 16 <= size; k += 16) store(residual + k, add(load(residual + k), load(delta + k)));
  if (const int n = static_cast<int>(size - k); n > 0)
    store_first(residual + k, add(load_first(residual + k, n), load_first(delta + k, n)), n);
  rms_norm(residual, weight, eps, size, out);
}
