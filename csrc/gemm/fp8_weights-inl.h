// The weights of the fp8 formats for f32_act-inl.h. Include inside an ISA's target region and namespace,
// after f32_act-inl.h and load_fp8_line, which makes floats of the 4 columns of a 64-byte line.

struct Fp8Block128 {
  static constexpr auto kFormat = format::WeightFormat::kFp8Block128;
  static constexpr Scaling kScaling = Scaling::kPerBlock;
  static constexpr int64_t kColumnBytes = format::fp8_block128::kColumnBytes;
  static void load_line(const std::byte* line, Vec (&columns)[4]) { load_fp8_line(line, columns); }
};

struct Fp8Channel {
  static constexpr auto kFormat = format::WeightFormat::kFp8Channel;
  static constexpr Scaling kScaling = Scaling::kPerRow;
  static constexpr int64_t kColumnBytes = format::fp8_channel::kColumnBytes;
  static const float* row_scales(const std::byte* panel, int64_t in_features) {
    return format::fp8_channel::row_scales(panel, in_features);
  }
  static void load_line(const std::byte* line, Vec (&columns)[4]) { load_fp8_line(line, columns); }
};

// The scale is a power of two: its product with an element is exact, or infinite.
struct MxFp8 {
  static constexpr auto kFormat = format::WeightFormat::kMxFp8;
  static constexpr Scaling kScaling = Scaling::kInColumns;
  static constexpr int kGroup = format::mxfp8::kGroup;
  static constexpr int kLoad = 4;

  struct Group {
    const std::byte* codes;
    Vec scale;
    void load(int i, Vec (&columns)[kLoad]) const {
      load_fp8_line(codes + 64 * i, columns);
#pragma GCC unroll 4
      for (int u = 0; u < kLoad; ++u) columns[u] = Vec::mul(columns[u], scale);
    }
  };
  static constexpr int64_t offset(int64_t k) {
    return k * format::mxfp8::kBlockBytes / format::mxfp8::kBlockColumns;
  }
  static Group group(const std::byte* panel, int64_t k, int64_t) {
    return {panel + format::mxfp8::column_offset(k), Vec::load_e8m0(panel + format::mxfp8::scales_offset(k))};
  }
};
