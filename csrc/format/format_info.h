// What a weight format is to the code that names no format: a row of a table (weight_format.cc). Each
// format's header ends with its own row, `kInfo`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "format/weight_format.h"

namespace proa::format {

// What the elements of a checkpoint array mean. kBf16, kF16: bits in uint16; kCode: bytes, meaning given by
// the format's header; kE4m3, kE8m0: bytes; kBlocks: bytes of GGUF blocks; kNone: there is no such array.
enum class Element : uint8_t { kNone, kF32, kBf16, kF16, kInt8, kCode, kE4m3, kE8m0, kBlocks };

struct ArraySpec {
  Element element = Element::kNone;
  int rank = 0;
  int64_t size[2] = {0, 0};
};

constexpr ArraySpec matrix(Element element, int64_t rows, int64_t columns) noexcept {
  return {element, 2, {rows, columns}};
}

// The arrays of a RawWeight. data.element is kNone when the format does not come in that layout.
struct RawSpec {
  ArraySpec data;
  ArraySpec scales;
};

// All functions but `reject` may count on a shape that `reject` accepts.
struct FormatInfo {
  WeightFormat format;
  std::string_view name;
  // nullptr: the format can hold the shape, else the reason.
  const char* (*reject)(const Shape& shape) noexcept;
  RawSpec (*raw_spec)(const Shape& shape, RawLayout layout) noexcept;
  bool has_global_scale;  // RawWeight::global_scale may be other than 1
  // Bytes of a panel, padding not included.
  int64_t (*panel_bytes)(int64_t in_features) noexcept;
  // Writes panel `panel` to `dst`. Rows past out_features decode to 0.
  void (*pack_panel)(const RawWeight& raw, int64_t panel, std::byte* dst) noexcept;
  // Element k of row `row` (0 .. 15) of a panel.
  float (*decode)(const std::byte* panel, int64_t in_features, int64_t row, int64_t k) noexcept;
  bool has_minimum = false;  // codes of a group are above one
};

inline const char* any_shape(const Shape&) noexcept { return nullptr; }

// Rows of `panel` that are outputs, not padding.
constexpr int64_t rows_of_panel(const Shape& shape, int64_t panel) noexcept {
  const int64_t rows = shape.out_features - panel * kPanelRows;
  return rows < kPanelRows ? rows : kPanelRows;
}

constexpr int64_t ceil_div(int64_t a, int64_t b) noexcept { return (a + b - 1) / b; }

// The row of `format`; functions are nullptr for a format that has only its name yet.
const FormatInfo& format_info(WeightFormat format) noexcept;

}  // namespace proa::format
