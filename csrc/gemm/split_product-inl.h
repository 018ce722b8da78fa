// The product of a chunk of one or two panels with one or two blocks of tokens, for split_act-inl.h.

// What is multiplied: a chunk of one or two panels with the tokens of one or two blocks.
struct Product {
  const std::byte* acts;  // of the first block
  ActTiles layout;
  const std::byte* weights;  // tiles of the first panel
  int64_t weight_panel;      // bytes to those of the second one
  int64_t steps;
  bool first;      // of the chunks: there are no totals yet
  Place from, to;  // totals before and after
  const float* scales[2];
  int64_t rows[2];  // of each block
};

// Sums that await their scale. They are added after the next products have begun: memory that a tile store
// wrote can be read only some time after the store.
struct Pending {
  float (*buffers)[4][kTileFloats];  // Scratch::sums, used in turn
  int buffer = 0;
  int blocks = 0, panels = 0;  // 0: nothing is pending
  bool first = false;
  float scale[2] = {};
  int64_t rows[2] = {};  // of each block
  Place from = {}, to = {};

  void add() noexcept {
    for (int b = 0; b < blocks; ++b)
      for (int p = 0; p < panels; ++p)
        add_one(buffers[buffer][sum_tile(b, p)], Vec::set1(scale[p]), from.tile(b, p), to.tile(b, p),
                rows[b]);
    blocks = 0;
  }
  void add_one(const float* sum, Vec factor, const float* total, float* out,
               int64_t num_rows) const noexcept {
    for (int64_t m = 0; m < num_rows; ++m, sum += kPanelRows)
      Vec::fma(Vec::load(sum), factor, first ? Vec::zero() : Vec::load(total + m * from.row))
          .store(out + m * to.row);
  }
};

// What is done with the sum of block B and panel P; `sums` is where StoreSum puts it.
template <int B, int P>
struct Zero {
  static void run(const Product&, float (*)[kTileFloats]) noexcept { tile_zero<sum_tile(B, P)>(); }
};

template <int B, int P>
struct LoadTotal {
  static void run(const Product& p, float (*)[kTileFloats]) noexcept {
    tile_load<sum_tile(B, P)>(p.from.tile(B, P), p.from.row_bytes());
  }
};

template <int B, int P>
struct StoreTotal {
  static void run(const Product& p, float (*)[kTileFloats]) noexcept {
    tile_store<sum_tile(B, P)>(p.to.tile(B, P), p.to.row_bytes());
  }
};

template <int B, int P>
struct StoreSum {
  static void run(const Product&, float (*sums)[kTileFloats]) noexcept {
    tile_store<sum_tile(B, P)>(sums[sum_tile(B, P)], kTileRowBytes);
  }
};

template <int B, int P>
struct AddProduct {
  static void run(const Product&, float (*)[kTileFloats]) noexcept {
    tile_dot_bf16<sum_tile(B, P), act_tile(B), weight_tile(P)>();
  }
};

template <int Blocks, int Panels, template <int, int> class Action>
inline void each_sum(const Product& p, float (*sums)[kTileFloats] = nullptr) noexcept {
  Action<0, 0>::run(p, sums);
  if constexpr (Panels > 1) Action<0, 1>::run(p, sums);
  if constexpr (Blocks > 1) Action<1, 0>::run(p, sums);
  if constexpr (Blocks > 1 && Panels > 1) Action<1, 1>::run(p, sums);
}

// 32 columns.
template <int64_t Terms, int Blocks, int Panels>
inline void multiply_step(const Product& p, const std::byte* acts, const std::byte* weights) noexcept {
  tile_load_once<weight_tile(0)>(weights, kTileRowBytes);
  if constexpr (Panels > 1) tile_load_once<weight_tile(1)>(weights + p.weight_panel, kTileRowBytes);
#pragma GCC unroll 4
  for (int64_t term = 0; term < Terms; ++term, acts += p.layout.term) {
    tile_load<act_tile(0)>(acts, p.layout.stride);
    if constexpr (Blocks > 1) tile_load<act_tile(1)>(acts + p.layout.block, p.layout.stride);
    each_sum<Blocks, Panels, AddProduct>(p);
  }
}

// Before the first step of a scaled block, or of the chunk.
template <class Weight, int Blocks, int Panels>
inline void begin_sums(const Product& p) noexcept {
  if (kBlockScaled<Weight> || p.first)
    each_sum<Blocks, Panels, Zero>(p);
  else
    each_sum<Blocks, Panels, LoadTotal>(p);
}

// After the last one. Scaled: `block` is the number of the scale within the chunk.
template <class Weight, int Blocks, int Panels>
inline void end_sums(const Product& p, int64_t block, Pending& pending) noexcept {
  if constexpr (!kBlockScaled<Weight>) {
    each_sum<Blocks, Panels, StoreTotal>(p);
    return;
  }
  pending.add();
  pending.buffer ^= 1;
  each_sum<Blocks, Panels, StoreSum>(p, pending.buffers[pending.buffer]);
  pending.from = p.from;
  pending.to = (block + 1) * kScaleSteps < p.steps ? p.from : p.to;
  pending.blocks = Blocks;
  pending.panels = Panels;
  pending.first = p.first && block == 0;
  for (int i = 0; i < Blocks; ++i) pending.rows[i] = p.rows[i];
  for (int i = 0; i < Panels; ++i) pending.scale[i] = p.scales[i][block];
}

// Steps after which sums are stored.
template <class Weight>
constexpr int64_t sum_steps(const Product& p) noexcept {
  return kBlockScaled<Weight> ? kScaleSteps : p.steps;
}

// A chunk.
template <class Weight, int Blocks, int Panels>
void multiply_blocks(const Product& p, Ahead ahead, Pending& pending) noexcept {
  const int64_t span = sum_steps<Weight>(p);
  const std::byte* acts = p.acts;
  const std::byte* weights = p.weights;
  for (int64_t begin = 0; begin < p.steps; begin += span) {
    begin_sums<Weight, Blocks, Panels>(p);
    for (int64_t s = begin; s < std::min(begin + span, p.steps); ++s) {
      multiply_step<Weight::kTerms, Blocks, Panels>(p, acts, weights);
      ahead.request(Panels);
      acts += p.layout.step;
      weights += kTileBytes;
    }
    end_sums<Weight, Blocks, Panels>(p, begin / span, pending);
  }
}
