// The row loops of quantize.cc, written for the compiler's vectorizer. Included once per instruction set.
//
// Magnitudes are compared as integers: the bits of |x| order like |x|, inf and NaN above everything finite.

constexpr uint32_t kMagnitude = 0x7fffffffu;
constexpr uint32_t kInfinity = 0x7f800000u;
// Adding and subtracting 1.5 * 2^23 rounds |x| < 2^22 to the nearest integer, ties to even.
constexpr float kRounder = 12582912.0f;

inline uint32_t magnitude_bits(float x) { return std::bit_cast<uint32_t>(x) & kMagnitude; }

inline uint32_t max_magnitude(const float* values, int64_t n) {
  int32_t largest = 0;
  for (int64_t i = 0; i < n; ++i)
    largest = std::max(largest, static_cast<int32_t>(magnitude_bits(values[i])));
  return static_cast<uint32_t>(largest);
}

inline float round_to_int(float x) { return (x + kRounder) - kRounder; }
inline float clamp(float x, float low, float high) { return x < low ? low : (x > high ? high : x); }

void decode_bf16(const uint16_t* src, int64_t n, float* dst) {
  for (int64_t i = 0; i < n; ++i) dst[i] = base::bf16_to_f32(src[i]);
}

void decode_int4(const uint8_t* src, const uint16_t* scales, int64_t n, float* dst) {
  for (int64_t g = 0; g < n / kInt4Group; ++g) {
    const float scale = base::bf16_to_f32(scales[g]);
    for (int64_t b = 0; b < kInt4Group / 2; ++b) {
      const int pair = src[g * (kInt4Group / 2) + b];
      dst[g * kInt4Group + 2 * b] = static_cast<float>((pair & 15) - 8) * scale;
      dst[g * kInt4Group + 2 * b + 1] = static_cast<float>((pair >> 4) - 8) * scale;
    }
  }
}

// e4m3 magnitude bits shifted into a float are the value times 2^-120, subnormals included. Choices are made
// on integers: the vectorizer takes no branch around floats.
inline float decode_e4m3(uint32_t code) {
  const float value = std::bit_cast<float>((code & 0x7fu) << 20) * 0x1p120f;
  const uint32_t nan = (code & 0x7fu) == 0x7fu ? 0x7fc00000u : 0u;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | nan | (code & 0x80u) << 24);
}

void decode_fp8(const uint8_t* src, const float* scales, int64_t n, float* dst) {
  for (int64_t begin = 0; begin < n; begin += kFp8Block) {
    const float scale = scales[begin / kFp8Block];
    const int64_t end = std::min(n, begin + kFp8Block);
    for (int64_t i = begin; i < end; ++i) dst[i] = decode_e4m3(src[i]) * scale;
  }
}

// Eight partial sums in a fixed order, so that every machine reports the same error.
void add_error(const float* values, const float* restored, int64_t n, QuantizeError& error) {
  constexpr int kLanes = 8;
  using Floats [[gnu::vector_size(4 * kLanes)]] = float;
  using Doubles [[gnu::vector_size(8 * kLanes)]] = double;
  Doubles squared_error = {}, squared_norm = {};
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    Floats value, other;
    std::memcpy(&value, values + i, sizeof(value));
    std::memcpy(&other, restored + i, sizeof(other));
    const auto difference = __builtin_convertvector(value - other, Doubles);
    const auto wide = __builtin_convertvector(value, Doubles);
    squared_error += difference * difference;
    squared_norm += wide * wide;
  }
  for (int64_t i = whole; i < n; ++i) {
    const double difference = values[i] - restored[i], wide = values[i];
    squared_error[i - whole] += difference * difference;
    squared_norm[i - whole] += wide * wide;
  }
  int32_t largest = 0;
  for (int64_t i = 0; i < n; ++i)
    largest = std::max(largest, static_cast<int32_t>(magnitude_bits(values[i] - restored[i])));
  for (int lane = 0; lane < kLanes; ++lane) {
    error.squared_error += squared_error[lane];
    error.squared_norm += squared_norm[lane];
  }
  error.max_abs = std::max(error.max_abs, std::bit_cast<float>(largest));
}

