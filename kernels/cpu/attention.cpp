// Attention over a block table; kernels/reference/attention.py defines it.
//
// Keys and values are read where they lie: of a block, the keys of a dimension side by side, the values one after the
// other. Keys are taken in tiles of TILE at absolute positions. A tile gives a softmax of its own: a score is one chain
// over the head's dimensions, a value one chain over the tile's keys; what a query does not see adds exact zeros. Tiles
// are merged from left to right, by whichever thread. So a query's bits depend on nothing but what it sees.
//
// Where the processor multiplies pairs of bfloat16 (VDPBF16PS), and keys and values are no wider than that, it does: the
// weights and the scaled queries are rounded to bfloat16 then, to the nearest, and a chain's step is two products. Beside
// keys of 8 bits a query keeps what that rounds away, as a second one.
#include "ops.h"
#include "runtime/pool.h"
#include "tile.h"

namespace LLMX_ISA {
namespace {

constexpr int TILE = 128;
constexpr int STRIP = LANES;  // keys that are scored together
constexpr int STRIPS = TILE / STRIP;
constexpr float LOWEST = -1e30f;
constexpr int64_t MOST_PARTS = 16 << 20;  // floats of tiles that wait to be merged
// Bytes of a number, by the pools' kind: float32, float16, bfloat16, int8; then the last two multiplied in pairs.
constexpr int WIDTHS[] = {4, 2, 2, 1, 2, 1};
constexpr int PAIRED = 2;  // from a kind to that of its pairs
#if defined(__AVX512BF16__)
constexpr bool PAIRS = true;
#else
constexpr bool PAIRS = false;
#endif

struct Task {
  float* out;
  const float* q;
  const uint8_t *keys, *values, *scales;  // scales: of int8, a block's keys' before its values'; else nothing
  int64_t heads, kv_heads, dim, block_bytes, head_bytes;
  int32_t kind;
  bool pairs;
  const int64_t* units;  // (units, 3): first token, how many, row
  int64_t count;
  const int64_t *prefix, *table, *base, *paths;
  int64_t width, size, depth;  // of the table and its blocks; of the paths
  const float* sinks;
  float scale, cap;
  int64_t window, first;
};

struct Strip {
  const uint8_t *keys, *values;
  const float *key_scales, *value_scales;
  int64_t key_step, value_step;  // bytes from a dimension, or a key, to the next
};

// Rows that are computed together: of `count` rows, [low, high) of the tile's keys is what any of them sees.
struct Rows {
  int64_t row, low, high;
  int count;
};

// The memory of one piece. Rows are a unit's tokens times the query heads of its key head.
struct Desk {
  int64_t token, row, head, group, rows, padded, low, high;  // what any row sees: [low, high)
  int64_t *lows, *highs;
  // q: [dimension][row] of each block of rows, or [pair of dimensions][row] with two bfloat16 each, then (int8) what their
  // rounding left. weights: of a row TILE numbers, or, in their first half, bfloat16.
  float *q, *weights, *sums, *best, *total, *fades;
  uint8_t* copies;  // of strips that don't lie in one piece
  int64_t copy_bytes;
  Strip strips[STRIPS];
};

constexpr int blocks_of(int rows) { return MOST_SUMS / rows >= 4 ? 4 : MOST_SUMS / rows >= 2 ? 2 : 1; }
constexpr bool SHARED = MOST_SUMS > MOST_ROWS;  // there are registers for all blocks' keys or values beside the sums

template <int KIND>
LLMX_INLINE F numbers(const uint8_t* p) {
  if constexpr (KIND == 0) return load(reinterpret_cast<const float*>(p));
  if constexpr (KIND == 1) return load_half(p);
  if constexpr (KIND == 2) return load_bfloat(p);
  if constexpr (KIND == 3) return load_signed(p);
}

// The scores of R rows by 16 keys of each of B strips. q: [dimension][row]. Blocks lie anywhere, so no processor
// guesses what comes next: for few rows, which don't take long, the values of these strips and the keys of those that
// follow (up to `end`) are asked for.
template <int KIND, int R, int B>
LLMX_INLINE void score_strips(const Strip* strips, const Strip* end, const float* q, int64_t dim, float* scores) {
  F sums[R][B];
  const uint8_t *at[B] = {}, *next[B] = {};
  for (int b = 0; b < B; ++b) {
    at[b] = strips[b].keys;
    next[b] = strips + B + b < end ? strips[B + b].keys : strips[b].values;
  }
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) sums[r][b] = zero();
#pragma GCC unroll 4
  for (int64_t d = 0; d < dim; ++d) {
    if (R <= MOST_ROWS / 2 + 1 && d * WIDTHS[KIND] % 4 == 0)  // a line of 64 bytes
      for (int b = 0; b < B; ++b) {
        __builtin_prefetch(strips[b].values + d * LANES * WIDTHS[KIND]);
        __builtin_prefetch(next[b] + d * LANES * WIDTHS[KIND]);
      }
    F keys[B];
    for (int b = 0; b < B; ++b) {
      keys[b] = numbers<KIND>(at[b]);
      at[b] += strips[b].key_step;
      for (int r = 0; !SHARED && r < R; ++r) sums[r][b] = fma(keys[b], all(q[d * R + r]), sums[r][b]);
    }
    for (int r = 0; SHARED && r < R; ++r)
      for (int b = 0; b < B; ++b) sums[r][b] = fma(keys[b], all(q[d * R + r]), sums[r][b]);
  }
  for (int b = 0; b < B; ++b)
    for (int r = 0; r < R; ++r) {
      const F s = KIND == 3 ? mul(sums[r][b], load(strips[b].key_scales)) : sums[r][b];
      store(scores + r * TILE + b * STRIP, s);
    }
}

#if defined(__AVX512BF16__)

// Sixteen numbers at `a` and sixteen at `b`, side by side.
template <int KIND>
LLMX_INLINE __m512bh pair(const uint8_t* a, const uint8_t* b) {
  if constexpr (KIND == 2 + PAIRED) {
    const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
    const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
    const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16);
    return (__m512bh)_mm512_or_si512(_mm512_cvtepu16_epi32(first), wide);
  } else {  // whole numbers of 8 bits are bfloat16 without rounding
    const __m512i first = _mm512_castps_si512(load_signed(a).v), second = _mm512_castps_si512(load_signed(b).v);
    return (__m512bh)_mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(first, 16), second);
  }
}

