// Tables of cells, one per grouped format.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

#include "format/grouped_formats.h"
#include "gemm/kernel.h"

namespace proa::gemm {

// "prefix" + F::kName as a constant.
template <const char* kPrefix, class F>
struct CellName {
  static constexpr std::string_view kParts[2] = {kPrefix, F::kName};
  static constexpr auto kText = [] {
    std::array<char, kParts[0].size() + kParts[1].size() + 1> text{};
    size_t n = 0;
    for (const std::string_view part : kParts)
      for (const char c : part) text[n++] = c;
    return text;
  }();
};

// Make: has `template <class F> static constexpr Kernel cell(const char* name)` and kPrefix.
template <class Make, class... F>
constexpr std::array<Kernel, sizeof...(F)> grouped_cells(format::FormatList<F...>) noexcept {
  return {Make::template cell<F>(CellName<Make::kPrefix, F>::kText.data())...};
}

}  // namespace proa::gemm
