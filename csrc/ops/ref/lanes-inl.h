// The 16-lane vector of ops/*-inl.h in plain C++: the definition the vector ISAs are held to, bit for bit.

constexpr int kQueryRows = 2;
constexpr int kVectors = 1;

struct F16 {
  float v[16];

  static F16 set1(float x) { return {x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
};

template <class F>
inline F16 each(F f) {
  F16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = f(i);
  return r;
}
inline float widen(float x) { return x; }
inline float widen(uint16_t x) { return base::bf16_to_f32(x); }

inline F16 set1(float x) { return F16::set1(x); }
template <class T>
inline F16 load(const T* p) {
  return each([&](int i) { return widen(p[i]); });
}
// n in 0 .. 15: only n elements are read, the other lanes are 0.
template <class T>
inline F16 load_first(const T* p, int n) {
  return each([&](int i) { return i < n ? widen(p[i]) : 0.0f; });
}
inline void store(float* p, F16 a) {
  for (int i = 0; i < 16; ++i) p[i] = a.v[i];
}
inline void store_first(float* p, F16 a, int n) {
  for (int i = 0; i < n; ++i) p[i] = a.v[i];
}

inline F16 add(F16 a, F16 b) {
  return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline F16 sub(F16 a, F16 b) {
  return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline F16 mul(F16 a, F16 b) {
  return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline F16 fma(F16 a, F16 b, F16 c) {
  return each([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
inline F16 max(F16 a, F16 b) {  // as maxps: b when either is NaN
  return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline F16 min(F16 a, F16 b) {  // as minps: b when either is NaN
  return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline F16 div(F16 a, F16 b) {
  return each([&](int i) { return a.v[i] / b.v[i]; });
}
// Lanes below n (0 .. 16) of a, the others of b.
inline F16 first_or(F16 a, int n, F16 b) {
  return each([&](int i) { return i < n ? a.v[i] : b.v[i]; });
}
// Lanes of `value` where x >= limit or x is NaN, 0 elsewhere.
inline F16 zero_below(F16 x, F16 limit, F16 value) {
  return each([&](int i) { return x.v[i] < limit.v[i] ? 0.0f : value.v[i]; });
}
// 2^n for the integer n in the low mantissa bits of t = 1.5 * 2^23 + n.
inline F16 power_of_two(F16 t) {
  return each(
      [&](int i) { return std::bit_cast<float>((std::bit_cast<uint32_t>(t.v[i]) << 23) + 0x3f800000u); });
}

inline float first_lane(F16 a) { return a.v[0]; }
// One fixed tree: lane i with i + 8, then i + 4, i + 2, i + 1.
inline float reduce_add(F16 a) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a.v[i] += a.v[i + width];
  return a.v[0];
}
inline float reduce_max(F16 a) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a.v[i] = a.v[i] > a.v[i + width] ? a.v[i] : a.v[i + width];
  return a.v[0];
}

// Columns column .. column + 15 of 16 rows; column c goes to dst + c * stride, lane i from row i.
inline void transpose16(const float* const* rows, int64_t column, float* dst, int64_t stride) {
  for (int c = 0; c < 16; ++c)
    for (int i = 0; i < 16; ++i) dst[c * stride + i] = rows[i][column + c];
}