LLMX_INLINE F add_products(F sum, __m512bh numbers, uint32_t two) {
  return {_mm512_dpbf16_ps(sum.v, numbers, (__m512bh)_mm512_set1_epi32(static_cast<int>(two)))};
}

template <int KIND, int R, int B>
LLMX_INLINE void score_pairs(const Strip* strips, const Strip* end, const uint32_t* q, int64_t dim, float* scores) {
  F sums[R][B];
  const uint8_t *at[B] = {}, *next[B] = {};
  for (int b = 0; b < B; ++b) {
    at[b] = strips[b].keys;
    next[b] = strips + B + b < end ? strips[B + b].keys : strips[b].values;
  }
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) sums[r][b] = zero();
#pragma GCC unroll 2
  for (int64_t d = 0; d < dim; d += 2) {
    if (R <= MOST_ROWS / 2 + 1 && d * WIDTHS[KIND] % 4 == 0)  // as in score_strips
      for (int b = 0; b < B; ++b) {
        __builtin_prefetch(strips[b].values + d * LANES * WIDTHS[KIND]);
        __builtin_prefetch(next[b] + d * LANES * WIDTHS[KIND]);
      }
    for (int b = 0; b < B; ++b) {
      const __m512bh keys = pair<KIND>(at[b], at[b] + strips[b].key_step);
      at[b] += 2 * strips[b].key_step;
      for (int r = 0; r < R; ++r) {
        sums[r][b] = add_products(sums[r][b], keys, q[d / 2 * R + r]);
        if constexpr (KIND == 3 + PAIRED) sums[r][b] = add_products(sums[r][b], keys, q[(dim + d) / 2 * R + r]);
      }
    }
  }
  for (int b = 0; b < B; ++b)
    for (int r = 0; r < R; ++r) {
      const F s = KIND == 3 + PAIRED ? mul(sums[r][b], load(strips[b].key_scales)) : sums[r][b];
      store(scores + r * TILE + b * STRIP, s);
    }
}

