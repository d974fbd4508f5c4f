// Weights in whole numbers and the scales of their groups, as kernels/cpu/linear.py packs them.
#pragma once
#include "tile.h"

namespace LLMX_ISA {
namespace {

constexpr int SUPER = 256;  // inputs that share a d where groups have small scales

// The sections of a block of 16 outputs, one after the other; of each group (or 256 inputs) 16 lanes:
//   codes: vectors of 16 dwords, of output n in dword n; a dword is four inputs, a byte each. With 8 bits vector j holds
//          inputs 4j … 4j+3, j = 0 … 7. With fewer, vector j = 0 … 3 holds the low four bits of inputs 4j …, and in the
//          bytes' high halves those of inputs 16+4j … ; then the rest: bit j of a byte of vector 4 is the fifth bit of
//          what byte of inputs 4j …; or bits 2(j % 4) and the next of vector 4 + j / 4 are its fifth and sixth.
//   SMALL: a byte for the scale, then (MIN) a byte for the minimum, of each 32 or (FINE) 16 inputs; then d and e as
//          float16 of each 256. Else d (and with MIN m) as float16 of each 32.
// A weight is (d * scale) * code - e * minimum, or d * code + m.
template <int BITS_, bool SIGNED_, bool SMALL, bool FINE_, bool MIN_>
struct Packed {
  static constexpr int BITS = BITS_, CODES = 64 * BITS;
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
  // Into the cache: what lies `ahead` of a group's codes and scales.
  LLMX_INLINE void fetch(int64_t group, int64_t ahead) const {
    for (int line = 0; line < BITS; ++line) __builtin_prefetch(codes + group * CODES + 64 * line + ahead);
    const int64_t at = SMALL ? (FINE ? 2 : 1) * LANES : 2 * LANES;  // bytes of a group's scales
    __builtin_prefetch((SMALL ? scales : d) + group * at + ahead);
    if constexpr (MIN) __builtin_prefetch((SMALL ? minima : e) + group * at + ahead);
  }
  // Of input 16 * part + 4 * i + byte of the group.
  LLMX_INLINE F weight(int64_t group, int part, int i, int byte) const {
    const uint8_t* at = codes + group * CODES;
    const int j = 4 * part + i;
    I code = load_words(at + 64 * (BITS == 8 ? j : i));
    if constexpr (BITS == 8) {
      code = right_signed(left(code, 24 - 8 * byte), 24);
    } else {
      code = both(right(code, 8 * byte + 4 * part), 15);
      if constexpr (BITS == 5) code = either(code, left(both(right(load_words(at + 256), 8 * byte + j), 1), 4));
      if constexpr (BITS == 6)
        code = either(code, left(both(right(load_words(at + 256 + 64 * part), 8 * byte + 2 * i), 3), 4));
      if constexpr (SIGNED) code = right_signed(left(code, 32 - BITS), 32 - BITS);
    }
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
  USE(6, Packed<4, true, true, true, false>)       \
  USE(7, Packed<4, false, true, true, true>)       \
  USE(8, Packed<5, true, false, false, false>)     \
  USE(9, Packed<5, false, false, false, true>)     \
  USE(10, Packed<5, false, true, false, true>)     \
  USE(11, Packed<6, true, true, true, false>)      \
  USE(12, Packed<8, true, false, false, false>)    \
  USE(13, Packed<8, true, true, false, false>)

// Sixteen outputs of a row to `to`, or as many as there are.
LLMX_INLINE void put_outputs(float* to, F sum, const float* bias, int64_t left) {
  if (left >= LANES) return store(to, bias ? add(sum, load(bias)) : sum);
  float lanes[LANES];
  store(lanes, sum);
  for (int64_t i = 0; i < left; ++i) to[i] = bias ? lanes[i] + bias[i] : lanes[i];
}

}  // namespace
}  // namespace LLMX_ISA
