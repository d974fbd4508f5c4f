// Attention over a block table; kernels/reference/attention.py defines it.
//
// Keys are taken in tiles of TILE at absolute positions, from left to right (online softmax), for any number of
// queries alike: a score is one chain over the head's dimensions, a value one chain over the keys of a tile on top of
// what the tiles before gave. What a query does not see adds exact zeros. So its bits don't depend on its neighbours.
#include "ops.h"
#include "runtime/pool.h"
#include "tile.h"

namespace LLMX_ISA {
namespace {

constexpr int TILE = 64;
constexpr float LOWEST = -1e30f;

struct Task {
  float* out;
  const float* q;
  const uint8_t *keys, *values;
  int64_t heads, kv_heads, dim, slots;  // slots: of a head's pool
  int32_t kind;                         // of the pools: 0 float32, 1 float16, 2 bfloat16
  const int64_t* units;                 // (units, 3): first token, how many, row
  const int64_t *prefix, *table, *base, *paths;
  int64_t width, size, depth;  // of the table and its blocks; of the paths
  float scale, cap;
  int64_t window, first;
};

// The memory of one task: rows are a unit's tokens times the query heads of its key head.
struct Desk {
  float *q, *scores, *sums, *best, *total, *keys, *values;
  int64_t *low, *high;
};

inline F load_any(const uint8_t* pool, int64_t at, int32_t kind) {
  if (kind == 0) return load(reinterpret_cast<const float*>(pool) + at);
  return kind == 1 ? load_half(pool + 2 * at) : load_bfloat(pool + 2 * at);
}

// Sixteen numbers, or as many as there are and zeros.
inline void copy_lanes(float* to, const uint8_t* pool, int64_t at, int64_t count, int32_t kind) {
  if (count >= LANES) return store(to, load_any(pool, at, kind));
  uint8_t some[4 * LANES] = {0};
  const int64_t width = kind == 0 ? 4 : 2;
  __builtin_memcpy(some, pool + width * at, static_cast<uint64_t>(width * count));
  store(to, load_any(some, 0, kind));
}

// Keys of [from, from + TILE) as [dimension][key], values as [key][padded dimension]; zeros outside [low, high).
inline void gather(const Task& t, const Desk& desk, int64_t row, int64_t token, int64_t head, int64_t padded,
                   int64_t from, int64_t low, int64_t high) {
  for (int64_t j = 0; j < TILE; ++j) {
    int64_t logical = from + j;
    float* value = desk.values + j * padded;
    if (logical < low || logical >= high) {
      for (int64_t d = 0; d < t.dim; ++d) desk.keys[d * TILE + j] = 0.0f;
      __builtin_memset(value, 0, static_cast<uint64_t>(padded) * sizeof(float));
      continue;
    }
    if (t.paths != nullptr && logical >= t.base[row]) {
      const int64_t step = logical - t.base[row];
      const int64_t node = step < t.depth ? t.paths[token * t.depth + step] : -1;
      if (node >= 0) logical = t.base[row] + node;
    }
    int64_t block = logical / t.size;
    if (block >= t.width) block = t.width - 1;
    const int64_t at = (head * t.slots + t.table[row * t.width + block] * t.size + logical % t.size) * t.dim;
    for (int64_t d = 0; d < t.dim; d += LANES) {
      float lanes[LANES];
      copy_lanes(lanes, t.keys, at + d, t.dim - d, t.kind);
      for (int64_t i = 0; i < LANES && d + i < t.dim; ++i) desk.keys[(d + i) * TILE + j] = lanes[i];
      copy_lanes(value + d, t.values, at + d, t.dim - d, t.kind);
    }
  }
}

template <int R>
void score(const Desk& desk, int64_t dim, int64_t row) {
  for (int b = 0; b < TILE / LANES; ++b) {
    F sums[R][1];
    for (int r = 0; r < R; ++r) sums[r][0] = zero();
    Strided sources[1] = {{desk.keys + b * LANES, TILE}};
    accumulate<Strided, R, 1>(sources, desk.q + row * dim, dim, 0, dim, 0, sums);
    for (int r = 0; r < R; ++r) store(desk.scores + (row + r) * TILE + b * LANES, sums[r][0]);
  }
}

template <int R>
void weigh(const Desk& desk, int64_t padded, int64_t row) {
  for (int64_t d = 0; d < padded; d += LANES) {
    F sums[R][1];
    for (int r = 0; r < R; ++r) sums[r][0] = load(desk.sums + (row + r) * padded + d);
    Strided sources[1] = {{desk.values + d, padded}};
    accumulate<Strided, R, 1>(sources, desk.scores + row * TILE, TILE, 0, TILE, 0, sums);
    for (int r = 0; r < R; ++r) store(desk.sums + (row + r) * padded + d, sums[r][0]);
  }
}

template <int R>
LLMX_INLINE void choose(const Desk& desk, int64_t dim, bool scores, int64_t rows, int64_t row) {
  if (rows == R) return scores ? score<R>(desk, dim, row) : weigh<R>(desk, dim, row);
  if constexpr (R > 1) choose<R - 1>(desk, dim, scores, rows, row);
}

inline void each_tile(const Desk& desk, int64_t dim, bool scores, int64_t rows) {
  for (int64_t row = 0; row < rows; row += MOST_ROWS)
    choose<MOST_ROWS>(desk, dim, scores, rows - row < MOST_ROWS ? rows - row : MOST_ROWS, row);
}

// Scores -> weights, in place; what was summed before fades with the new maximum.
inline void soften(const Task& t, const Desk& desk, int64_t padded, int64_t from, int64_t row) {
  float* scores = desk.scores + row * TILE;
  F highest = all(LOWEST);
  for (int b = 0; b < TILE; b += LANES) {
    F s = load(scores + b);
    if (t.cap != 0.0f) s = mul(tanh_of(div(s, all(t.cap))), all(t.cap));
    float lanes[LANES];
    store(lanes, s);
    for (int i = 0; i < LANES; ++i)
      if (from + b + i < desk.low[row] || from + b + i >= desk.high[row]) lanes[i] = -__builtin_inff();
    s = load(lanes);
    store(scores + b, s);
    highest = most(s, highest);
  }
  const float before = desk.best[row], tile_best = most_of(highest), best = tile_best > before ? tile_best : before;
  F sum = zero();
  for (int b = 0; b < TILE; b += LANES) {
    const F weight = exponential(sub(load(scores + b), all(best)));
    store(scores + b, weight);
    sum = add(sum, weight);
  }
  float fade[LANES];
  store(fade, exponential(all(before - best)));
  desk.best[row] = best;
  desk.total[row] = desk.total[row] * fade[0] + sum_of(sum);
  if (before != best)
    for (int64_t d = 0; d < padded; d += LANES) {
      float* at = desk.sums + row * padded + d;
      store(at, mul(load(at), all(fade[0])));
    }
}

void attend(void* context, int64_t task, int thread) {
  const Task& t = *static_cast<const Task*>(context);
  const int64_t head = task % t.kv_heads, group = t.heads / t.kv_heads, padded = (t.dim + LANES - 1) / LANES * LANES;
  const int64_t* unit = t.units + task / t.kv_heads * 3;
  const int64_t token = unit[0], rows = unit[1] * group;
  const int64_t floats = rows * (t.dim + TILE + padded + 2 + 4) + TILE * (t.dim + padded);
  Desk desk;
  desk.low = static_cast<int64_t*>(llmx_pool::scratch(thread, floats * static_cast<int64_t>(sizeof(float))));
  desk.high = desk.low + rows;
  desk.q = reinterpret_cast<float*>(desk.high + rows);
  desk.scores = desk.q + rows * t.dim;
  desk.sums = desk.scores + rows * TILE;
  desk.best = desk.sums + rows * padded;
  desk.total = desk.best + rows;
  desk.keys = desk.total + rows;
  desk.values = desk.keys + TILE * t.dim;
  int64_t low = INT64_MAX, high = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t query = token + row / group, prefix = t.prefix[query];
    desk.high[row] = prefix;
    desk.low[row] = t.window > 0 && prefix - t.window > t.first ? prefix - t.window : t.first;
    if (desk.low[row] < desk.high[row]) {
      low = desk.low[row] < low ? desk.low[row] : low;
      high = desk.high[row] > high ? desk.high[row] : high;
    }
    desk.best[row] = LOWEST, desk.total[row] = 0.0f;
    const float* from = t.q + (query * t.heads + head * group + row % group) * t.dim;
    for (int64_t d = 0; d < t.dim; ++d) desk.q[row * t.dim + d] = from[d] * t.scale;
  }
  __builtin_memset(desk.sums, 0, static_cast<uint64_t>(rows * padded) * sizeof(float));
  for (int64_t from = low / TILE * TILE; from < high; from += TILE) {
    gather(t, desk, unit[2], token, head, padded, from, low, high);
    each_tile(desk, t.dim, true, rows);
    for (int64_t row = 0; row < rows; ++row) soften(t, desk, padded, from, row);
    each_tile(desk, padded, false, rows);
  }
  for (int64_t row = 0; row < rows; ++row) {
    float* to = t.out + ((token + row / group) * t.heads + head * group + row % group) * t.dim;
    const float total = desk.total[row] > 1e-30f ? desk.total[row] : (desk.total[row] != desk.total[row] ? desk.total[row] : 1e-30f);
    for (int64_t d = 0; d < t.dim; ++d) to[d] = desk.sums[row * padded + d] / total;
  }
}

}  // namespace

void attention(float* out, const float* q, const uint8_t* keys, const uint8_t* values, int64_t heads, int64_t kv_heads,
               int64_t dim, int64_t slots, int32_t kind, const int64_t* units, int64_t count, const int64_t* prefix,
               const int64_t* table, int64_t width, int64_t size, const int64_t* base, const int64_t* paths,
               int64_t depth, float scale, float cap, int64_t window, int64_t first, int32_t threads) {
  Task task{out,  q,      keys,  values, heads, kv_heads, dim,   slots, kind, units,  prefix,
            table, base, paths, width,  size,  depth,    scale, cap,   window, first};
  llmx_pool::each(attend, &task, count * kv_heads, threads);
}

}  // namespace LLMX_ISA