// Pairs of keys begin at even ones. Of what lies before or behind what the rows see, nothing counts, not even a NaN.
template <int KIND, int R, int B>
LLMX_INLINE void weigh_pairs(const Desk& desk, const Rows& rows, int64_t d, F (&part)[R][B]) {
  alignas(64) static constexpr uint8_t NOTHING[B * LANES * WIDTHS[KIND]] = {};
  const uint32_t* weights = reinterpret_cast<const uint32_t*>(desk.weights + rows.row * TILE);
  const auto use = [&](const uint8_t* a, const uint8_t* b, int64_t key, uint32_t seen) __attribute__((always_inline)) {
    for (int block = 0; block < B; ++block) {
      const int64_t at = block * LANES * WIDTHS[KIND];
      const __m512bh values = pair<KIND>(a + at, b + at);
      for (int r = 0; r < R; ++r) part[r][block] = add_products(part[r][block], values, weights[r * TILE + key / 2] & seen);
    }
  };
  for (int64_t key = rows.low / 2 * 2; key < rows.high;) {
    const Strip& strip = desk.strips[key / STRIP];
    const int64_t last = key / STRIP * STRIP + STRIP, step = strip.value_step;
    const int64_t end = last < rows.high ? last : rows.high;
    const uint8_t* at = strip.values + key % STRIP * step + d * WIDTHS[KIND];
    if (key < rows.low) use(NOTHING, at + step, key, 0xFFFF0000u), key += 2, at += 2 * step;
#pragma GCC unroll 2
    for (; key + 2 <= end; key += 2, at += 2 * step) use(at, at + step, key, ~0u);
    if (key < end) use(at, NOTHING, key, 0xFFFFu), key += 2;
  }
}

#endif

template <int KIND, int R>
void score(const Desk& desk, const Rows& rows, int64_t dim) {
  constexpr int B = blocks_of(R);
  const float* q = desk.q + rows.row * dim;
  float* scores = desk.weights + rows.row * TILE;
  int64_t s = rows.low / STRIP;
  const int64_t end = (rows.high + STRIP - 1) / STRIP;
  const Strip *strips = desk.strips, *last = strips + end;
#if defined(__AVX512BF16__)
  if constexpr (KIND >= 2 + PAIRED) {
    const uint32_t* two = reinterpret_cast<const uint32_t*>(q);
    for (; s + B <= end; s += B) score_pairs<KIND, R, B>(strips + s, last, two, dim, scores + s * STRIP);
    if constexpr (B > 1)
      for (; s < end; ++s) score_pairs<KIND, R, 1>(strips + s, last, two, dim, scores + s * STRIP);
    return;
  }
#endif
  for (; s + B <= end; s += B) score_strips<KIND, R, B>(strips + s, last, q, dim, scores + s * STRIP);
  if constexpr (B > 1)
    for (; s < end; ++s) score_strips<KIND, R, 1>(strips + s, last, q, dim, scores + s * STRIP);
}

template <int KIND, int R, int B>
LLMX_INLINE void weigh_keys(const Desk& desk, const Rows& rows, int64_t d, F (&part)[R][B]) {
  const float* weights = desk.weights + rows.row * TILE;
  for (int64_t key = rows.low; key < rows.high;) {
    const Strip& strip = desk.strips[key / STRIP];
    const int64_t end = key / STRIP * STRIP + STRIP < rows.high ? key / STRIP * STRIP + STRIP : rows.high;
    const uint8_t* at = strip.values + key % STRIP * strip.value_step + d * WIDTHS[KIND];
#pragma GCC unroll 4
    for (; key < end; ++key, at += strip.value_step) {
      F values[B];
      for (int b = 0; b < B; ++b) {
        values[b] = numbers<KIND>(at + b * LANES * WIDTHS[KIND]);
        for (int r = 0; !SHARED && r < R; ++r) part[r][b] = fma(values[b], all(weights[r * TILE + key]), part[r][b]);
      }
      for (int r = 0; SHARED && r < R; ++r)
        for (int b = 0; b < B; ++b) part[r][b] = fma(values[b], all(weights[r * TILE + key]), part[r][b]);
    }
  }
}

// The weighted values of R rows, 16 dimensions of each of B blocks, go into `sums` as `fades` say (old, new).
template <int KIND, int R, int B>
LLMX_INLINE void weigh_blocks(const Desk& desk, const Rows& rows, int64_t d, float* sums) {
  F part[R][B];
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) part[r][b] = zero();
#if defined(__AVX512BF16__)
  if constexpr (KIND >= 2 + PAIRED) weigh_pairs<KIND, R, B>(desk, rows, d, part);
  else
#endif
    weigh_keys<KIND, R, B>(desk, rows, d, part);
  for (int r = 0; r < R; ++r) {
    const F old = all(desk.fades[2 * (rows.row + r)]), now = all(desk.fades[2 * (rows.row + r) + 1]);
    for (int b = 0; b < B; ++b) {
      float* to = sums + (rows.row + r) * desk.padded + d + b * LANES;
      store(to, fma(load(to), old, mul(part[r][b], now)));
    }
  }
}

