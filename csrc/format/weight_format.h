// Weight formats and the packed layout that every kernel reads.
//
// Packed layout of a linear [out, in], the same for all ISAs so that packed weights move between machines:
//   out is cut into panels of 16 rows (the last one padded with zero rows); panel p holds rows 16p .. 16p+15
//   and stores them column by column, so that the 16 lanes of a vector are 16 OUTPUT rows of one input
//   column:
//
//     panel 0 | panel 1 | ... | panel P-1 | block scales (fp8 only)
//     panel:  (k=0: r0 r1 .. r15) (k=1: r0 r1 .. r15) ... (k=in-1: ...) padding to 64 bytes
//
// One header per format says what stands at a column. All parts start at multiples of 64 bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace proa::format {

enum class WeightFormat : uint8_t { kF32, kBf16, kInt4G32, kFp8Block128 };

inline constexpr int64_t kPanelRows = 16;
inline constexpr int64_t kFp8Block = 128;
inline constexpr int64_t kInt4Group = 32;

struct Shape {
  int64_t out_features = 0;
  int64_t in_features = 0;

  int64_t panels() const noexcept { return (out_features + kPanelRows - 1) / kPanelRows; }
};

// A linear as the checkpoint stores it, row-major. data: f32 [out, in] | bf16 [out, in] | int4 nibbles uint8
// [out, in/2] | fp8 uint8 [out, in]. scales: int4 bf16 [out, in/32]; fp8 f32 [ceil(out/128), ceil(in/128)];
// otherwise unused.
struct RawWeight {
  Shape shape;
  const void* data = nullptr;
  const void* scales = nullptr;
};

std::string_view format_name(WeightFormat format) noexcept;
std::optional<WeightFormat> parse_format(std::string_view name) noexcept;

int64_t panel_bytes(WeightFormat format, int64_t in_features) noexcept;
// Bytes of all panels and the scales behind them.
int64_t packed_bytes(WeightFormat format, const Shape& shape) noexcept;
// Where the fp8 block scales start inside a packed weight.
int64_t fp8_scales_offset(const Shape& shape) noexcept;

// Packs panels [panel_begin, panel_end) of `raw` into their place in `packed` (packed_bytes long, 64-byte
// aligned). Disjoint ranges may run on different threads. Padding behind a panel is left as it is.
void pack_panels(WeightFormat format, const RawWeight& raw, std::span<std::byte> packed, int64_t panel_begin,
                 int64_t panel_end) noexcept;

// The f32 values of a packed weight, row-major [out, in].
void unpack(WeightFormat format, const Shape& shape, std::span<const std::byte> packed,
            std::span<float> values) noexcept;

}  // namespace proa::format
