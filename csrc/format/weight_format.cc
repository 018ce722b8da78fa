#include "format/weight_format.h"

#include <array>
#include <initializer_list>

#include "format/bf16.h"
#include "format/f16.h"
#include "format/f32.h"
#include "format/format_info.h"
#include "format/fp8_block128.h"
#include "format/fp8_channel.h"
#include "format/grouped_formats.h"
#include "format/int8_g128.h"
#include "format/mxfp8.h"

namespace proa::format {
namespace {

constexpr std::array<std::string_view, kNumFormats> kNames = {
    "f32",       "bf16",         "f16",          "int4_g32",      "int4_g64",
    "int4_g128", "int4_g32_f16", "int4_g64_f16", "int4_g128_f16", "int8_g32_f16",
    "int8_g128", "fp8_block128", "fp8_channel",  "mxfp8",         "mxfp4",
    "nvfp4",     "q4_1",         "q5_0",         "q5_1",          "iq4_nl",
    "q2_k",      "q3_k",         "q4_k",         "q5_k",          "q6_k"};

using FormatTable = std::array<FormatInfo, kNumFormats>;

template <class... F>
constexpr FormatTable table_of(std::initializer_list<FormatInfo> infos, FormatList<F...>) noexcept {
  FormatTable table{};
  for (size_t i = 0; i < table.size(); ++i) {
    table[i].format = static_cast<WeightFormat>(i);
    table[i].name = kNames[i];
    table[i].reject = any_shape;
  }
  for (const FormatInfo& info : infos) table[static_cast<size_t>(info.format)] = info;
  ((table[static_cast<size_t>(F::kFormat)] = kGroupedInfo<F>), ...);
  return table;
}

// A format that is not in the list has its name only.
constexpr FormatTable kFormats = table_of({f32::kInfo, bf16::kInfo, f16::kInfo, int8_g128::kInfo,
                                           fp8_block128::kInfo, fp8_channel::kInfo, mxfp8::kInfo},
                                          GroupedFormats{});

constexpr bool names_agree() noexcept {
  for (size_t i = 0; i < kFormats.size(); ++i)
    if (kFormats[i].name != kNames[i] || kFormats[i].format != static_cast<WeightFormat>(i)) return false;
  return true;
}
static_assert(names_agree(), "kNames is in the order of WeightFormat, with the names of the headers");

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