template <int KIND, int R>
void weigh(const Desk& desk, const Rows& rows, float* sums) {
  constexpr int B = blocks_of(R);
  int64_t d = 0;
  for (; d + B * LANES <= desk.padded; d += B * LANES) weigh_blocks<KIND, R, B>(desk, rows, d, sums);
  if constexpr (B > 1)
    for (; d < desk.padded; d += LANES) weigh_blocks<KIND, R, 1>(desk, rows, d, sums);
}

template <int KIND, int R>
LLMX_INLINE void choose(const Desk& desk, const Rows& rows, int64_t dim, float* sums) {
  if (rows.count == R) return sums == nullptr ? score<KIND, R>(desk, rows, dim) : weigh<KIND, R>(desk, rows, sums);
  if constexpr (R > 1) choose<KIND, R - 1>(desk, rows, dim, sums);
}

// Scores, or, with somewhere to put them, weighted values.
void multiply(int kind, const Desk& desk, const Rows& rows, int64_t dim, float* sums) {
  switch (kind) {
#if defined(__AVX512BF16__)
    case 2 + PAIRED: return choose<2 + PAIRED, MOST_ROWS>(desk, rows, dim, sums);
    case 3 + PAIRED: return choose<3 + PAIRED, MOST_ROWS>(desk, rows, dim, sums);
#endif
    case 0: return choose<0, MOST_ROWS>(desk, rows, dim, sums);
    case 1: return choose<1, MOST_ROWS>(desk, rows, dim, sums);
    case 2: return choose<2, MOST_ROWS>(desk, rows, dim, sums);
    default: return choose<3, MOST_ROWS>(desk, rows, dim, sums);
  }
}

// Where the block with this slot begins for the key head, in bytes.
LLMX_INLINE int64_t block_of(const Task& t, const Desk& desk, int64_t logical) {
  const int64_t block = logical / t.size;
  const int64_t known = block < t.width ? block : t.width - 1;  // what lies past the table belongs to dropped tokens
  return t.table[desk.row * t.width + known] * t.block_bytes + desk.head * t.head_bytes;
}

// A strip copied key by key: the slots of a draft's ancestors, blocks that are shorter, heads that 16 doesn't divide.
Strip copied(const Task& t, const Desk& desk, int64_t from, int which) {
  const int64_t wide = WIDTHS[t.kind], row_bytes = desk.padded * wide;
  uint8_t* keys = desk.copies + which * desk.copy_bytes;
  uint8_t* values = keys + STRIP * t.dim * wide;
  float* scales = reinterpret_cast<float*>(values + STRIP * row_bytes);
  for (int j = 0; j < STRIP; ++j) {
    int64_t logical = from + j;
    const int64_t step = logical - t.base[desk.row];
    if (t.paths != nullptr && step >= 0 && step < t.depth && t.paths[desk.token * t.depth + step] >= 0)
      logical = t.base[desk.row] + t.paths[desk.token * t.depth + step];
    const int64_t at = block_of(t, desk, logical), place = logical % t.size;
    const uint8_t* key = t.keys + at + place * wide;
    for (int64_t d = 0; d < t.dim; ++d)
      __builtin_memcpy(keys + (d * STRIP + j) * wide, key + d * t.size * wide, static_cast<uint64_t>(wide));
    const uint8_t* value = t.values + at + place * t.dim * wide;
    __builtin_memcpy(values + j * row_bytes, value, static_cast<uint64_t>(t.dim * wide));
    __builtin_memset(values + j * row_bytes + t.dim * wide, 0, static_cast<uint64_t>(row_bytes - t.dim * wide));
    if (t.scales == nullptr) continue;
    scales[j] = reinterpret_cast<const float*>(t.scales + at)[place];
    scales[STRIP + j] = reinterpret_cast<const float*>(t.scales + at)[t.size + place];
  }
  return {keys, values, scales, scales + STRIP, STRIP * wide, row_bytes};
}

void find_strips(const Task& t, Desk& desk, int64_t from, int64_t low, int64_t high) {
  const int64_t wide = WIDTHS[t.kind];
  const bool whole = t.size % STRIP == 0 && t.dim % LANES == 0;
  for (int64_t s = (low - from) / STRIP; from + s * STRIP < high; ++s) {
    const int64_t logical = from + s * STRIP;
    if (!whole || (t.paths != nullptr && logical + STRIP > t.base[desk.row])) {
      desk.strips[s] = copied(t, desk, logical, static_cast<int>(s));
      continue;
    }
    const int64_t at = block_of(t, desk, logical), place = logical % t.size;
    const float* scales = reinterpret_cast<const float*>(t.scales + (t.scales == nullptr ? 0 : at));
    desk.strips[s] = {t.keys + at + place * wide, t.values + at + place * t.dim * wide, scales + place,
                      scales + t.size + place, t.size * wide, t.dim * wide};
  }
}

