// What works on one row at a time: norms, rotary positions with the write to the cache, gated activations, sums,
// copies. kernels/reference/{norm,rope,activation,rows}.py define them. All in float32; a row does not see its neighbours.
#include "ops.h"
#include "runtime/pool.h"
#include "simd.h"

namespace LLMX_ISA {
namespace {

constexpr int LANES = 16;
constexpr int WIDEST_HEAD = 1024;
constexpr int64_t SOME = 16 * 1024;  // numbers that are worth a task of their own
constexpr int64_t DEARER = 4;  // an exponential and a division, beside what a norm does with a number

struct Rows {
  int64_t rows, tasks;
  void (*one)(void*, int64_t);
  void* context;
};

void some(void* context, int64_t task, int) {
  const Rows& r = *static_cast<const Rows*>(context);
  const int64_t end = r.rows * (task + 1) / r.tasks;
  for (int64_t row = r.rows * task / r.tasks; row < end; ++row) r.one(r.context, row);
}

void each_row(void (*one)(void*, int64_t), void* context, int64_t rows, int64_t numbers, int32_t threads) {
  int64_t tasks = (rows * numbers + SOME - 1) / SOME;
  if (tasks > 1) tasks = (tasks + threads - 1) / threads * threads;  // as many for each thread
  Rows r{rows, tasks < rows ? tasks : rows, one, context};
  llmx_pool::each(some, &r, r.tasks, threads);
}

// Calls use(at, count) for runs of 16 numbers, the last with fewer.
template <class Use>
LLMX_INLINE void runs(int64_t count, const Use& use) {
  for (int64_t at = 0; at < count; at += LANES) use(at, count - at < LANES ? static_cast<int>(count - at) : LANES);
}

LLMX_INLINE F load_some(const float* p, int count) {
  if (count == LANES) return load(p);
  float lanes[LANES] = {0};
  __builtin_memcpy(lanes, p, static_cast<uint64_t>(count) * sizeof(float));
  return load(lanes);
}

LLMX_INLINE void store_some(float* p, F x, int count) {
  if (count == LANES) return store(p, x);
  float lanes[LANES];
  store(lanes, x);
  __builtin_memcpy(p, lanes, static_cast<uint64_t>(count) * sizeof(float));
}

struct Norm {
  float *out, *total;
  const float *x, *residual, *weight;
  int64_t hidden;
  float eps;
};

// weight * x / root of the mean square
LLMX_INLINE void norm_into(float* out, const float* x, const float* weight, int64_t width, float eps) {
  F squares = zero();
  runs(width, [&](int64_t at, int count) __attribute__((always_inline)) {
    const F v = load_some(x + at, count);
    squares = fma(v, v, squares);
  });
  const float mean = sum_of(squares) / static_cast<float>(width);
  const F scale = all(1.0f / __builtin_sqrtf(mean + eps));
  runs(width, [&](int64_t at, int count) __attribute__((always_inline)) {
    const F scaled = mul(load_some(x + at, count), scale);
    store_some(out + at, mul(scaled, load_some(weight + at, count)), count);
  });
}

void norm_row(void* context, int64_t row) {
  const Norm& n = *static_cast<const Norm*>(context);
  const float* x = n.x + row * n.hidden;
  if (n.residual != nullptr) {
    float* total = n.total + row * n.hidden;
    runs(n.hidden, [&](int64_t at, int count) __attribute__((always_inline)) {
      store_some(total + at, add(load_some(x + at, count), load_some(n.residual + row * n.hidden + at, count)), count);
    });
    x = total;
  }
  norm_into(n.out + row * n.hidden, x, n.weight, n.hidden, n.eps);
}

struct Heads {
  float* out;
  const float* x;
  int64_t width, q_width, k_width;
  const float* q_weight;
  int64_t q_unit;
  const float* k_weight;
  int64_t k_unit;
  float eps;
};

void heads_row(void* context, int64_t row) {
  const Heads& h = *static_cast<const Heads*>(context);
  const float* x = h.x + row * h.width;
  float* out = h.out + row * h.width;
  int64_t at = 0;
  for (; at < h.q_width; at += h.q_unit) norm_into(out + at, x + at, h.q_weight, h.q_unit, h.eps);
  for (; at < h.q_width + h.k_width; at += h.k_unit) norm_into(out + at, x + at, h.k_weight, h.k_unit, h.eps);
  __builtin_memcpy(out + at, x + at, static_cast<uint64_t>(h.width - at) * sizeof(float));
}

struct Copy {
  uint8_t* out;
  int64_t out_stride;
  const uint8_t* x;
  int64_t stride, bytes;
  const int64_t* index;
  int64_t count;
};

void copy_row(void* context, int64_t row) {
  const Copy& c = *static_cast<const Copy*>(context);
  int64_t from = row;
  if (c.index != nullptr) from = c.index[row] < 0 ? 0 : c.index[row] < c.count ? c.index[row] : c.count - 1;
  __builtin_memcpy(c.out + row * c.out_stride, c.x + from * c.stride, static_cast<uint64_t>(c.bytes));
}

constexpr int64_t PIECE = 1024;  // numbers that elementwise work takes at once, as if they were a row

struct Flat {
  uint8_t* out;
  const uint8_t* x;
  const float* y;
  int64_t count;
  float scale;
  int32_t kind;  // 1 float16, 2 bfloat16
};

LLMX_INLINE int64_t end_of(const Flat& f, int64_t piece) {
  return (piece + 1) * PIECE < f.count ? (piece + 1) * PIECE : f.count;
}

void add_piece(void* context, int64_t piece) {
  const Flat& f = *static_cast<const Flat*>(context);
  const int64_t from = piece * PIECE;
  const float *x = reinterpret_cast<const float*>(f.x) + from, *y = f.y == nullptr ? nullptr : f.y + from;
  float* out = reinterpret_cast<float*>(f.out) + from;
  runs(end_of(f, piece) - from, [&](int64_t at, int count) __attribute__((always_inline)) {
    const F scaled = mul(load_some(x + at, count), all(f.scale));  // by 1 it stays as it is
    store_some(out + at, y == nullptr ? scaled : add(scaled, load_some(y + at, count)), count);
  });
}

void widen_piece(void* context, int64_t piece) {
  const Flat& f = *static_cast<const Flat*>(context);
  const int64_t from = piece * PIECE;
  float* out = reinterpret_cast<float*>(f.out) + from;
  runs(end_of(f, piece) - from, [&](int64_t at, int count) __attribute__((always_inline)) {
    uint16_t lanes[LANES] = {0};
    __builtin_memcpy(lanes, f.x + 2 * (from + at), static_cast<uint64_t>(count) * 2);
    store_some(out + at, f.kind == 1 ? load_half(lanes) : load_bfloat(lanes), count);
  });
}

void narrow_piece(void* context, int64_t piece) {
  const Flat& f = *static_cast<const Flat*>(context);
  const int64_t from = piece * PIECE;
  const float* x = reinterpret_cast<const float*>(f.x) + from;
  runs(end_of(f, piece) - from, [&](int64_t at, int count) __attribute__((always_inline)) {
    uint16_t lanes[LANES];
    store_bfloat(lanes, load_some(x + at, count));
    __builtin_memcpy(f.out + 2 * (from + at), lanes, static_cast<uint64_t>(count) * 2);
  });
}

struct Rope {
  float* q;
  const float* qkv;
  uint8_t *keys, *values, *scales;
  int64_t heads, kv_heads, dim, half, size, block_bytes, head_bytes;
  int32_t kind;  // of the pools: 0 float32, 2 bfloat16, 3 int8
  const int64_t* slot;
  const float *cos, *sin;
};

// Numbers as a pool stores them, bytes that begin at `to`.
LLMX_INLINE void convert(uint8_t* to, const float* numbers, int64_t count, int32_t kind) {
  runs(count, [&](int64_t i, int some) __attribute__((always_inline)) {
    const F x = load_some(numbers + i, some);
    if (kind == 0) return store_some(reinterpret_cast<float*>(to) + i, x, some);
    uint16_t lanes[LANES];
    store_bfloat(lanes, x);
    __builtin_memcpy(to + 2 * i, lanes, static_cast<uint64_t>(some) * 2);
  });
}

// Codes of 8 bits: a number is its code times the scale that is returned, which is none where a number is none.
LLMX_INLINE float quantize(uint8_t* to, const float* numbers, int64_t count) {
  F largest = zero(), none = zero();
  runs(count, [&](int64_t i, int some) __attribute__((always_inline)) {
    const F x = load_some(numbers + i, some);
    largest = most(most(x, sub(zero(), x)), largest);
    none = fma(x, zero(), none);
  });
  const float amax = most_of(largest), inverse = amax > 0.0f ? 127.0f / amax : 0.0f;
  runs(count, [&](int64_t i, int some) __attribute__((always_inline)) {
    float lanes[LANES];
    const F code = nearest(mul(load_some(numbers + i, some), all(inverse)));
    store(lanes, least(all(127.0f), most(code, all(-127.0f))));
    for (int k = 0; k < some; ++k) to[i + k] = static_cast<uint8_t>(static_cast<int8_t>(lanes[k]));
  });
  return amax / 127.0f + sum_of(none);
}

// A head's numbers into a block: keys (`step` is the block's size) lie a dimension after the other, values together.
template <class T>
LLMX_INLINE void spread(uint8_t* to, const uint8_t* numbers, int64_t count, int64_t step) {
  for (int64_t i = 0; i < count; ++i)
    __builtin_memcpy(to + i * step * static_cast<int64_t>(sizeof(T)), numbers + i * static_cast<int64_t>(sizeof(T)),
                     sizeof(T));
}

LLMX_INLINE void put_key(const Rope& r, int64_t at, int64_t place, const float* numbers) {
  uint8_t some[4 * WIDEST_HEAD];
  if (r.kind == 3) {
    reinterpret_cast<float*>(r.scales + at)[place] = quantize(some, numbers, r.dim);
    return spread<uint8_t>(r.keys + at + place, some, r.dim, r.size);
  }
  convert(some, numbers, r.dim, r.kind);
  if (r.kind == 0) return spread<float>(r.keys + at + 4 * place, some, r.dim, r.size);
  spread<uint16_t>(r.keys + at + 2 * place, some, r.dim, r.size);
}

LLMX_INLINE void put_value(const Rope& r, int64_t at, int64_t place, const float* numbers) {
  if (r.kind != 3) return convert(r.values + at + place * r.dim * (r.kind == 0 ? 4 : 2), numbers, r.dim, r.kind);
  reinterpret_cast<float*>(r.scales + at)[r.size + place] = quantize(r.values + at + place * r.dim, numbers, r.dim);
}

void rope_row(void* context, int64_t row) {
  const Rope& r = *static_cast<const Rope*>(context);
  const float* from = r.qkv + row * (r.heads + 2 * r.kv_heads) * r.dim;
  const float *cos = r.cos + row * r.half, *sin = r.sin + row * r.half;
  const int64_t block = r.slot[row] / r.size * r.block_bytes, place = r.slot[row] % r.size;
  float turned[WIDEST_HEAD];
  for (int64_t head = 0; head < r.heads + r.kv_heads; ++head, from += r.dim) {
    float* to = head < r.heads ? r.q + (row * r.heads + head) * r.dim : turned;
    runs(r.half, [&](int64_t i, int count) __attribute__((always_inline)) {
      const F a = load_some(from + i, count), b = load_some(from + r.half + i, count);
      const F c = load_some(cos + i, count), s = load_some(sin + i, count);
      store_some(to + i, sub(mul(a, c), mul(b, s)), count);
      store_some(to + r.half + i, add(mul(b, c), mul(a, s)), count);
    });
    __builtin_memcpy(to + 2 * r.half, from + 2 * r.half, static_cast<uint64_t>(r.dim - 2 * r.half) * sizeof(float));
    if (head >= r.heads) put_key(r, block + (head - r.heads) * r.head_bytes, place, turned);
  }
  for (int64_t head = 0; head < r.kv_heads; ++head, from += r.dim)
    put_value(r, block + head * r.head_bytes, place, from);
}

struct Gate {
  float* out;
  const float* x;
  int64_t inner;
};

// 1 + erf(x / root of 2), from the C library: no family that is common here asks for it
LLMX_INLINE F erf_and_one(F x) {
  float lanes[LANES];
  store(lanes, mul(x, all(0.70710678f)));
  for (float& lane : lanes) lane = 1.0f + __builtin_erff(lane);
  return load(lanes);
}

enum { SILU, GELU_TANH, GELU };

template <int KIND>
void gate_row(void* context, int64_t row) {
  const Gate& g = *static_cast<const Gate*>(context);
  const float *gate = g.x + row * 2 * g.inner, *up = gate + g.inner;
  runs(g.inner, [&](int64_t i, int count) __attribute__((always_inline)) {
    const F x = load_some(gate + i, count), one = all(1.0f);
    F z = x;
    if constexpr (KIND == GELU) {
      const F whole = mul(mul(all(0.5f), x), erf_and_one(x));
      return store_some(g.out + row * g.inner + i, mul(whole, load_some(up + i, count)), count);
    }
    if constexpr (KIND == GELU_TANH) {  // 1 + tanh(u) is 2 / (1 + e^-2u), without the cancellation
      const F cubed = mul(mul(mul(all(0.044715f), x), x), x);
      z = mul(all(2.0f * 0.7978845608f), add(x, cubed));
    }
    const F y = div(x, add(one, exponential(sub(zero(), z))));
    store_some(g.out + row * g.inner + i, mul(y, load_some(up + i, count)), count);
  });
}

}  // namespace

void rms_norm(float* out, float* total, const float* x, const float* residual, const float* weight, int64_t rows,
              int64_t hidden, float eps, int32_t threads) {
  Norm n{out, total, x, residual, weight, hidden, eps};
  each_row(norm_row, &n, rows, hidden, threads);
}

void rope_and_write(float* q, const float* qkv, int64_t rows, uint8_t* keys, uint8_t* values, uint8_t* scales,
                    int64_t heads, int64_t kv_heads, int64_t dim, int64_t half, int64_t size, int64_t block_bytes,
                    int64_t head_bytes, int32_t kind, const int64_t* slot, const float* cos, const float* sin,
                    int32_t threads) {
  Rope r{q,    qkv,  keys, values,      scales,     heads, kv_heads, dim,
         half, size, block_bytes, head_bytes, kind,  slot,  cos,      sin};
  each_row(rope_row, &r, rows, (heads + 2 * kv_heads) * dim, threads);
}

void gated(float* out, const float* x, int64_t rows, int64_t inner, int32_t kind, int32_t threads) {
  Gate g{out, x, inner};
  each_row(kind == SILU ? gate_row<SILU> : kind == GELU ? gate_row<GELU> : gate_row<GELU_TANH>, &g, rows,
           DEARER * inner, threads);
}

void norm_heads(float* out, const float* x, int64_t rows, int64_t width, int64_t q_width, int64_t k_width,
                const float* q_weight, int64_t q_unit, const float* k_weight, int64_t k_unit, float eps,
                int32_t threads) {
  Heads h{out, x, width, q_width, k_width, q_weight, q_unit, k_weight, k_unit, eps};
  each_row(heads_row, &h, rows, width, threads);
}

void add_scaled(float* out, const float* x, float scale, const float* y, int64_t count, int32_t threads) {
  Flat f{reinterpret_cast<uint8_t*>(out), reinterpret_cast<const uint8_t*>(x), y, count, scale, 0};
  each_row(add_piece, &f, (count + PIECE - 1) / PIECE, PIECE, threads);
}

void copy_rows(uint8_t* out, int64_t out_stride, const uint8_t* x, int64_t stride, int64_t bytes, const int64_t* index,
               int64_t count, int64_t rows, int32_t threads) {
  Copy c{out, out_stride, x, stride, bytes, index, count};
  each_row(copy_row, &c, rows, bytes / 4 + 1, threads);
}

void widen(float* out, const uint8_t* x, int64_t count, int32_t kind, int32_t threads) {
  Flat f{reinterpret_cast<uint8_t*>(out), x, nullptr, count, 1.0f, kind};
  each_row(widen_piece, &f, (count + PIECE - 1) / PIECE, PIECE, threads);
}

void narrow(uint8_t* out, const float* x, int64_t count, int32_t threads) {
  Flat f{out, reinterpret_cast<const uint8_t*>(x), nullptr, count, 1.0f, 2};
  each_row(narrow_piece, &f, (count + PIECE - 1) / PIECE, PIECE, threads);
}

}  // namespace LLMX_ISA