void encode_bf16(const float* values, int64_t n, uint16_t* data, float* restored) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(values[i]);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    data[i] = static_cast<uint16_t>(rounded);
    restored[i] = std::bit_cast<float>(rounded << 16);
  }
}

// One group of a symmetric integer format: scale = absmax / divisor in bf16 (2^-7 where that is 0), q = the
// nearest integer to value / scale in low .. high.
struct IntegerRule {
  float divisor, low, high;
};

inline uint16_t encode_group(const float* values, int64_t n, const IntegerRule& rule, float* q,
                             float* restored) {
  uint16_t bits = base::f32_to_bf16(std::bit_cast<float>(max_magnitude(values, n)) / rule.divisor);
  if (bits == 0) bits = base::f32_to_bf16(0x1p-7f);
  const float scale = base::bf16_to_f32(bits);
  for (int64_t i = 0; i < n; ++i) {
    // Scales of a few bits (subnormal bf16) make quotients that are far off, never 2^22.
    q[i] = clamp(round_to_int(values[i] / scale), rule.low, rule.high);
    restored[i] = q[i] * scale;
  }
  return bits;
}

void encode_int4(const float* values, int64_t n, uint8_t* data, uint16_t* scales, float* restored) {
  constexpr IntegerRule kRule = {7.5f, -8.0f, 7.0f};
  for (int64_t g = 0; g < n / kInt4Group; ++g) {
    float q[kInt4Group];
    scales[g] = encode_group(values + g * kInt4Group, kInt4Group, kRule, q, restored + g * kInt4Group);
    for (int64_t b = 0; b < kInt4Group / 2; ++b) {
      const int low = static_cast<int>(q[2 * b]) + 8, high = static_cast<int>(q[2 * b + 1]) + 8;
      data[g * (kInt4Group / 2) + b] = static_cast<uint8_t>(low | high << 4);
    }
  }
}

void encode_int8(const float* values, int64_t n, int8_t* data, uint16_t* scales, float* restored) {
  constexpr IntegerRule kRule = {127.0f, -127.0f, 127.0f};
  for (int64_t begin = 0; begin < n; begin += kInt8Group) {
    float q[kInt8Group];
    const int64_t count = std::min(kInt8Group, n - begin);
    scales[begin / kInt8Group] = encode_group(values + begin, count, kRule, q, restored + begin);
    for (int64_t i = 0; i < count; ++i) data[begin + i] = static_cast<int8_t>(static_cast<int>(q[i]));
  }
}

// One row of one block, n <= 128, to e4m3: saturated at 448, ties to even. Normal numbers round their 20 low
// fraction bits away; below 2^-6 the step is 2^-9, which is the last bit of 2^14.
void encode_fp8(const float* values, int64_t n, float scale, uint8_t* data, float* restored) {
  float scaled[kFp8Block], subnormal[kFp8Block];
  uint32_t codes[kFp8Block];
  for (int64_t i = 0; i < n; ++i) {
    scaled[i] = values[i] / scale;
    const auto bits = static_cast<int32_t>(magnitude_bits(scaled[i]));
    codes[i] = static_cast<uint32_t>(std::min(bits, std::bit_cast<int32_t>(kE4m3Max)));
    subnormal[i] = std::bit_cast<float>(codes[i]) + 0x1p14f;
  }
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = codes[i];
    const uint32_t normal = ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
    const uint32_t code = bits < 0x3c800000u ? std::bit_cast<uint32_t>(subnormal[i]) & 0xffu : normal;
    codes[i] = code | (std::bit_cast<uint32_t>(scaled[i]) >> 24 & 0x80u);
    data[i] = static_cast<uint8_t>(codes[i]);
  }
  for (int64_t i = 0; i < n; ++i) restored[i] = decode_e4m3(codes[i]) * scale;
}