struct State {
  float best[LANES], total[LANES];
};

// The softmax of what `now` tells of joins what is at `best` and `total`; fades: what the old sums and the new fade by.
LLMX_INLINE void join(const State& now, float* best, float* total, int count, float* fades) {
  State was;
  const uint64_t bytes = static_cast<uint64_t>(count) * sizeof(float);
  __builtin_memset(&was, 0, sizeof was);
  __builtin_memcpy(was.best, best, bytes), __builtin_memcpy(was.total, total, bytes);
  const F highest = most(load(now.best), load(was.best));
  const F old = exponential(sub(load(was.best), highest)), young = exponential(sub(load(now.best), highest));
  store(was.total, add(mul(load(was.total), old), mul(load(now.total), young)));
  store(was.best, highest);
  __builtin_memcpy(best, was.best, bytes), __builtin_memcpy(total, was.total, bytes);
  float lanes[2][LANES];
  store(lanes[0], old), store(lanes[1], young);
  for (int i = 0; i < count; ++i) fades[2 * i] = lanes[0][i], fades[2 * i + 1] = lanes[1][i];
}

// Scores -> weights, in place. What a row doesn't see weighs nothing.
LLMX_INLINE void soften(const Task& t, const Desk& desk, const Rows& rows, int64_t from, int i, State& now) {
  const int64_t low = desk.lows[rows.row + i] - from, high = desk.highs[rows.row + i] - from;
  const int64_t begin = rows.low / STRIP * STRIP;
  float* scores = desk.weights + (rows.row + i) * TILE;
  F highest = all(LOWEST), total = zero();
  for (int64_t b = begin; b < rows.high; b += STRIP) {
    F s = load(scores + b);
    if (t.cap != 0.0f) s = mul(tanh_of(div(s, all(t.cap))), all(t.cap));
    if (b < low || b + STRIP > high) {
      float lanes[LANES];
      store(lanes, s);
      for (int k = 0; k < LANES; ++k)
        if (b + k < low || b + k >= high) lanes[k] = -__builtin_inff();
      s = load(lanes);
    }
    store(scores + b, s);
    highest = most(s, highest);
  }
  now.best[i] = most_of(highest);
  for (int64_t b = begin; b < rows.high; b += STRIP) {
    const F weight = exponential(sub(load(scores + b), all(now.best[i])));
    total = add(total, weight);
    store(scores + b, t.kind == 3 ? mul(weight, load(desk.strips[b / STRIP].value_scales)) : weight);
  }
  now.total[i] = sum_of(total);
}

#if defined(__AVX512BF16__)

// 2^x to 3e-6 of it (a polynomial of degree 4 on [-1/2, 1/2]), which is then rounded to 8 bits; NaN stays.
LLMX_INLINE __m512 power_of_two_of(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, whole);
  __m512 p = _mm512_fmadd_ps(f, _mm512_set1_ps(0.0095827701f), _mm512_set1_ps(0.0559062282f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.2402409911f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.6931242347f));
  return _mm512_scalef_ps(_mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f)), whole);
}

// As `soften`, to bfloat16.
LLMX_INLINE void soften_pairs(const Task& t, const Desk& desk, const Rows& rows, int64_t from, int i, State& now) {
  constexpr float LOG2_E = 1.44269504f;
  const int64_t low = desk.lows[rows.row + i] - from, high = desk.highs[rows.row + i] - from;
  const int64_t begin = rows.low / STRIP * STRIP;
  float* scores = desk.weights + (rows.row + i) * TILE;
  F highest = all(LOWEST), total = zero();
  for (int64_t b = begin; b < rows.high; b += STRIP) {
    F s = load(scores + b);
    if (t.cap != 0.0f) s = mul(tanh_of(div(s, all(t.cap))), all(t.cap));
    if (b < low || b + STRIP > high) {
      const uint32_t before = b >= low ? 0 : low - b < STRIP ? (1u << (low - b)) - 1 : 0xFFFFu;
      const uint32_t until = b >= high ? 0 : high - b < STRIP ? (1u << (high - b)) - 1 : 0xFFFFu;
      const __mmask16 seen = static_cast<__mmask16>(until & ~before);
      s.v = _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), seen, s.v);
    }
    store(scores + b, s);
    highest = most(s, highest);
  }
  now.best[i] = most_of(highest);
  const F down = all(-LOG2_E * now.best[i]);
  for (int64_t b = begin; b < rows.high; b += STRIP) {
    const F weight = {power_of_two_of(fma(load(scores + b), all(LOG2_E), down).v)};
    const bool scaled = t.kind == 3;
    const F kept = scaled ? mul(weight, load(desk.strips[b / STRIP].value_scales)) : weight;
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(kept.v);
    const F back = {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16))};
    total = add(total, scaled ? weight : back);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<uint16_t*>(scores) + b), rounded);  // of scores read
  }
  now.total[i] = sum_of(total);
}

