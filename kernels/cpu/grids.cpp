// Group grids of 2 to 8 bits: what rounding to them costs, and the search for each group's range. llmx/quantize/grids.py
// is the definition; sums over a group are in the order of sixteen lanes here, so that every instruction set agrees.
#include "ops.h"
#include "runtime/pool.h"
#include "simd.h"

namespace LLMX_ISA {
namespace {

constexpr int LANES = 16, MOST_GROUP = 1024, WIDE = 16, MOST_SWEPT = 128;  // WIDE: rows in a task
constexpr float TINIEST = 0x1p-24f;

struct Kind {
  float top, middle;  // the highest code; the zero of symmetric grids
  int symmetric, dtype;  // dtype of stored scales: 0 float32, 1 float16, 2 bfloat16
};
struct Range {
  float scale, zero;
};

inline float from_bits(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

// A positive number as `dtype` keeps it: to the nearest, ties to even.
inline float stored(float x, int dtype) {
  x = x > TINIEST ? x : TINIEST;
  if (dtype == 0) return x;
  const uint32_t bits = bits_of(x);
  if (dtype == 2) return from_bits((bits + (0x7FFFu + (bits >> 16 & 1u))) & 0xFFFF0000u);
  if (x < 0x1p-14f) {  // float16's subnormals are multiples of 2^-24, as are the floats from 0.5 to 1
    const volatile float up = x + 0.5f;  // volatile: not to be simplified
    return up - 0.5f;
  }
  if (x >= 65520.0f) return __builtin_inff();
  return from_bits((bits + (0xFFFu + (bits >> 13 & 1u))) & 0xFFFFE000u);
}

inline float whole(float x) {  // to the nearest, ties to even; of 0 <= x
  const float bounded = x < 0x1p20f ? x : 0x1p20f;
  const volatile float up = bounded + 0x1.8p23f;
  return up - 0x1.8p23f;
}

struct Extent {
  float low, high;  // with 0 between them
};

inline Extent extent(const float* v, int64_t group) {
  F most_ = zero(), least_ = zero();
  for (int64_t i = 0; i < group; i += LANES) {
    const F x = load(v + i);
    most_ = most(most_, x), least_ = most(least_, sub(zero(), x));
  }
  return {-most_of(least_), most_of(most_)};
}

// `factor`: of symmetric grids 2 * shrink / top, else the shrink itself.
inline Range range_of(Extent e, float factor, const Kind& kind) {
  if (kind.symmetric) {
    const float size = e.high > -e.low ? e.high : -e.low;
    return {stored(size * factor, kind.dtype), kind.middle};
  }
  const float low = e.low * factor, high = e.high * factor;
  const float scale = stored((high - low) / kind.top, kind.dtype), zero = whole(-low / scale);
  return {scale, zero < kind.top ? zero : kind.top};
}

// What a number becomes: (code - zero) * scale.
LLMX_INLINE F rounded(F v, F scale, F zero_, F top) {
  const F far = all(1024.0f);  // beyond every code: keeps the rounding exact
  const F ratio = least(far, most(sub(zero(), far), div(v, scale)));
  const F code = least(top, most(zero(), add(nearest(ratio), zero_)));
  return mul(sub(code, zero_), scale);
}

struct Rounds {
  float* errors;
  const float *weight, *columns;
  int64_t rows, inputs, group;
  float factor;
  Kind kind;
};

void round_rows(void* context, int64_t task, int) {
  const Rounds& job = *static_cast<const Rounds*>(context);
  alignas(64) float v[MOST_GROUP];
  const F top = all(job.kind.top);
  const int64_t end = (task + 1) * WIDE < job.rows ? (task + 1) * WIDE : job.rows;
  for (int64_t row = task * WIDE; row < end; ++row)
    for (int64_t at = 0; at < job.inputs; at += job.group) {
      const float *w = job.weight + row * job.inputs + at, *c = job.columns + at;
      float* out = job.errors + row * job.inputs + at;
      for (int64_t i = 0; i < job.group; i += LANES) store(v + i, mul(load(w + i), load(c + i)));
      const Range range = range_of(extent(v, job.group), job.factor, job.kind);
      const F scale = all(range.scale), zero_ = all(range.zero);
      for (int64_t i = 0; i < job.group; i += LANES)
        store(out + i, sub(load(w + i), div(rounded(load(v + i), scale, zero_, top), load(c + i))));
    }
}

struct Search {
  float *scales, *zeros;
  const float *weight, *metric, *factors;
  int64_t rows, inputs, group, count;
  int quadratic;
  Kind kind;
};

// Sum of metric * e^2, or e^T metric e.
inline float loss_of(const float* e, const float* metric, int64_t group, int quadratic) {
  F total = zero();
  if (!quadratic) {
    for (int64_t i = 0; i < group; i += LANES) {
      const F x = load(e + i);
      total = add(total, mul(mul(x, x), load(metric + i)));
    }
    return sum_of(total);
  }
  for (int64_t j = 0; j < group; j += 2 * LANES) {
    const bool both = j + LANES < group;
    F one = zero(), two = zero();
    for (int64_t i = 0; i < group; ++i) {
      const F x = all(e[i]);
      const float* row = metric + i * group + j;
      one = fma(x, load(row), one);
      if (both) two = fma(x, load(row + LANES), two);
    }
    total = add(total, mul(one, load(e + j)));
    if (both) total = add(total, mul(two, load(e + j + LANES)));
  }
  return sum_of(total);
}

void search_rows(void* context, int64_t task, int) {
  const Search& job = *static_cast<const Search*>(context);
  alignas(64) float e[MOST_GROUP];
  const F top = all(job.kind.top);
  const int64_t groups = job.inputs / job.group;
  const int64_t end = (task + 1) * WIDE < job.rows ? (task + 1) * WIDE : job.rows;
  for (int64_t g = 0; g < groups; ++g) {
    const float* metric = job.metric + g * job.group * (job.quadratic ? job.group : 1);
    for (int64_t row = task * WIDE; row < end; ++row) {
      const float* w = job.weight + row * job.inputs + g * job.group;
      const Extent whole_range = extent(w, job.group);
      float best = 0;
      Range kept{};
      for (int64_t s = 0; s < job.count; ++s) {
        const Range range = range_of(whole_range, job.factors[s], job.kind);
        const F scale = all(range.scale), zero_ = all(range.zero);
        for (int64_t i = 0; i < job.group; i += LANES) {
          const F x = load(w + i);
          store(e + i, sub(rounded(x, scale, zero_, top), x));
        }
        const float loss = loss_of(e, metric, job.group, job.quadratic);
        if (s == 0 || loss < best) best = loss, kept = range;
      }
      job.scales[row * groups + g] = kept.scale;
      job.zeros[row * groups + g] = kept.zero;
    }
  }
}

// Some inputs of GPTQ's sweep, the outputs side by side: left, codes and errors are (count, outputs).
struct Sweep {
  const float* left;
  float *codes, *errors;
  const float* factor;
  int64_t stride, count, outputs;
  const float *scales, *zeros;
  const int64_t* groups;
  float top;
};

inline void copy_lanes(float* to, const float* from, int64_t count) {
  __builtin_memcpy(to, from, static_cast<uint64_t>(count) * sizeof(float));
}

void sweep_outputs(void* context, int64_t task, int) {
  const Sweep& job = *static_cast<const Sweep*>(context);
  alignas(64) float left[MOST_SWEPT * LANES], some[LANES];
  const int64_t first = task * LANES, rest = job.outputs - first, lanes = rest < LANES ? rest : LANES;
  for (int64_t i = 0; i < job.count; ++i) {
    store(left + i * LANES, zero());
    copy_lanes(left + i * LANES, job.left + i * job.outputs + first, lanes);
  }
  const auto lanes_of = [&](const float* from, float rest_is) {
    store(some, all(rest_is));
    copy_lanes(some, from + first, lanes);
    return load(some);
  };
  const auto keep = [&](float* to, int64_t i, F value) {
    store(some, value);
    copy_lanes(to + i * job.outputs + first, some, lanes);
  };
  const F top = all(job.top), far = all(1024.0f);
  for (int64_t i = 0; i < job.count; ++i) {
    const float* row = job.factor + i * job.stride;
    const F scale = lanes_of(job.scales + job.groups[i] * job.outputs, 1.0f);
    const F zero_ = lanes_of(job.zeros + job.groups[i] * job.outputs, 0.0f);
    const F value = load(left + i * LANES), ratio = least(far, most(sub(zero(), far), div(value, scale)));
    const F code = least(top, most(zero(), add(nearest(ratio), zero_)));
    const F error = div(sub(value, mul(sub(code, zero_), scale)), all(row[i]));
    for (int64_t j = i + 1; j < job.count; ++j)
      store(left + j * LANES, sub(load(left + j * LANES), mul(all(row[j]), error)));
    keep(job.codes, i, code), keep(job.errors, i, error);
  }
}

inline Kind kind_of(int32_t top, int32_t symmetric, int32_t dtype) {
  return {static_cast<float>(top), static_cast<float>((top + 1) / 2), symmetric, dtype};
}

}  // namespace

// errors (rows, inputs): weight - round_to_nearest(weight * columns) / columns. `group`: a multiple of 16, up to 1024.
void round_groups(float* errors, const float* weight, const float* columns, int64_t rows, int64_t inputs,
                  int64_t group, float factor, int32_t top, int32_t symmetric, int32_t dtype, int32_t threads) {
  Rounds job{errors, weight, columns, rows, inputs, group, factor, kind_of(top, symmetric, dtype)};
  llmx_pool::each(round_rows, &job, (rows + WIDE - 1) / WIDE, threads);
}

// scales, zeros (rows, groups): those of `count` factors with the least loss, the first of equals. metric: (inputs,)
// or, if `quadratic`, (groups, group, group).
void search_groups(float* scales, float* zeros, const float* weight, const float* metric, int32_t quadratic,
                   int64_t rows, int64_t inputs, int64_t group, const float* factors, int64_t count, int32_t top,
                   int32_t symmetric, int32_t dtype, int32_t threads) {
  Search job{scales, zeros, weight, metric, factors, rows, inputs, group, count, quadratic,
             kind_of(top, symmetric, dtype)};
  llmx_pool::each(search_rows, &job, (rows + WIDE - 1) / WIDE, threads);
}

// `count` inputs of the sweep, up to 128, for every output: codes, and errors for what is left. factor: (count, count)
// of rows `stride` apart. scales, zeros: (groups, outputs); groups: (count,).
void gptq_sweep(const float* left, float* codes, float* errors, const float* factor, int64_t stride, int64_t count,
                int64_t outputs, const float* scales, const float* zeros, const int64_t* groups, int32_t top,
                int32_t threads) {
  Sweep job{left, codes, errors, factor, stride, count, outputs, scales, zeros, groups, static_cast<float>(top)};
  llmx_pool::each(sweep_outputs, &job, (outputs + LANES - 1) / LANES, threads);
}

}  // namespace LLMX_ISA
