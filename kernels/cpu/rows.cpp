// What works on one row at a time: norms, rotary positions with the write to the cache, gated activations.
// kernels/reference/{norm,rope,activation}.py define them. All in float32; a row does not see its neighbours.
#include "ops.h"
#include "runtime/pool.h"
#include "simd.h"

namespace LLMX_ISA {
namespace {

constexpr int LANES = 16;
constexpr int64_t SOME = 16 * 1024;  // numbers that are worth a task of their own

struct Rows {
  int64_t rows, each;  // rows of a task
  void (*one)(void*, int64_t);
  void* context;
};

void some(void* context, int64_t task, int) {
  const Rows& r = *static_cast<const Rows*>(context);
  const int64_t end = (task + 1) * r.each < r.rows ? (task + 1) * r.each : r.rows;
  for (int64_t row = task * r.each; row < end; ++row) r.one(r.context, row);
}

void each_row(void (*one)(void*, int64_t), void* context, int64_t rows, int64_t numbers, int32_t threads) {
  const int64_t each = numbers < SOME ? (SOME + numbers - 1) / numbers : 1;
  Rows r{rows, each, one, context};
  llmx_pool::each(some, &r, (rows + each - 1) / each, threads);
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

void norm_row(void* context, int64_t row) {
  const Norm& n = *static_cast<const Norm*>(context);
  const float* x = n.x + row * n.hidden;
  F squares = zero();
  if (n.residual != nullptr) {
    float* total = n.total + row * n.hidden;
    runs(n.hidden, [&](int64_t at, int count) __attribute__((always_inline)) {
      store_some(total + at, add(load_some(x + at, count), load_some(n.residual + row * n.hidden + at, count)), count);
    });
    x = total;
  }
  runs(n.hidden, [&](int64_t at, int count) __attribute__((always_inline)) {
    const F v = load_some(x + at, count);
    squares = fma(v, v, squares);
  });
  const float mean = sum_of(squares) / static_cast<float>(n.hidden);
  const F scale = all(1.0f / __builtin_sqrtf(mean + n.eps));
  runs(n.hidden, [&](int64_t at, int count) __attribute__((always_inline)) {
    const F scaled = mul(load_some(x + at, count), scale);
    store_some(n.out + row * n.hidden + at, mul(scaled, load_some(n.weight + at, count)), count);
  });
}

struct Rope {
  float* q;
  const float* qkv;
  uint8_t *keys, *values;
  int64_t heads, kv_heads, dim, half, slots;
  int32_t kind;
  const int64_t* slot;
  const float *cos, *sin;
};

LLMX_INLINE void put(uint8_t* pool, int64_t at, const float* numbers, int64_t count, int32_t kind) {
  runs(count, [&](int64_t i, int some) __attribute__((always_inline)) {
    const F x = load_some(numbers + i, some);
    if (kind == 0) return store_some(reinterpret_cast<float*>(pool) + at + i, x, some);
    uint16_t lanes[LANES];
    store_bfloat(lanes, x);
    __builtin_memcpy(pool + 2 * (at + i), lanes, static_cast<uint64_t>(some) * 2);
  });
}

void rope_row(void* context, int64_t row) {
  const Rope& r = *static_cast<const Rope*>(context);
  const float* from = r.qkv + row * (r.heads + 2 * r.kv_heads) * r.dim;
  const float *cos = r.cos + row * r.half, *sin = r.sin + row * r.half;
  float turned[1024];
  for (int64_t head = 0; head < r.heads + r.kv_heads; ++head, from += r.dim) {
    float* to = head < r.heads ? r.q + (row * r.heads + head) * r.dim : turned;
    runs(r.half, [&](int64_t i, int count) __attribute__((always_inline)) {
      const F a = load_some(from + i, count), b = load_some(from + r.half + i, count);
      const F c = load_some(cos + i, count), s = load_some(sin + i, count);
      store_some(to + i, sub(mul(a, c), mul(b, s)), count);
      store_some(to + r.half + i, add(mul(b, c), mul(a, s)), count);
    });
    __builtin_memcpy(to + 2 * r.half, from + 2 * r.half, static_cast<uint64_t>(r.dim - 2 * r.half) * sizeof(float));
    if (head >= r.heads) put(r.keys, ((head - r.heads) * r.slots + r.slot[row]) * r.dim, turned, r.dim, r.kind);
  }
  for (int64_t head = 0; head < r.kv_heads; ++head, from += r.dim)
    put(r.values, (head * r.slots + r.slot[row]) * r.dim, from, r.dim, r.kind);
}

struct Gate {
  float* out;
  const float* x;
  int64_t inner;
};

template <bool GELU>
void gate_row(void* context, int64_t row) {
  const Gate& g = *static_cast<const Gate*>(context);
  const float *gate = g.x + row * 2 * g.inner, *up = gate + g.inner;
  runs(g.inner, [&](int64_t i, int count) __attribute__((always_inline)) {
    const F x = load_some(gate + i, count), one = all(1.0f);
    F z = x;
    if constexpr (GELU) {  // 1 + tanh(u) is 2 / (1 + e^-2u), without the cancellation
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

void rope_and_write(float* q, const float* qkv, int64_t rows, uint8_t* keys, uint8_t* values, int64_t heads,
                    int64_t kv_heads, int64_t dim, int64_t half, int64_t slots, int32_t kind, const int64_t* slot,
                    const float* cos, const float* sin, int32_t threads) {
  Rope r{q, qkv, keys, values, heads, kv_heads, dim, half, slots, kind, slot, cos, sin};
  each_row(rope_row, &r, rows, (heads + 2 * kv_heads) * dim, threads);
}

void gated(float* out, const float* x, int64_t rows, int64_t inner, int32_t gelu, int32_t threads) {
  Gate g{out, x, inner};
  each_row(gelu ? gate_row<true> : gate_row<false>, &g, rows, inner, threads);
}

}  // namespace LLMX_ISA