#endif

// The tile that begins at key `from` joins sums, best and total.
void take_tile(const Task& t, Desk& desk, int64_t from) {
  const int64_t end = from + TILE, low = desk.low > from ? desk.low : from, high = desk.high < end ? desk.high : end;
  if (low >= high) return;
  find_strips(t, desk, from, low, high);
  const int how = t.kind + (t.pairs ? PAIRED : 0);
  const int64_t blocks = (desk.rows + MOST_ROWS - 1) / MOST_ROWS;
  for (int64_t block = 0; block < blocks; ++block) {
    Rows rows{desk.rows * block / blocks, TILE, 0, 0};
    rows.count = static_cast<int>(desk.rows * (block + 1) / blocks - rows.row);
    for (int64_t row = rows.row; row < rows.row + rows.count; ++row) {
      const int64_t first = desk.lows[row] > from ? desk.lows[row] - from : 0;
      const int64_t last = desk.highs[row] < end ? desk.highs[row] - from : TILE;
      if (first >= last) continue;
      rows.low = first < rows.low ? first : rows.low;
      rows.high = last > rows.high ? last : rows.high;
    }
    if (rows.low >= rows.high) continue;
    multiply(how, desk, rows, t.dim, nullptr);
    State now;
    __builtin_memset(&now, 0, sizeof now);
#if defined(__AVX512BF16__)
    if (t.pairs)
      for (int i = 0; i < rows.count; ++i) soften_pairs(t, desk, rows, from, i, now);
    else
#endif
      for (int i = 0; i < rows.count; ++i) soften(t, desk, rows, from, i, now);
    join(now, desk.best + rows.row, desk.total + rows.row, rows.count, desk.fades + 2 * rows.row);
    multiply(how, desk, rows, t.dim, desk.sums);
  }
}

// What the tokens of a unit see: [low, high); no key has an empty unit.
void span(const Task& t, const int64_t* unit, int64_t& low, int64_t& high) {
  low = INT64_MAX, high = 0;
  for (int64_t query = unit[0]; query < unit[0] + unit[1]; ++query) {
    const int64_t prefix = t.prefix[query], window = t.window > 0 ? prefix - t.window : 0;
    const int64_t first = window > t.first ? window : t.first;
    if (first >= prefix) continue;
    low = first < low ? first : low;
    high = prefix > high ? prefix : high;
  }
  if (low >= high) low = high = 0;
}

void clear(Desk& desk, float* sums, float* best, float* total) {
  desk.sums = sums, desk.best = best, desk.total = total;
  __builtin_memset(sums, 0, static_cast<uint64_t>(desk.rows * desk.padded) * sizeof(float));
  for (int64_t row = 0; row < desk.rows; ++row) best[row] = LOWEST, total[row] = 0.0f;
}

#if defined(__AVX512BF16__)

// A query in bfloat16, pair by pair, `step` pairs apart; with keys of 8 bits then what rounding it left, in the same way.
LLMX_INLINE void put_pairs(const Task& t, const float* q, uint32_t* to, int64_t step) {
  for (int64_t d = 0; d < t.dim; d += LANES) {
    const int64_t count = t.dim - d < LANES ? t.dim - d : LANES;
    const __m512 some = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), q + d);
    const __m512 x = _mm512_mul_ps(some, _mm512_set1_ps(t.scale));
    uint32_t two[LANES / 2];
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(x);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(two), rounded);
    for (int64_t i = 0; i < count / 2; ++i) to[(d / 2 + i) * step] = two[i];
    if (t.kind != 3) continue;
    const __m512 back = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16));
    const __m256i rest = (__m256i)_mm512_cvtneps_pbh(_mm512_sub_ps(x, back));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(two), rest);
    for (int64_t i = 0; i < count / 2; ++i) to[((t.dim + d) / 2 + i) * step] = two[i];
  }
}

#endif