void decode_row(const QuantizeJob& job, int64_t row, float* dst) {
  const int64_t in = job.values.shape.in_features;
  switch (job.source) {
    case ValueSource::kF32:
      std::copy_n(static_cast<const float*>(job.values.data) + row * in, in, dst);
      break;
    case ValueSource::kBf16:
      decode_bf16(static_cast<const uint16_t*>(job.values.data) + row * in, in, dst);
      break;
    case ValueSource::kInt4G32:
      decode_int4(static_cast<const uint8_t*>(job.values.data) + row * (in / 2),
                  static_cast<const uint16_t*>(job.values.scales) + row * (in / kInt4Group), in, dst);
      break;
    case ValueSource::kFp8Block128:
      decode_fp8(static_cast<const uint8_t*>(job.values.data) + row * in,
                 static_cast<const float*>(job.values.scales) + row / kFp8Block * blocks(in, kFp8Block), in,
                 dst);
      break;
  }
}

// `rows` rows from `first`, a block row of fp8; decoded twice, as the scale needs all 128 rows.
void quantize_fp8_rows(const QuantizeJob& job, int64_t first, int64_t rows, float* values, float* restored,
                       QuantizeError& error) {
  const int64_t in = job.values.shape.in_features, columns = blocks(in, kFp8Block);
  float* scales = static_cast<float*>(job.scales) + first / kFp8Block * columns;
  std::fill_n(scales, columns, 0.0f);
  for (int64_t row = first; row < first + rows; ++row) {
    decode_row(job, row, values);
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t count = std::min(kFp8Block, in - c * kFp8Block);
      const float absmax = std::bit_cast<float>(max_magnitude(values + c * kFp8Block, count));
      error.finite = error.finite && magnitude_bits(absmax) < kInfinity;
      scales[c] = std::max(scales[c], absmax);
    }
  }
  for (int64_t c = 0; c < columns; ++c) {
    const float scale = scales[c] / kE4m3Max;
    scales[c] = scale > 0 ? scale : 1.0f;
  }
  for (int64_t row = first; row < first + rows; ++row) {
    decode_row(job, row, values);
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t begin = c * kFp8Block;
      encode_fp8(values + begin, std::min(kFp8Block, in - begin), scales[c],
                 static_cast<uint8_t*>(job.data) + row * in + begin, restored + begin);
    }
    add_error(values, restored, in, error);
  }
}

void quantize_row(const QuantizeJob& job, int64_t row, float* values, float* restored, QuantizeError& error) {
  const int64_t in = job.values.shape.in_features;
  decode_row(job, row, values);
  error.finite = error.finite && max_magnitude(values, in) < kInfinity;
  if (!error.finite) return;
  auto* scales = static_cast<uint16_t*>(job.scales);
  if (job.target == QuantizeTarget::kBf16)
    encode_bf16(values, in, static_cast<uint16_t*>(job.data) + row * in, restored);
  else if (job.target == QuantizeTarget::kInt4G32)
    encode_int4(values, in, static_cast<uint8_t*>(job.data) + row * (in / 2),
                scales + row * (in / kInt4Group), restored);
  else
    encode_int8(values, in, static_cast<int8_t*>(job.data) + row * in, scales + row * blocks(in, kInt8Group),
                restored);
  add_error(values, restored, in, error);
}

// `values` and `restored` hold a row each.
QuantizeError quantize_all(const QuantizeJob& job, float* values, float* restored) {
  QuantizeError error;
  const int64_t step = job.target == QuantizeTarget::kFp8Block128 ? kFp8Block : 1;
  for (int64_t row = 0; row < job.values.shape.out_features && error.finite; row += step) {
    if (step == 1)
      quantize_row(job, row, values, restored, error);
    else
      quantize_fp8_rows(job, row, std::min(step, job.values.shape.out_features - row), values, restored,
                        error);
  }
  return error;
}
