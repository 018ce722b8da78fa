// The trunk operators: norms, rotary embedding, KV cache writes, attention, embedding.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "bindings/array.h"
#include "bindings/pool.h"
#include "ops/paged_attention.h"
#include "ops/row_ops.h"

namespace nb = nanobind;

namespace proa::bindings {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

[[noreturn]] void fail(const char* function, const std::string& expected, const std::string& got) {
  throw std::invalid_argument(std::string("[") + function + "] expected " + expected + ", got " + got);
}

// Throws unless every entry of a 1-d int32 array lies in [0, limit).
void check_range(const Array& ids, int64_t limit) {
  const auto* data = ids.data<const int32_t>();
  for (int64_t i = 0; i < ids.size(0); ++i)
    if (data[i] < 0 || data[i] >= limit)
      ids.fail("entries in 0 .. " + std::to_string(limit - 1),
               std::to_string(data[i]) + " at " + std::to_string(i));
}

void check_eps(const char* function, float eps) {
  if (!(eps >= 0) || std::isinf(eps))
    fail(function, "eps to be finite and not negative", std::to_string(eps));
}

template <class T>
ops::Rows<T> rows_of(const Array& a) {
  if (a.rank() == 2) return {a.data<T>(), a.size(0), 1, a.size(1), a.stride(0), 0};
  return {a.data<T>(), a.size(0), a.size(1), a.size(2), a.stride(0), a.stride(1)};
}

void rms_norm(const Pool& pool, nb::handle x_arg, nb::handle weight_arg, float eps, nb::handle out_arg) {
  const Array x("rms_norm", "x", x_arg, Access::kRead),
      weight("rms_norm", "weight", weight_arg, Access::kRead),
      out("rms_norm", "out", out_arg, Access::kWrite);
  if (x.rank() == 3)
    x.expect(DType::kF32, {kAnySize, kAnySize, kAnySize}, Layout::kRows);
  else
    x.expect(DType::kF32, {kAnySize, kAnySize}, Layout::kRows);
  weight.expect(DType::kF32, {x.size(x.rank() - 1)});
  if (x.rank() == 3)
    out.expect(DType::kF32, {x.size(0), x.size(1), x.size(2)}, Layout::kRows);
  else
    out.expect(DType::kF32, {x.size(0), x.size(1)}, Layout::kRows);
  check_eps("rms_norm", eps);
  const auto threads = pool.use();
  const nb::gil_scoped_release release;
  ops::rms_norm(*threads, rows_of<const float>(x), weight.data<const float>(), eps, rows_of<float>(out));
}

void add_rms_norm(const Pool& pool, nb::handle residual_arg, nb::handle delta_arg, nb::handle weight_arg,
                  float eps, nb::handle out_arg) {
  constexpr const char* kName = "add_rms_norm";
  const Array residual(kName, "residual", residual_arg, Access::kWrite),
      delta(kName, "delta", delta_arg, Access::kRead), weight(kName, "weight", weight_arg, Access::kRead),
      out(kName, "out", out_arg, Access::kWrite);
  residual.expect(DType::kF32, {kAnySize, kAnySize}, Layout::kRows);
  delta.expect(DType::kF32, {residual.size(0), residual.size(1)}, Layout::kRows);
  weight.expect(DType::kF32, {residual.size(1)});
  out.expect(DType::kF32, {residual.size(0), residual.size(1)}, Layout::kRows);
  check_eps(kName, eps);
  const auto threads = pool.use();
  const nb::gil_scoped_release release;
  ops::add_rms_norm(*threads, rows_of<float>(residual), rows_of<const float>(delta),
                    weight.data<const float>(), eps, rows_of<float>(out));
}

void rope(const Pool& pool, nb::handle x_arg, nb::handle cos_arg, nb::handle sin_arg,
          nb::handle positions_arg, int64_t offset, bool interleaved) {
  const Array x("rope", "x", x_arg, Access::kWrite), cos("rope", "cos", cos_arg, Access::kRead),
      sin("rope", "sin", sin_arg, Access::kRead),
      positions("rope", "positions", positions_arg, Access::kRead);
  x.expect(DType::kF32, {kAnySize, kAnySize, kAnySize}, Layout::kRows);
  cos.expect(DType::kF32, {kAnySize, kAnySize});
  sin.expect(DType::kF32, {cos.size(0), cos.size(1)});
  positions.expect(DType::kI32, {x.size(0)});
  const int64_t rotated = 2 * cos.size(1);
  if (offset < 0 || offset > x.size(2) - rotated)
    fail(
        "rope",
        "offset in 0 .. head size - " + std::to_string(rotated) + " = " + std::to_string(x.size(2) - rotated),
        std::to_string(offset));
  check_range(positions, cos.size(0));
  const auto threads = pool.use();
  const ops::Rope args{.cos = cos.data<const float>(),
                       .sin = sin.data<const float>(),
                       .half = cos.size(1),
                       .positions = positions.data<const int32_t>(),
                       .offset = offset,
                       .interleaved = interleaved};
  const nb::gil_scoped_release release;
  ops::rope(*threads, rows_of<float>(x), args);
}

// Checks an array that may be float or bf16; true when it is bf16.
bool expect_float(const Array& a, std::initializer_list<int64_t> shape) {
  const bool bf16 = a.dtype() == DType::kBf16 || a.dtype() == DType::kU16;
  a.expect(bf16 ? DType::kBf16 : DType::kF32, shape, Layout::kRows);
  return bf16;
}

void kv_store(const Pool& pool, nb::handle src_arg, nb::handle cache_arg, nb::handle slots_arg) {
  const Array src("kv_store", "src", src_arg, Access::kRead),
      cache("kv_store", "cache", cache_arg, Access::kWrite),
      slots("kv_store", "slots", slots_arg, Access::kRead);
  src.expect(DType::kF32, {kAnySize, kAnySize}, Layout::kRows);
  const bool bf16 = expect_float(cache, {kAnySize, src.size(1)});
  slots.expect(DType::kI32, {src.size(0)});
  check_range(slots, cache.size(0));
  const auto threads = pool.use();
  const nb::gil_scoped_release release;
  if (bf16)
    ops::kv_store(*threads, rows_of<const float>(src), slots.data<const int32_t>(), rows_of<uint16_t>(cache));
  else
    ops::kv_store(*threads, rows_of<const float>(src), slots.data<const int32_t>(), rows_of<float>(cache));
}

void embedding_rows(const Pool& pool, nb::handle table_arg, nb::handle ids_arg, nb::handle out_arg) {
  const Array table("embedding_rows", "table", table_arg, Access::kRead),
      ids("embedding_rows", "ids", ids_arg, Access::kRead),
      out("embedding_rows", "out", out_arg, Access::kWrite);
  const bool bf16 = expect_float(table, {kAnySize, kAnySize});
  ids.expect(DType::kI32, {kAnySize});
  out.expect(DType::kF32, {ids.size(0), table.size(1)}, Layout::kRows);
  check_range(ids, table.size(0));
  const auto threads = pool.use();
  const nb::gil_scoped_release release;
  if (bf16)
    ops::embedding_rows(*threads, rows_of<const uint16_t>(table), ids.data<const int32_t>(),
                        rows_of<float>(out));
  else
    ops::embedding_rows(*threads, rows_of<const float>(table), ids.data<const int32_t>(),
                        rows_of<float>(out));
}

// Every block that a token of sequence_ids sees must lie inside the cache.
void check_blocks(const Array& tables, int64_t block_size, int64_t num_slots, const ops::PagedAttention& a) {
  const int64_t num_blocks = num_slots / block_size;
  for (int64_t t = 0; t < a.num_tokens;) {
    const int32_t sequence = a.sequence_ids[t];
    int32_t last = 0;
    for (; t < a.num_tokens && a.sequence_ids[t] == sequence; ++t) last = std::max(last, a.positions[t]);
    const int32_t* blocks = a.block_tables + sequence * a.max_blocks;
    for (int64_t b = 0; b <= last / block_size; ++b)
      if (blocks[b] < 0 || blocks[b] >= num_blocks)
        tables.fail(
            "entries in 0 .. " + std::to_string(num_blocks - 1) + " up to position " + std::to_string(last),
            std::to_string(blocks[b]) + " at [" + std::to_string(sequence) + ", " + std::to_string(b) + "]");
  }
}

void paged_attention(const Pool& pool, nb::handle q_arg, nb::handle k_arg, nb::handle v_arg,
                     nb::handle tables_arg, int64_t block_size, nb::handle sequences_arg,
                     nb::handle positions_arg, float scale, nb::handle out_arg) {
  constexpr const char* kName = "paged_attention";
  const Array q(kName, "q", q_arg, Access::kRead), k(kName, "k_cache", k_arg, Access::kRead),
      v(kName, "v_cache", v_arg, Access::kRead), tables(kName, "block_tables", tables_arg, Access::kRead),
      sequences(kName, "sequence_ids", sequences_arg, Access::kRead),
      positions(kName, "positions", positions_arg, Access::kRead), out(kName, "out", out_arg, Access::kWrite);
  q.expect(DType::kF32, {kAnySize, kAnySize, kAnySize}, Layout::kRows);
  const bool bf16 = expect_float(k, {kAnySize, kAnySize, q.size(2)});
  v.expect(k.dtype(), {k.size(0), k.size(1), kAnySize}, Layout::kRows);
  tables.expect(DType::kI32, {kAnySize, kAnySize});
  sequences.expect(DType::kI32, {q.size(0)});
  positions.expect(DType::kI32, {q.size(0)});
  out.expect(DType::kF32, {q.size(0), q.size(1), v.size(2)}, Layout::kRows);
  if (k.size(1) < 1 || q.size(1) % k.size(1) != 0)
    k.fail("a number of kv heads that divides " + std::to_string(q.size(1)), std::to_string(k.size(1)));
  if (block_size < 1 || block_size > kMaxInt32)
    fail(kName, "block_size in 1 .. 2147483647", std::to_string(block_size));
  if (!std::isfinite(scale)) fail(kName, "a finite scale", std::to_string(scale));
  if (q.size(0) > kMaxInt32 || q.size(1) > kMaxInt32) fail(kName, "int32 sizes", q.describe());
  check_range(sequences, tables.size(0));
  // A table wider than int32 positions reach is no error, but no position may exceed INT32_MAX - 1.
  const int64_t max_blocks = std::min(tables.size(1), kMaxInt32);
  check_range(positions, std::min(max_blocks * block_size, kMaxInt32));
  const ops::PagedAttention a{.num_tokens = q.size(0),
                              .num_heads = q.size(1),
                              .num_kv_heads = k.size(1),
                              .key_dim = q.size(2),
                              .value_dim = v.size(2),
                              .scale = scale,
                              .query = q.data<const float>(),
                              .query_stride = {q.stride(0), q.stride(1)},
                              .out = out.data<float>(),
                              .out_stride = {out.stride(0), out.stride(1)},
                              .bf16 = bf16,
                              .keys = k.data<const void>(),
                              .key_stride = {k.stride(0), k.stride(1)},
                              .values = v.data<const void>(),
                              .value_stride = {v.stride(0), v.stride(1)},
                              .block_tables = tables.data<const int32_t>(),
                              .max_blocks = tables.size(1),
                              .block_size = block_size,
                              .sequence_ids = sequences.data<const int32_t>(),
                              .positions = positions.data<const int32_t>()};
  check_blocks(tables, block_size, k.size(0), a);
  const auto threads = pool.use();
  const nb::gil_scoped_release release;
  ops::paged_attention(*threads, a);
}

}  // namespace