// Memory of the thread, the queries by the head's scale, and an empty state.
Desk prepare(const Task& t, const int64_t* unit, int64_t head, int thread) {
  Desk desk;
  desk.token = unit[0], desk.row = unit[2], desk.head = head, desk.group = t.heads / t.kv_heads;
  desk.rows = unit[1] * desk.group, desk.padded = (t.dim + LANES - 1) / LANES * LANES;
  desk.copy_bytes = STRIP * (t.dim + desk.padded) * WIDTHS[t.kind] + 2 * STRIP * static_cast<int64_t>(sizeof(float));
  const int64_t floats = desk.rows * (t.dim + TILE + desk.padded + 4 + 4);
  const int64_t bytes = STRIPS * desk.copy_bytes + floats * static_cast<int64_t>(sizeof(float));
  desk.lows = static_cast<int64_t*>(llmx_pool::scratch(thread, bytes));
  desk.highs = desk.lows + desk.rows;
  desk.q = reinterpret_cast<float*>(desk.highs + desk.rows);
  desk.weights = desk.q + desk.rows * t.dim;
  float* sums = desk.weights + desk.rows * TILE;
  float* best = sums + desk.rows * desk.padded;
  desk.fades = best + 2 * desk.rows;
  desk.copies = reinterpret_cast<uint8_t*>(desk.fades + 2 * desk.rows);
  span(t, unit, desk.low, desk.high);
  const int64_t blocks = (desk.rows + MOST_ROWS - 1) / MOST_ROWS;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = desk.rows * block / blocks, end = desk.rows * (block + 1) / blocks;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t query = unit[0] + row / desk.group, prefix = t.prefix[query];
      desk.highs[row] = prefix;
      desk.lows[row] = t.window > 0 && prefix - t.window > t.first ? prefix - t.window : t.first;
      const float* from = t.q + (query * t.heads + head * desk.group + row % desk.group) * t.dim;
      float* to = desk.q + begin * t.dim + (row - begin);
#if defined(__AVX512BF16__)
      if (t.pairs) {
        put_pairs(t, from, reinterpret_cast<uint32_t*>(to), end - begin);
        continue;
      }
#endif
      for (int64_t d = 0; d < t.dim; ++d) to[d * (end - begin)] = from[d] * t.scale;
    }
  }
  clear(desk, sums, best, best + desk.rows);
  return desk;
}

void finish(const Task& t, const Desk& desk) {
  for (int64_t row = 0; row < desk.rows; ++row) {
    const int64_t at = (desk.token + row / desk.group) * t.heads + desk.head * desk.group + row % desk.group;
    float best = desk.best[row], total = desk.total[row], fades[2] = {1.0f, 1.0f};
    if (t.sinks != nullptr) {  // as a key with this score and a value of zeros
      State sink;
      __builtin_memset(&sink, 0, sizeof sink);
      sink.best[0] = t.sinks[at % t.heads], sink.total[0] = 1.0f;
      join(sink, &best, &total, 1, fades);
    }
    const float least = total > 1e-30f || total != total ? total : 1e-30f;
    const float* sums = desk.sums + row * desk.padded;
    float* to = t.out + at * t.dim;
    for (int64_t d = 0; d < t.dim; ++d) to[d] = sums[d] * fades[0] / least;
  }
}

void attend(void* context, int64_t number, int thread) {
  const Task& t = *static_cast<const Task*>(context);
  const int64_t* unit = t.units + 3 * (t.count - 1 - number / t.kv_heads);  // the last of a prompt see most keys
  if (unit[1] == 0) return;
  Desk desk = prepare(t, unit, number % t.kv_heads, thread);
  for (int64_t from = desk.low / TILE * TILE; from < desk.high; from += TILE) take_tile(t, desk, from);
  finish(t, desk);
}

// Work in pieces: the tiles of a unit and key head, `each` at a time. What each tile gives is kept; the last piece of
// a unit and key head to be done merges it.
struct Split {
  Task task;
  int64_t each, *pieces, *parts;  // per unit: pieces, and floats of parts, of a key head
  int32_t* left;                  // per unit and key head: pieces that are not done
  float* memory;
};

