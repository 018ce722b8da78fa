// vec_exp over an array, for the tests. `size` is a multiple of 16.
inline void exp_row(const float* x, int64_t size, float* y) noexcept {
  for (int64_t i = 0; i < size; i += 16) store(y + i, vec_exp(load(x + i)));
}