void init_ops(nb::module_& m) {
  m.def("rms_norm", &rms_norm, nb::arg("pool"), nb::arg("x"), nb::arg("weight"), nb::arg("eps"),
        nb::arg("out"));
  m.def("add_rms_norm", &add_rms_norm, nb::arg("pool"), nb::arg("residual"), nb::arg("delta"),
        nb::arg("weight"), nb::arg("eps"), nb::arg("out"));
  m.def("rope", &rope, nb::arg("pool"), nb::arg("x"), nb::arg("cos"), nb::arg("sin"), nb::arg("positions"),
        nb::arg("offset") = 0, nb::arg("interleaved") = false);
  m.def("kv_store", &kv_store, nb::arg("pool"), nb::arg("src"), nb::arg("cache"), nb::arg("slots"));
  m.def("paged_attention", &paged_attention, nb::arg("pool"), nb::arg("q"), nb::arg("k_cache"),
        nb::arg("v_cache"), nb::arg("block_tables"), nb::arg("block_size"), nb::arg("sequence_ids"),
        nb::arg("positions"), nb::arg("scale"), nb::arg("out"));
  m.def("embedding_rows", &embedding_rows, nb::arg("pool"), nb::arg("table"), nb::arg("ids"), nb::arg("out"));
}

}  // namespace proa::bindings