void attend_piece(void* context, int64_t number, int thread) {
  const Split& s = *static_cast<const Split*>(context);
  const Task& t = s.task;
  int64_t index = 0, before = 0;
  for (; number >= s.pieces[index] * t.kv_heads; ++index)
    number -= s.pieces[index] * t.kv_heads, before += s.parts[index] * t.kv_heads;
  const int64_t head = number / s.pieces[index], piece = number % s.pieces[index];
  Desk desk = prepare(t, t.units + 3 * index, head, thread);
  float *sums = desk.sums, *best = desk.best, *total = desk.total;
  float* parts = s.memory + before + head * s.parts[index];
  const int64_t tiles = (desk.high + TILE - 1) / TILE - desk.low / TILE, part = desk.rows * (desk.padded + 2);
  for (int64_t tile = piece * s.each; tile < tiles && tile < (piece + 1) * s.each; ++tile) {
    float* mine = parts + tile * part;
    clear(desk, mine, mine + desk.rows * desk.padded, mine + desk.rows * (desk.padded + 1));
    take_tile(t, desk, (desk.low / TILE + tile) * TILE);
  }
  if (__atomic_sub_fetch(s.left + index * t.kv_heads + head, 1, __ATOMIC_ACQ_REL) != 0) return;
  clear(desk, sums, best, total);
  for (int64_t tile = 0; tile < tiles; ++tile)
    for (int64_t row = 0; row < desk.rows; ++row) {
      const float* mine = parts + tile * part;
      State now;
      __builtin_memset(&now, 0, sizeof now);
      now.best[0] = mine[desk.rows * desk.padded + row], now.total[0] = mine[desk.rows * (desk.padded + 1) + row];
      float fades[2];
      join(now, best + row, total + row, 1, fades);
      for (int64_t d = row * desk.padded; d < (row + 1) * desk.padded; d += LANES)
        store(sums + d, fma(load(sums + d), all(fades[0]), mul(load(mine + d), all(fades[1]))));
    }
  finish(t, desk);
}

// True where it was done in pieces: few units, and more than one tile to share.
bool attend_split(const Task& t, int32_t threads) {
  int64_t busy = 0, tiles = 0, floats = 0, pieces = 0;
  for (int64_t u = 0; u < t.count; ++u) busy += t.units[3 * u + 1] > 0;
  if (threads < 2 || busy * t.kv_heads >= 4 * threads) return false;
  const uint64_t bytes = static_cast<uint64_t>(t.count) * (16 + static_cast<uint64_t>(t.kv_heads) * 4);
  const int64_t padded = (t.dim + LANES - 1) / LANES * LANES, group = t.heads / t.kv_heads;
  Split s{t, 1, static_cast<int64_t*>(__builtin_malloc(bytes)), nullptr, nullptr, nullptr};
  if (s.pieces == nullptr) return false;
  s.parts = s.pieces + t.count, s.left = reinterpret_cast<int32_t*>(s.parts + t.count);
  for (int64_t u = 0; u < t.count; ++u) {
    int64_t low = 0, high = 0;
    span(t, t.units + 3 * u, low, high);
    s.pieces[u] = (high + TILE - 1) / TILE - low / TILE;
    s.parts[u] = s.pieces[u] * t.units[3 * u + 1] * group * (padded + 2);
    tiles += s.pieces[u] * t.kv_heads, floats += s.parts[u] * t.kv_heads;
  }
  if (tiles > busy * t.kv_heads && floats <= MOST_PARTS)
    s.memory = static_cast<float*>(__builtin_malloc(static_cast<uint64_t>(floats) * sizeof(float)));
  if (s.memory != nullptr) {
    s.each = (tiles + 4 * threads - 1) / (4 * threads);
    for (int64_t u = 0; u < t.count; ++u) {
      const int64_t some = (s.pieces[u] + s.each - 1) / s.each;
      s.pieces[u] = t.units[3 * u + 1] > 0 && some == 0 ? 1 : some;  // a unit that sees nothing gives zeros
      pieces += s.pieces[u] * t.kv_heads;
      for (int64_t head = 0; head < t.kv_heads; ++head)
        s.left[u * t.kv_heads + head] = static_cast<int32_t>(s.pieces[u]);
    }
    llmx_pool::each(attend_piece, &s, pieces, threads);
  }
  const bool done = s.memory != nullptr;
  __builtin_free(s.memory);
  __builtin_free(s.pieces);
  return done;
}

}  // namespace

void attention(float* out, const float* q, const uint8_t* keys, const uint8_t* values, const uint8_t* scales,
               int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_bytes, int64_t head_bytes, int32_t kind,
               const int64_t* units, int64_t count, const int64_t* prefix, const int64_t* table, int64_t width,
               int64_t size, const int64_t* base, const int64_t* paths, int64_t depth, const float* sinks, float scale,
               float cap, int64_t window, int64_t first, int32_t threads) {
  const bool pairs = PAIRS && kind >= 2 && dim % 2 == 0;
  Task task{out,   q,      keys,  values, scales, heads, kv_heads, dim,   block_bytes, head_bytes, kind,   pairs, units,
            count, prefix, table, base,   paths,  width, size,     depth, sinks,       scale,      cap,    window, first};
  if (!attend_split(task, threads)) llmx_pool::each(attend, &task, count * kv_heads, threads);
}

}  // namespace LLMX_ISA
