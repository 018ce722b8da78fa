// Weight formats and the packed layout that every kernel reads.
//
// Packed layout of a linear [out, in], the same for all ISAs so that packed weights move between machines:
//   out is cut into panels of 16 rows (the last one padded with zero rows); panel p holds rows 16p .. 16p+15
//   and everything about them, so any range of panels stands for itself. It stores them column by column, so
//   that the 16 lanes of a vector are 16 OUTPUT rows of one input column:
//
//     panel 0 | panel 1 | ... | panel P-1
//     panel:  (k=0: r0 r1 .. r15) (k=1: r0 r1 .. r15) ... (k=in-1: ...) scales, if any, padding to 64 bytes
//
// One header per format says what stands at a column. All panels start at multiples of 64 bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace proa::format {

enum class WeightFormat : uint8_t {
  kF32,
  kBf16,
  kF16,
  kInt4G32,
  kInt4G64,
  kInt4G128,
  kInt4G32F16,
  kInt4G64F16,
  kInt4G128F16,
  kInt8G32F16,
  kInt8G128,
  kFp8Block128,
  kFp8Channel,
  kMxFp8,
  kMxFp4,
  kNvFp4,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kIq4Nl,
  kQ2K,
  kQ3K,
  kQ4K,
  kQ5K,
  kQ6K,
};
inline constexpr int kNumFormats = static_cast<int>(WeightFormat::kQ6K) + 1;

inline constexpr int64_t kPanelRows = 16;
inline constexpr int64_t kFp8Block = 128;
inline constexpr int64_t kInt4Group = 32;

struct Shape {
  int64_t out_features = 0;
  int64_t in_features = 0;

  int64_t panels() const noexcept { return (out_features + kPanelRows - 1) / kPanelRows; }
};

// kRows: matrices of codes and scales. kGgml: rows of GGUF blocks, uint8 [out, bytes of a row], no scales.
enum class RawLayout : uint8_t { kRows, kGgml };

// A linear as the checkpoint stores it, row-major; format_info().raw_spec says which arrays a format has.
struct RawWeight {
  Shape shape;
  const void* data = nullptr;
  const void* scales = nullptr;
  float global_scale = 1.0f;
  RawLayout layout = RawLayout::kRows;
};

std::string_view format_name(WeightFormat format) noexcept;
std::optional<WeightFormat> parse_format(std::string_view name) noexcept;

int64_t panel_bytes(WeightFormat format, int64_t in_features) noexcept;
int64_t packed_bytes(WeightFormat format, const Shape& shape) noexcept;

// Packs panels [panel_begin, panel_end) of `raw` into their place in `packed` (packed_bytes long, 64-byte
// aligned). Disjoint ranges may run on different threads. Padding behind a panel is left as it is.
void pack_panels(WeightFormat format, const RawWeight& raw, std::span<std::byte> packed, int64_t panel_begin,
                 int64_t panel_end) noexcept;

// The f32 values of a packed weight, row-major [out, in].
void unpack(WeightFormat format, const Shape& shape, std::span<const std::byte> packed,
            std::span<float> values) noexcept;

}  // namespace proa::format
