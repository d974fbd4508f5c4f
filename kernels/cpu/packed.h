// Weights in whole numbers and the scales of their groups, as kernels/cpu/linear.py packs them.
#pragma once
#include "tile.h"

namespace LLMX_ISA {
namespace {

constexpr int SUPER = 256;  // inputs that share a d where groups have small scales

// The sections of a block of 16 outputs, one after the other; of each group (or 256 inputs) 16 lanes:
//   codes: per group 4 (4 bits) or 8 (8 bits) vectors of 16 dwords. Dword n of vector i holds inputs 4i … 4i+3 of
//          output n, a byte each; with 4 bits in the bytes' low halves, and inputs 16+4i … in their high halves.
//   SMALL: a byte for the scale, then (MIN) a byte for the minimum, of each 32 or 16 inputs; then d and e as float16
//          of each 256. Else d (and with MIN m) as float16 of each 32.
// A weight is (d * scale) * code - e * minimum, or d * code + m.
template <int BITS_, bool SIGNED_, bool SMALL, bool FINE_, bool MIN_>
struct Packed {
  static constexpr int BITS = BITS_, CODES = BITS == 4 ? 256 : 512;
  static constexpr bool SIGNED = SIGNED_, FINE = FINE_, MIN = MIN_;
  const uint8_t *codes, *scales, *minima, *d, *e;
  F scale, minimum;

  LLMX_INLINE Packed(const uint8_t* block, int64_t inputs) {
    const int64_t groups = inputs / GROUP, supers = (inputs + SUPER - 1) / SUPER;
    const int64_t small = SMALL ? groups * (FINE ? 2 : 1) * LANES : 0;
    const int64_t halves = (SMALL ? supers : groups) * 2 * LANES;
    codes = block;
    scales = codes + groups * CODES;
    minima = scales + small;
    d = minima + (MIN ? small : 0);
    e = d + halves;
  }
  LLMX_INLINE void begin(int64_t group, int part) {  // part: the half of a group that begins
    if (part == 1 && !(SMALL && FINE)) return;
    if constexpr (SMALL) {
      const int64_t at = (FINE ? 2 * group + part : group) * LANES, super = group / (SUPER / GROUP) * 2 * LANES;
      scale = mul(MIN ? load_bytes(scales + at) : load_signed(scales + at), load_half(d + super));
      if constexpr (MIN) minimum = mul(mul(load_bytes(minima + at), load_half(e + super)), all(-1.0f));
    } else {
      scale = load_half(d + group * 2 * LANES);
      if constexpr (MIN) minimum = load_half(e + group * 2 * LANES);
    }
  }
  // Of input 16 * part + 4 * i + byte of the group.
  LLMX_INLINE F weight(int64_t group, int part, int i, int byte) const {
    const int vector = BITS == 4 ? i : 4 * part + i, shift = 8 * byte + (BITS == 4 ? 4 * part : 0);
    const I words = load_words(codes + group * CODES + 64 * vector);
    const I code = SIGNED ? right_signed(left(words, 32 - BITS - shift), 32 - BITS)
                          : both(right(words, shift), (1 << BITS) - 1);
    const F value = mul(to_float(code), scale);
    if constexpr (MIN) return add(value, minimum);
    return value;
  }
};

// The formats of kernels/cpu/linear.py's FORMATS that hold whole numbers.
#define LLMX_PACKED(USE)                           \
  USE(3, Packed<4, true, false, false, false>)     \
  USE(4, Packed<4, false, false, false, true>)     \
  USE(5, Packed<4, false, true, false, true>)      \
  USE(6, Packed<8, true, false, false, false>)     \
  USE(7, Packed<8, true, false, false, true>)      \
  USE(8, Packed<8, true, true, false, true>)       \
  USE(9, Packed<8, true, true, true, false>)       \
  USE(10, Packed<8, true, true, true, true>)       \
  USE(11, Packed<8, true, true, false, false>)

// Sixteen outputs of a row to `to`, or as many as there are.
LLMX_INLINE void put_outputs(float* to, F sum, const float* bias, int64_t left) {
  if (left >= LANES) return store(to, bias ? add(sum, load(bias)) : sum);
  float lanes[LANES];
  store(lanes, sum);
  for (int64_t i = 0; i < left; ++i) to[i] = bias ? lanes[i] + bias[i] : lanes[i];
}

}  // namespace
}  // namespace LLMX_ISA
