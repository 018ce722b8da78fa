#include "format/weight_format.h"

#include <array>

#include "format/bf16.h"
#include "format/f16.h"
#include "format/f32.h"
#include "format/format_info.h"
#include "format/fp8_block128.h"
#include "format/int4_g32.h"
#include "format/int8_g128.h"

namespace proa::format {
namespace {

// A format with its name only.
constexpr FormatInfo named(WeightFormat format, std::string_view name) noexcept {
  return {format, name, any_shape, nullptr, false, nullptr, nullptr, nullptr};
}

constexpr std::array<FormatInfo, kNumFormats> kFormats = {
    f32::kInfo,
    bf16::kInfo,
    f16::kInfo,
    int4_g32::kInfo,
    named(WeightFormat::kInt4G64, "int4_g64"),
    named(WeightFormat::kInt4G128, "int4_g128"),
    named(WeightFormat::kInt4G32F16, "int4_g32_f16"),
    named(WeightFormat::kInt4G64F16, "int4_g64_f16"),
    named(WeightFormat::kInt4G128F16, "int4_g128_f16"),
    named(WeightFormat::kInt8G32F16, "int8_g32_f16"),
    int8_g128::kInfo,
    fp8_block128::kInfo,
    named(WeightFormat::kFp8Channel, "fp8_channel"),
    named(WeightFormat::kMxFp8, "mxfp8"),
    named(WeightFormat::kMxFp4, "mxfp4"),
    named(WeightFormat::kNvFp4, "nvfp4"),
    named(WeightFormat::kQ4_1, "q4_1"),
    named(WeightFormat::kQ5_0, "q5_0"),
    named(WeightFormat::kQ5_1, "q5_1"),
    named(WeightFormat::kQ2K, "q2_k"),
    named(WeightFormat::kQ3K, "q3_k"),
    named(WeightFormat::kQ4K, "q4_k"),
    named(WeightFormat::kQ5K, "q5_k"),
    named(WeightFormat::kQ6K, "q6_k"),
};

constexpr bool in_order() noexcept {
  for (size_t i = 0; i < kFormats.size(); ++i)
    if (kFormats[i].format != static_cast<WeightFormat>(i)) return false;
  return true;
}
static_assert(in_order(), "kFormats is indexed by WeightFormat");

}  // namespace

const FormatInfo& format_info(WeightFormat format) noexcept { return kFormats[static_cast<size_t>(format)]; }

std::string_view format_name(WeightFormat format) noexcept { return format_info(format).name; }

std::optional<WeightFormat> parse_format(std::string_view name) noexcept {
  for (const FormatInfo& info : kFormats)
    if (info.name == name) return info.format;
  return std::nullopt;
}

int64_t panel_bytes(WeightFormat format, int64_t in_features) noexcept {
  return ceil_div(format_info(format).panel_bytes(in_features), 64) * 64;
}

int64_t packed_bytes(WeightFormat format, const Shape& shape) noexcept {
  return shape.panels() * panel_bytes(format, shape.in_features);
}

void pack_panels(WeightFormat format, const RawWeight& raw, std::span<std::byte> packed, int64_t panel_begin,
                 int64_t panel_end) noexcept {
  const FormatInfo& info = format_info(format);
  const int64_t bytes = panel_bytes(format, raw.shape.in_features);
  for (int64_t panel = panel_begin; panel < panel_end; ++panel)
    info.pack_panel(raw, panel, packed.data() + panel * bytes);
}

void unpack(WeightFormat format, const Shape& shape, std::span<const std::byte> packed,
            std::span<float> values) noexcept {
  const FormatInfo& info = format_info(format);
  const int64_t in = shape.in_features, bytes = panel_bytes(format, in);
  for (int64_t row = 0; row < shape.out_features; ++row) {
    const std::byte* panel = packed.data() + row / kPanelRows * bytes;
    for (int64_t k = 0; k < in; ++k)
      values[static_cast<size_t>(row * in + k)] = info.decode(panel, in, row % kPanelRows, k);
  }
}

}  // namespace proa::format
