#include "format/weight_format.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "format/bf16.h"
#include "format/f32.h"
#include "format/fp8_block128.h"
#include "format/int4_g32.h"

namespace proa::format {
namespace {

constexpr std::array<std::string_view, 4> kNames = {"f32", "bf16", "int4_g32", "fp8_block128"};

constexpr int64_t padded(int64_t bytes) noexcept { return (bytes + 63) / 64 * 64; }

int64_t used_panel_bytes(WeightFormat format, int64_t in_features) noexcept {
  switch (format) {
    case WeightFormat::kF32:
      return in_features * f32::kColumnBytes;
    case WeightFormat::kBf16:
      return in_features * bf16::kColumnBytes;
    case WeightFormat::kFp8Block128:
      return in_features * fp8_block128::kColumnBytes;
    case WeightFormat::kInt4G32:
      return in_features / kInt4Group * int4_g32::kBlockBytes;
  }
  return 0;
}

// Each panel brings the scale row of a block that starts with it.
void copy_fp8_scales(const RawWeight& raw, std::byte* packed, int64_t panel) noexcept {
  if (panel % fp8_block128::kPanelsPerBlock != 0) return;
  const int64_t columns = fp8_block128::block_columns(raw.shape.in_features);
  const int64_t first = panel / fp8_block128::kPanelsPerBlock * columns;
  std::memcpy(packed + fp8_scales_offset(raw.shape) + 4 * first,
              static_cast<const float*>(raw.scales) + first, static_cast<size_t>(4 * columns));
}

void pack_panel(WeightFormat format, const RawWeight& raw, int64_t panel, std::byte* dst) noexcept {
  const int64_t in = raw.shape.in_features;
  const int64_t row = panel * kPanelRows;
  const int64_t rows = std::min(kPanelRows, raw.shape.out_features - row);
  switch (format) {
    case WeightFormat::kF32:
      f32::encode_panel(static_cast<const float*>(raw.data) + row * in, in, rows, dst);
      break;
    case WeightFormat::kBf16:
      bf16::encode_panel(static_cast<const uint16_t*>(raw.data) + row * in, in, rows, dst);
      break;
    case WeightFormat::kFp8Block128:
      fp8_block128::encode_panel(static_cast<const uint8_t*>(raw.data) + row * in, in, rows, dst);
      break;
    case WeightFormat::kInt4G32:
      int4_g32::encode_panel(static_cast<const uint8_t*>(raw.data) + row * (in / 2),
                             static_cast<const uint16_t*>(raw.scales) + row * (in / kInt4Group), in, rows,
                             dst);
      break;
  }
}

float decode(WeightFormat format, const Shape& shape, const std::byte* packed, int64_t row,
             int64_t k) noexcept {
  const std::byte* panel = packed + row / kPanelRows * panel_bytes(format, shape.in_features);
  const int64_t r = row % kPanelRows;
  switch (format) {
    case WeightFormat::kF32:
      return f32::decode(panel, r, k);
    case WeightFormat::kBf16:
      return bf16::decode(panel, r, k);
    case WeightFormat::kInt4G32:
      return static_cast<float>(int4_g32::decode_q(panel, r, k)) *
             int4_g32::decode_scale(panel, r, k / kInt4Group);
    case WeightFormat::kFp8Block128: {
      const auto* scales = reinterpret_cast<const float*>(packed + fp8_scales_offset(shape));
      return fp8_block128::decode(panel, r, k) *
             scales[row / kFp8Block * fp8_block128::block_columns(shape.in_features) + k / kFp8Block];
    }
  }
  return 0.0f;
}

}  // namespace

std::string_view format_name(WeightFormat format) noexcept { return kNames[static_cast<size_t>(format)]; }

std::optional<WeightFormat> parse_format(std::string_view name) noexcept {
  for (size_t i = 0; i < kNames.size(); ++i)
    if (kNames[i] == name) return static_cast<WeightFormat>(i);
  return std::nullopt;
}

int64_t panel_bytes(WeightFormat format, int64_t in_features) noexcept {
  return padded(used_panel_bytes(format, in_features));
}

int64_t fp8_scales_offset(const Shape& shape) noexcept {
  return shape.panels() * panel_bytes(WeightFormat::kFp8Block128, shape.in_features);
}

int64_t packed_bytes(WeightFormat format, const Shape& shape) noexcept {
  int64_t bytes = shape.panels() * panel_bytes(format, shape.in_features);
  if (format == WeightFormat::kFp8Block128)
    bytes += padded(4 * fp8_block128::block_rows(shape.out_features) *
                    fp8_block128::block_columns(shape.in_features));
  return bytes;
}

void pack_panels(WeightFormat format, const RawWeight& raw, std::span<std::byte> packed, int64_t panel_begin,
                 int64_t panel_end) noexcept {
  const int64_t bytes = panel_bytes(format, raw.shape.in_features);
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    pack_panel(format, raw, panel, packed.data() + panel * bytes);
    if (format == WeightFormat::kFp8Block128) copy_fp8_scales(raw, packed.data(), panel);
  }
}

void unpack(WeightFormat format, const Shape& shape, std::span<const std::byte> packed,
            std::span<float> values) noexcept {
  for (int64_t row = 0; row < shape.out_features; ++row)
    for (int64_t k = 0; k < shape.in_features; ++k)
      values[static_cast<size_t>(row * shape.in_features + k)] = decode(format, shape, packed.data(), row, k);
}

}  // namespace proa::format
