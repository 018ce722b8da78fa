// Attention of a group of query rows over one chunk of positions, tile by tile with a running softmax
// (Milakov and Gimelshein, 2018; Dao et al., 2022).
//
// Every score is one sum over key_dim in order, every output element one sum over positions in order, and the
// lanes of a vector are different scores or different output elements. So a row has the same bits whichever
// rows run beside it. Keys of a tile are transposed first (lane = position): the cost is shared by all rows
// of the group.

constexpr float kMinusInfinity = -__builtin_inff();

// Scratch of one call, see attention_scratch_floats.
struct Scratch {
  float* query;       // [num_rows][round_up16(key_dim)], scaled
  float* scores;      // [num_rows][kTilePositions], then the probabilities
  float* keys;        // [round_up16(key_dim)][kTilePositions]
  float* block;       // [16][16]
  float* correction;  // [num_rows]: what the sums so far are multiplied by
};

inline Scratch cut_scratch(float* memory, int64_t num_rows, int64_t key_dim) {
  Scratch s;
  s.query = memory;
  s.scores = s.query + num_rows * round_up16(key_dim);
  s.keys = s.scores + num_rows * kTilePositions;
  s.block = s.keys + round_up16(key_dim) * kTilePositions;
  s.correction = s.block + 16 * 16;
  return s;
}

template <class T>
inline F16 load_up_to(const T* p, int64_t n) {
  return n >= 16 ? load(p) : load_first(p, static_cast<int>(n));
}

inline void scale_queries(const AttentionRows& rows, int64_t key_dim, float* dst) {
  const F16 scale = set1(rows.scale);
  for (int r = 0; r < rows.num_rows; ++r, dst += round_up16(key_dim)) {
    for (int64_t k = 0; k < key_dim; k += 16)
      store(dst + k, mul(load_up_to(rows.query[r] + k, key_dim - k), scale));
  }
}

// dst[d][i] = element column + d of row i for a 16 x 16 block; `width` elements of a row are left, the rest
// are zeros. Only whole f32 blocks are read in place.
template <class T>
inline void transpose_block(const T* const* rows, int64_t column, int64_t width, float* block, float* dst) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (width >= 16) return transpose16(rows, column, dst, kTilePositions);
  }
  const float* block_rows[16];
  for (int i = 0; i < 16; ++i) {
    store(block + 16 * i, load_up_to(rows[i] + column, width));
    block_rows[i] = block + 16 * i;
  }
  transpose16(block_rows, 0, dst, kTilePositions);
}

// Where the keys and values of a tile are. Filled up to a multiple of 16 positions with repeats of the first
// one, whose scores nobody reads.
template <class T>
struct Tile {
  int64_t first = 0;
  int num_positions = 0;
  const T* keys[kTilePositions];
  const T* values[kTilePositions];
};

template <class T>
inline void locate(const AttentionCache<T>& cache, int64_t first, int64_t end, Tile<T>& tile) {
  tile.first = first;
  tile.num_positions = end - first < kTilePositions ? static_cast<int>(end - first) : kTilePositions;
  int64_t block = first / cache.block_size, offset = first % cache.block_size;
  for (int i = 0; i < tile.num_positions; ++i) {
    const int64_t slot = cache.block_table[block] * cache.block_size + offset;
    tile.keys[i] = cache.keys + slot * cache.key_stride;
    tile.values[i] = cache.values + slot * cache.value_stride;
    if (++offset == cache.block_size) ++block, offset = 0;
  }
  for (int i = tile.num_positions; i % 16 != 0; ++i)
    tile.keys[i] = tile.keys[0], tile.values[i] = tile.values[0];
}

