// The product that every kernel is made of: R rows of numbers by blocks of 16 lanes, one chain of fmas per output.
#pragma once
#include "simd.h"

namespace LLMX_ISA {
namespace {

constexpr int LANES = 16;
constexpr int GROUP = 32;  // inputs whose weights a source prepares together

// Numbers, 16 lanes of each input; inputs `step` floats apart.
struct Strided {
  const float* at;
  int64_t step;
  LLMX_INLINE void begin(int64_t, int) {}
  LLMX_INLINE F weight(int64_t group, int part, int i, int byte) const {
    return load(at + (group * GROUP + 16 * part + 4 * i + byte) * step);
  }
};

// Calls use(k, part, i, byte) for each input k of a group (so many of them), and begin(part) before each half.
template <class Begin, class Use>
LLMX_INLINE void each_input(int count, const Begin& begin, const Use& use) {
  const auto half = [&](auto part) __attribute__((always_inline)) {
    begin(part());
    if (16 * part() + 16 <= count) {
#pragma GCC unroll 1
      for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 4
        for (int byte = 0; byte < 4; ++byte) use(16 * part() + 4 * i + byte, part(), i, byte);
      }
    } else {  // only plain numbers end inside a group
      for (int k = 16 * part(); k < count; ++k) use(k, part(), k % 16 / 4, k % 4);
    }
  };
  half([] { return 0; });
  half([] { return 1; });
}

// sums[r][b] = fma(weight k of sources[b], x[r * step + k], sums[r][b]) for k = first, …, last - 1. The sources begin
// at input `origin`.
template <class Source, int R, int BLOCKS>
LLMX_INLINE void accumulate(Source* sources, const float* x, int64_t step, int64_t first, int64_t last, int64_t origin,
                            F (&sums)[R][BLOCKS]) {
  for (int64_t k0 = first; k0 < last; k0 += GROUP) {
    const int64_t group = (k0 - origin) / GROUP;
    const float* at = x + k0;
    each_input(
        last - k0 < GROUP ? static_cast<int>(last - k0) : GROUP,
        [&](int part) __attribute__((always_inline)) {
          for (int b = 0; b < BLOCKS; ++b) sources[b].begin(group, part);
        },
        [&](int k, int part, int i, int byte) __attribute__((always_inline)) {
          F weights[BLOCKS];
          for (int b = 0; b < BLOCKS; ++b) weights[b] = sources[b].weight(group, part, i, byte);
          for (int r = 0; r < R; ++r) {
            const F value = all(at[r * step + k]);
            for (int b = 0; b < BLOCKS; ++b) sums[r][b] = fma(weights[b], value, sums[r][b]);
          }
        });
  }
}

}  // namespace
}  // namespace LLMX_ISA
