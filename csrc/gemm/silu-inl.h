// silu(gate) * up over 16-lane vectors. Include inside an ISA's region and namespace, after gemm/exp-inl.h.

inline void silu_mul(const float* gate, const float* up, float* out, int64_t n) noexcept {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) Vec::mul(vec_silu(Vec::load(gate + i)), Vec::load(up + i)).store(out + i);
  if (i < n) {
    const int lanes = static_cast<int>(n - i);
    const Vec g = Vec::load_first(gate + i, lanes);
    Vec::mul(vec_silu(g), Vec::load_first(up + i, lanes)).store_first(out + i, lanes);
  }
}
