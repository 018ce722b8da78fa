#include "gemm/linear.h"

#include <algorithm>
#include <memory>

#include "gemm/act_budget.h"
#include "gemm/act_format.h"

namespace proa::gemm {
namespace {

// Below this many multiplications a fork costs more than it saves.
constexpr int64_t kTinyProducts = 32 * 1024;
constexpr int64_t kTokensPerItem = 144;
constexpr int64_t kPanelsPerItem = 4;
constexpr int64_t kRowsPerItem = kPanelsPerItem * format::kPanelRows;

// The activations of all jobs as the cell wants them: job j, token t at row j * num_tokens + t, or the floats
// themselves.
class JobActivations {
 public:
  JobActivations(runtime::ThreadPool& pool, std::span<const LinearJob> jobs, int64_t num_tokens, bool tiny)
      : jobs_(jobs), num_tokens_(num_tokens) {
    const Kernel& kernel = *jobs[0].weight->kernel;
    if (kernel.quantize == nullptr) return;
    const int64_t in = jobs[0].weight->shape.in_features;
    row_bytes_ = act_row_bytes(kernel.act, in);
    const int64_t rows = static_cast<int64_t>(jobs.size()) * num_tokens;
    quantized_ = std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(rows * row_bytes_));
    const auto quantize = [&](int64_t begin, int64_t end, int) noexcept {
      for (int64_t row = begin; row < end; ++row) {
        const LinearJob& job = jobs[static_cast<size_t>(row / num_tokens)];
        const float* x = job.x + row % num_tokens * job.x_stride;
        kernel.quantize(x, 0, in, in, fine_above(kernel, x, in, act_budget(kernel).input),
                        quantized_.get() + row * row_bytes_);
      }
    };
    if (tiny || rows * in < kTinyProducts)
      quantize(0, rows, 0);
    else
      pool.parallel_for(rows, 4, quantize);
  }

  ActRows rows(size_t job, int64_t token) const noexcept {
    if (quantized_ != nullptr)
      return {quantized_.get() + (static_cast<int64_t>(job) * num_tokens_ + token) * row_bytes_, row_bytes_};
    const int64_t stride = jobs_[job].x_stride;
    return {reinterpret_cast<const std::byte*>(jobs_[job].x + token * stride),
            stride * static_cast<int64_t>(sizeof(float))};
  }

 private:
  std::span<const LinearJob> jobs_;
  int64_t num_tokens_;
  int64_t row_bytes_ = 0;
  std::unique_ptr<std::byte[]> quantized_;
};

void add_tile(const LinearJob& job, const float* tile, int64_t first_row, int64_t rows, int64_t token,
              int64_t tokens) noexcept {
  for (int64_t m = 0; m < tokens; ++m, tile += kRowsPerItem) {
    float* out = job.out + (token + m) * job.out_stride + first_row;
    for (int64_t r = 0; r < rows; ++r) {
      const float value = job.bias == nullptr ? tile[r] : tile[r] + job.bias[first_row + r];
      out[r] = job.accumulate ? out[r] + value : value;
    }
  }
}

// Rows [16 * panel, ...) of one job for tokens [token, token + tokens).
void run_item(const LinearJob& job, const ActRows& x, int64_t panel, int64_t token, int64_t tokens) noexcept {
  const PackedWeight& weight = *job.weight;
  const int64_t panel_end = std::min(panel + kPanelsPerItem, weight.shape.panels());
  const int64_t first_row = panel * format::kPanelRows;
  GemmArgs args{weight.bytes.data(), weight.shape, panel, panel_end, x, tokens, nullptr, 0};
  if (job.bias == nullptr && !job.accumulate) {
    args.out = job.out + token * job.out_stride + first_row;
    args.out_stride = job.out_stride;
    weight.kernel->gemm(args);
    return;
  }
  float tile[kTokensPerItem * kRowsPerItem];
  args.out = tile;
  args.out_stride = kRowsPerItem;
  weight.kernel->gemm(args);
  add_tile(job, tile, first_row, std::min(kRowsPerItem, weight.shape.out_features - first_row), token,
           tokens);
}

}  // namespace

void pack_into(runtime::ThreadPool& pool, format::WeightFormat format, const format::RawWeight& raw,
               std::span<std::byte> bytes) noexcept {
  pool.parallel_for(raw.shape.panels(), 4, [&](int64_t begin, int64_t end, int) {
    format::pack_panels(format, raw, bytes, begin, end);
  });
}

PackedWeight pack_weight(runtime::ThreadPool& pool, const Kernel& kernel, const format::RawWeight& raw) {
  const auto bytes = static_cast<size_t>(format::packed_bytes(kernel.weight, raw.shape));
  PackedWeight weight{kernel.weight, raw.shape, &kernel, base::Arena(base::Arena::padded(bytes)), {}};
  weight.bytes = weight.arena.take<std::byte>(bytes);
  pack_into(pool, kernel.weight, raw, weight.bytes);
  return weight;
}

void run_linears(runtime::ThreadPool& pool, std::span<const LinearJob> jobs, int64_t num_tokens) {
  if (jobs.empty() || num_tokens == 0) return;
  const format::Shape shape = jobs[0].weight->shape;
  const int64_t products =
      static_cast<int64_t>(jobs.size()) * num_tokens * shape.out_features * shape.in_features;
  const bool tiny = products < kTinyProducts;
  const JobActivations activations(pool, jobs, num_tokens, tiny);
  const int64_t row_items = (shape.panels() + kPanelsPerItem - 1) / kPanelsPerItem;
  const int64_t token_items = (num_tokens + kTokensPerItem - 1) / kTokensPerItem;
  // Token blocks of one row tile follow each other, so its weights come from memory once.
  const int64_t items = static_cast<int64_t>(jobs.size()) * row_items * token_items;
  const auto run = [&](int64_t begin, int64_t end, int) noexcept {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t token = item % token_items * kTokensPerItem;
      const int64_t tile = item / token_items;
      const auto job = static_cast<size_t>(tile / row_items);
      run_item(jobs[job], activations.rows(job, token), tile % row_items * kPanelsPerItem, token,
               std::min(kTokensPerItem, num_tokens - token));
    }
  };
  if (tiny)
    run(0, items, 0);
  else
    pool.parallel_for(items, 1, run);
}

}  // namespace proa::gemm
