// A linear layer straight from packed weights, and the packing's definition. kernels/cpu/linear.py packs.
//
// Every output is one chain: acc = fma(w[k], x[k], acc) for k = 0, 1, … in order, where w[k] is the weight in float32
// exactly as its scheme defines it. So a row's bits depend on neither rows, tiles, threads nor on whether weights were
// expanded first, and equal those of the same weights packed as float32.
#include "ops.h"
#include "runtime/pool.h"
#include "packed.h"

namespace LLMX_ISA {
namespace {

constexpr int PANEL = 256;  // inputs whose weights are expanded at a time: 16 KiB
constexpr int FEW = MOST_ROWS < 4 ? MOST_ROWS : 4;  // up to so many rows, expanding weights first costs more than it saves

enum class Number { single, half, bfloat };

// Plain numbers: 16 lanes of each input, one after the other.
template <Number KIND>
struct Plain {
  const uint8_t* at;
  LLMX_INLINE Plain(const uint8_t* block, int64_t) : at(block) {}
  LLMX_INLINE void begin(int64_t, int) {}
  LLMX_INLINE F weight(int64_t group, int part, int i, int byte) const {
    const int64_t input = group * GROUP + 16 * part + 4 * i + byte;
    if constexpr (KIND == Number::single) return load(reinterpret_cast<const float*>(at) + input * LANES);
    if constexpr (KIND == Number::half) return load_half(at + input * 2 * LANES);
    return load_bfloat(at + input * 2 * LANES);
  }
};

struct Job {
  const uint8_t* packed;
  int64_t block_bytes, inputs, outputs, rows;
  const float* x;  // (rows, inputs)
  float* out;      // (rows, stride)
  int64_t stride;
  const float* bias;
  int64_t wide;  // blocks in a task
};

LLMX_INLINE void finish(const Job& job, F sum, int64_t row, int64_t block) {
  const int64_t at = block * LANES;
  put_outputs(job.out + row * job.stride + at, sum, job.bias ? job.bias + at : nullptr, job.outputs - at);
}

template <class Source, int R, int BLOCKS>
void tile(const Job& job, int64_t row, int64_t block) {
  const auto at = [&](int64_t b) __attribute__((always_inline)) {
    return Source(job.packed + (block + b) * job.block_bytes, job.inputs);
  };
  F sums[R][BLOCKS];
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < BLOCKS; ++b) sums[r][b] = zero();
  if constexpr (BLOCKS == 4) {
    Source sources[4] = {at(0), at(1), at(2), at(3)};
    accumulate<Source, R, 4>(sources, job.x + row * job.inputs, job.inputs, 0, job.inputs, 0, sums);
  } else if constexpr (BLOCKS == 2) {
    Source sources[2] = {at(0), at(1)};
    accumulate<Source, R, 2>(sources, job.x + row * job.inputs, job.inputs, 0, job.inputs, 0, sums);
  } else {
    Source sources[1] = {at(0)};
    accumulate<Source, R, 1>(sources, job.x + row * job.inputs, job.inputs, 0, job.inputs, 0, sums);
  }
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < BLOCKS; ++b) finish(job, sums[r][b], row + r, block + b);
}

// With few rows several blocks go side by side: one chain of fmas waits for itself.
template <class Source, int R>
void rows_of(const Job& job, int64_t row, int64_t block, int64_t end) {
  constexpr int BLOCKS = R == 1 ? 4 : R == 2 ? 2 : 1;
  for (; block + BLOCKS <= end; block += BLOCKS) tile<Source, R, BLOCKS>(job, row, block);
  for (; block < end; ++block) tile<Source, R, 1>(job, row, block);
}

template <class Source, int R>
LLMX_INLINE void choose_rows(const Job& job, int64_t rows, int64_t row, int64_t block, int64_t end) {
  if (rows == R) return rows_of<Source, R>(job, row, block, end);
  if constexpr (R > 1) choose_rows<Source, R - 1>(job, rows, row, block, end);
}

template <class Source>
void few(void* context, int64_t task, int) {
  const Job& job = *static_cast<const Job*>(context);
  const int64_t blocks = (job.outputs + LANES - 1) / LANES, block = task * job.wide;
  choose_rows<Source, FEW>(job, job.rows, 0, block, block + job.wide < blocks ? block + job.wide : blocks);
}

constexpr int SIDE = MOST_SUMS / MOST_ROWS;  // blocks side by side, with many rows

template <int R, int B>
void panel(const Job& job, const float* weights, float* sums, int64_t row, int64_t first, int64_t last, int64_t block) {
  F acc[R][B];
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) acc[r][b] = first ? load(sums + ((row + r) * B + b) * LANES) : zero();
  Strided sources[B];
  for (int b = 0; b < B; ++b) sources[b] = {weights + b * PANEL * LANES, LANES};
  accumulate<Strided, R, B>(sources, job.x + row * job.inputs, job.inputs, first, last, first, acc);
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) {
      if (last == job.inputs)
        finish(job, acc[r][b], row + r, block + b);
      else
        store(sums + ((row + r) * B + b) * LANES, acc[r][b]);
    }
}