// dst[d][i] = element d of the key of position i, for whole groups of 16 positions. Meanwhile the keys of the
// next tile (nullptr: none) are fetched: the hardware does not follow a stream from block to block.
template <class T>
inline void transpose_keys(const Tile<T>& tile, const Tile<T>* next, int64_t key_dim, float* block,
                           float* dst) {
  for (int group = 0; group < tile.num_positions; group += 16)
    for (int64_t column = 0; column < key_dim; column += 16) {
      if (next != nullptr && group < next->num_positions)
        for (int i = 0; i < 16; ++i) __builtin_prefetch(next->keys[group + i] + column, 0, 2);
      transpose_block(tile.keys + group, column, key_dim - column, block,
                      dst + column * kTilePositions + group);
    }
}

// scores[r][first .. first + 16 V) = queries[r] . keys for R rows.
template <int R, int V>
inline void score_block(const float* query, int64_t query_stride, const float* keys, int64_t key_dim,
                        float* scores) {
  F16 sums[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[r][v] = set1(0.0f);
  for (int64_t d = 0; d < key_dim; ++d) {
    F16 key[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) key[v] = load(keys + d * kTilePositions + 16 * v);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F16 q = set1(query[r * query_stride + d]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[r][v] = fma(q, key[v], sums[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(scores + r * kTilePositions + 16 * v, sums[r][v]);
}

template <int R>
inline void score_rows(const float* query, int64_t query_stride, const float* keys, int num_positions,
                       int64_t key_dim, float* scores) {
  int first = 0;
  for (; first + 16 * kVectors <= num_positions; first += 16 * kVectors)
    score_block<R, kVectors>(query, query_stride, keys + first, key_dim, scores + first);
  for (; first < num_positions; first += 16)
    score_block<R, 1>(query, query_stride, keys + first, key_dim, scores + first);
}

// Calls f.template operator()<n>() for the run-time n in 1 .. kQueryRows.
template <class F>
inline void with_row_count(int n, F f) {
  static_assert(kQueryRows <= 6);
  if (n == 1) return f.template operator()<1>();
  if constexpr (kQueryRows >= 2) {
    if (n == 2) return f.template operator()<2>();
  }
  if constexpr (kQueryRows >= 3) {
    if (n == 3) return f.template operator()<3>();
  }
  if constexpr (kQueryRows >= 4) {
    if (n == 4) return f.template operator()<4>();
  }
  if constexpr (kQueryRows >= 5) {
    if (n == 5) return f.template operator()<5>();
  }
  if constexpr (kQueryRows >= 6) f.template operator()<6>();
}

inline void score_tile(const Scratch& s, int num_rows, int num_positions, int64_t key_dim) {
  const int64_t stride = round_up16(key_dim);
  for (int row = 0; row < num_rows; row += kQueryRows) {
    const int n = num_rows - row < kQueryRows ? num_rows - row : kQueryRows;
    with_row_count(n, [&]<int R>() {
      score_rows<R>(s.query + row * stride, stride, s.keys, num_positions, key_dim,
                    s.scores + row * kTilePositions);
    });
  }
}

// Turns n >= 1 scores into exp(score - max), advances the state, and returns what earlier sums are multiplied
// by.
inline float softmax_tile(float* scores, int n, SoftmaxState& state) {
  F16 score[kTilePositions / 16];
  F16 largest = set1(kMinusInfinity);
  const int groups = (n + 15) / 16;
  for (int g = 0; g < groups; ++g) {
    score[g] = load(scores + 16 * g);
    if (n - 16 * g < 16) score[g] = first_or(score[g], n - 16 * g, set1(kMinusInfinity));
    largest = max(largest, score[g]);
  }
  const float tile_max = reduce_max(largest);
  const float new_max = tile_max > state.max ? tile_max : state.max;
  F16 sum = set1(0.0f);
  for (int g = 0; g < groups; ++g) {
    const F16 p = vec_exp(sub(score[g], set1(new_max)));
    store(scores + 16 * g, p);
    sum = add(sum, p);
  }
  const float correction = first_lane(vec_exp(set1(state.max - new_max)));
  state.sum = __builtin_fmaf(state.sum, correction, reduce_add(sum));
  state.max = new_max;
  return correction;
}

// A weighted sum of value rows over positions [first, end) of a tile, for some query rows.
template <class T>
struct WeightedSum {
  const float* probabilities;  // [rows][kTilePositions]
  const T* const* values;      // of the tile's positions
  const T* const* prefetch;    // rows to fetch meanwhile, one per position, or nullptr
  int first;
  int end;
  const float* correction;  // [rows]
  float* sums;              // [rows][stride]
  int64_t stride;
};

// sums[r] = sums[r] * correction[r] + probabilities[r][i] * values[i] over i in order, for 16 V columns from
// `column`. `width` is the number of elements left in a row; below 16 only with V = 1.
template <int R, int V, class T>
inline void weigh_block(const WeightedSum<T>& w, int64_t column, int64_t width) {
  F16 sums[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v)
      sums[r][v] = mul(load(w.sums + r * w.stride + column + 16 * v), set1(w.correction[r]));
  for (int i = w.first; i < w.end; ++i) {
    const T* row = w.values[i] + column;
    if (w.prefetch != nullptr) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) __builtin_prefetch(w.prefetch[i] + column + 16 * v, 0, 2);
    }
    F16 value[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) value[v] = V == 1 ? load_up_to(row, width) : load(row + 16 * v);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F16 p = set1(w.probabilities[r * kTilePositions + i]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[r][v] = fma(p, value[v], sums[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(w.sums + r * w.stride + column + 16 * v, sums[r][v]);
}

template <int R, class T>
inline void weigh_rows(const WeightedSum<T>& w, int64_t value_dim) {
  int64_t column = 0;
  for (; column + 16 * kVectors <= value_dim; column += 16 * kVectors)
    weigh_block<R, kVectors>(w, column, 16);
  for (; column < value_dim; column += 16) weigh_block<R, 1>(w, column, value_dim - column);
}

// The number of positions of the tile that row r sees.
template <class T>
inline int visible(const AttentionRows& rows, int r, const Tile<T>& tile) {
  const int64_t n = rows.num_keys[r] - tile.first;
  return n <= 0 ? 0 : n < tile.num_positions ? static_cast<int>(n) : tile.num_positions;
}

// A block of rows shares the loads of the values as far as all its rows see; each goes on alone from there. A
// masked product would not do: 0 * v is not 0 for the infinite and not-a-number values another token may have
// stored.
template <class T>
inline void weigh_tile(const AttentionRows& rows, const Scratch& s, const Tile<T>& tile, const Tile<T>* next,
                       int64_t value_dim, float* sums) {
  const int64_t stride = round_up16(value_dim);
  const float one = 1.0f;
  // Every position of this tile fetches one of the next: a shorter next tile is left to the hardware.
  const bool fetch = next != nullptr && next->num_positions >= tile.num_positions;
  for (int first_row = 0; first_row < rows.num_rows; first_row += kQueryRows) {
    const int n = rows.num_rows - first_row < kQueryRows ? rows.num_rows - first_row : kQueryRows;
    int common = tile.num_positions;
    for (int r = first_row; r < first_row + n; ++r) {
      const int own = visible(rows, r, tile);
      if (own < common) common = own;
    }
    WeightedSum<T> w{.probabilities = s.scores + first_row * kTilePositions,
                     .values = tile.values,
                     .prefetch = fetch && first_row == 0 ? next->values : nullptr,
                     .first = 0,
                     .end = common,
                     .correction = s.correction + first_row,
                     .sums = sums + first_row * stride,
                     .stride = stride};
    if (common > 0) with_row_count(n, [&]<int R>() { weigh_rows<R>(w, value_dim); });
    w.prefetch = nullptr;
    w.first = common;
    for (int r = first_row; r < first_row + n; ++r) {
      w.end = visible(rows, r, tile);
      if (w.end <= common) continue;
      w.probabilities = s.scores + r * kTilePositions;
      w.correction = common > 0 ? &one : s.correction + r;
      w.sums = sums + r * stride;
      weigh_rows<1>(w, value_dim);
    }
  }
}

template <class T>
inline void attend_tile(const AttentionRows& rows, const AttentionCache<T>& cache, const Tile<T>& tile,
                        const Tile<T>* next, const Scratch& s, SoftmaxState* states, float* values) {
  transpose_keys(tile, next, cache.key_dim, s.block, s.keys);
  score_tile(s, rows.num_rows, tile.num_positions, cache.key_dim);
  for (int r = 0; r < rows.num_rows; ++r)
    if (const int n = visible(rows, r, tile); n > 0)
      s.correction[r] = softmax_tile(s.scores + r * kTilePositions, n, states[r]);
  weigh_tile(rows, s, tile, next, cache.value_dim, values);
}

template <class T>
inline void attend(const AttentionRows& rows, const AttentionCache<T>& cache, int64_t first, float* scratch,
                   SoftmaxState* states, float* values) noexcept {
  const Scratch s = cut_scratch(scratch, rows.num_rows, cache.key_dim);
  const int64_t stride = round_up16(cache.value_dim);
  scale_queries(rows, cache.key_dim, s.query);
  int64_t last = first;
  for (int r = 0; r < rows.num_rows; ++r) {
    if (rows.num_keys[r] <= first) continue;
    states[r] = {kMinusInfinity, 0.0f};
    for (int64_t d = 0; d < stride; d += 16) store(values + r * stride + d, set1(0.0f));
    if (rows.num_keys[r] > last) last = rows.num_keys[r];
  }
  const int64_t end = last < first + kChunkPositions ? last : first + kChunkPositions;
  Tile<T> tiles[2];
  if (first < end) locate(cache, first, end, tiles[0]);
  int current = 0;
  for (int64_t at = first; at < end; at += kTilePositions, current ^= 1) {
    // The tile behind the chunk is fetched too: the next call is likely to start with it.
    const bool more = at + kTilePositions < last;
    if (more) locate(cache, at + kTilePositions, last, tiles[current ^ 1]);
    attend_tile(rows, cache, tiles[current], more ? &tiles[current ^ 1] : nullptr, s, states, values);
  }
}

inline void attend_f32(const AttentionRows& rows, const AttentionCache<float>& cache, int64_t first,
                       float* scratch, SoftmaxState* states, float* values) noexcept {
  attend(rows, cache, first, scratch, states, values);
}

inline void attend_bf16(const AttentionRows& rows, const AttentionCache<uint16_t>& cache, int64_t first,
                        float* scratch, SoftmaxState* states, float* values) noexcept {
  attend(rows, cache, first, scratch, states, values);
}

inline void merge(SoftmaxState& state, float* values, SoftmaxState next, const float* next_values,
                  int64_t value_dim) noexcept {
  const float new_max = state.max > next.max ? state.max : next.max;
  const F16 mine = vec_exp(set1(state.max - new_max));
  const F16 theirs = vec_exp(set1(next.max - new_max));
  for (int64_t d = 0; d < value_dim; d += 16)  // rows of values are padded to whole vectors
    store(values + d, fma(load(next_values + d), theirs, mul(load(values + d), mine)));
  state.sum = __builtin_fmaf(next.sum, first_lane(theirs), state.sum * first_lane(mine));
  state.max = new_max;
}

inline void finish(SoftmaxState state, const float* values, int64_t value_dim, float* out) noexcept {
  const F16 factor = set1(1.0f / state.sum);
  int64_t d = 0;
  for (; d + 16 <= value_dim; d += 16) store(out + d, mul(load(values + d), factor));
  if (d < value_dim) store_first(out + d, mul(load(values + d), factor), static_cast<int>(value_dim - d));
}