template <int R, int B>
LLMX_INLINE void choose_panel(const Job& job, int64_t rows, const float* weights, float* sums, int64_t row,
                              int64_t first, int64_t last, int64_t block) {
  if (rows == R) return panel<R, B>(job, weights, sums, row, first, last, block);
  if constexpr (R > 1) choose_panel<R - 1, B>(job, rows, weights, sums, row, first, last, block);
}

template <class Source>
void expand(Source source, int64_t first, int64_t last, float* to) {
  for (int64_t k0 = first; k0 < last; k0 += GROUP) {
    const int64_t group = k0 / GROUP;
    float* at = to + (k0 - first) * LANES;
    each_input(
        last - k0 < GROUP ? static_cast<int>(last - k0) : GROUP,
        [&](int part) __attribute__((always_inline)) { source.begin(group, part); },
        [&](int k, int part, int i, int byte) __attribute__((always_inline)) {
          store(at + k * LANES, source.weight(group, part, i, byte));
        });
  }
}

inline int64_t tiles_of(int64_t rows) { return (rows + MOST_ROWS - 1) / MOST_ROWS; }

// Many rows: weights of B blocks in float32 for PANEL inputs at a time, which all rows then use from the first-level cache.
template <class Source, int B>
void blocks_at(const Job& job, int64_t block, int thread) {
  const int64_t bytes = static_cast<int64_t>(sizeof(float)) * LANES * B * (PANEL + job.rows);
  float* weights = static_cast<float*>(llmx_pool::scratch(thread, bytes));
  float* sums = weights + B * PANEL * LANES;
  const int64_t tiles = tiles_of(job.rows);
  for (int64_t first = 0; first < job.inputs; first += PANEL) {
    const int64_t last = first + PANEL < job.inputs ? first + PANEL : job.inputs;
    for (int b = 0; b < B; ++b)
      expand(Source(job.packed + (block + b) * job.block_bytes, job.inputs), first, last, weights + b * PANEL * LANES);
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = job.rows * t / tiles, next = job.rows * (t + 1) / tiles;
      choose_panel<MOST_ROWS, B>(job, next - row, weights, sums, row, first, last, block);
    }
  }
}

template <class Source>
void many(void* context, int64_t task, int thread) {
  const Job& job = *static_cast<const Job*>(context);
  const int64_t blocks = (job.outputs + LANES - 1) / LANES, block = task * SIDE;
  if (block + SIDE <= blocks) return blocks_at<Source, SIDE>(job, block, thread);
  if constexpr (SIDE > 1) blocks_at<Source, 1>(job, block, thread);
}

template <class Source>
void run(Job& job, int threads) {
  const int64_t blocks = (job.outputs + LANES - 1) / LANES;
  if (job.rows > FEW) return llmx_pool::each(many<Source>, &job, (blocks + SIDE - 1) / SIDE, threads);
  job.wide = blocks / (8 * threads) < 4 ? 4 : blocks / (8 * threads) / 4 * 4;
  llmx_pool::each(few<Source>, &job, (blocks + job.wide - 1) / job.wide, threads);
}

template <class Source>
void expand_all(float* out, const uint8_t* packed, int64_t block_bytes, int64_t inputs, int64_t outputs) {
  for (int64_t block = 0; block * LANES < outputs; ++block) {
    const Source source(packed + block * block_bytes, inputs);
    for (int64_t first = 0; first < inputs; first += PANEL) {
      const int64_t last = first + PANEL < inputs ? first + PANEL : inputs;
      float weights[PANEL * LANES];
      expand(source, first, last, weights);
      for (int64_t n = 0; n < LANES && block * LANES + n < outputs; ++n)
        for (int64_t k = first; k < last; ++k)
          out[(block * LANES + n) * inputs + k] = weights[(k - first) * LANES + n];
    }
  }
}

#define LLMX_SOURCES(USE)       \
  USE(0, Plain<Number::single>) \
  USE(1, Plain<Number::half>)   \
  USE(2, Plain<Number::bfloat>) \
  LLMX_PACKED(USE)

}  // namespace

void linear_packed(float* out, int64_t stride, const float* x, int64_t rows, int64_t inputs, const uint8_t* packed,
                   int64_t block_bytes, int64_t outputs, int32_t format, const float* bias, int32_t threads) {
  Job job{packed, block_bytes, inputs, outputs, rows, x, out, stride, bias, 0};
  switch (format) {
#define LLMX_RUN(number, ...) \
  case number:                \
    return run<__VA_ARGS__>(job, threads);
    LLMX_SOURCES(LLMX_RUN)
  }
}

void unpack_linear(float* out, const uint8_t* packed, int64_t block_bytes, int64_t inputs, int64_t outputs,
                   int32_t format) {
  switch (format) {
#define LLMX_EXPAND(number, ...) \
  case number:                   \
    return expand_all<__VA_ARGS__>(out, packed, block_bytes, inputs, outputs);
    LLMX_SOURCES(LLMX_EXPAND)
  }
}

}  // namespace LLMX_ISA
