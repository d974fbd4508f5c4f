// Weights in whole numbers and the scales of their groups, as kernels/cpu/linear.py packs them.
#pragma once
#include "tile.h"

namespace LLMX_ISA {
namespace {

constexpr int SUPER = 256;  // inputs that share a d where groups have small scales

// A block of 16 outputs is one stream, in the order in which it is read: bunches of groups of 32 inputs, first what all of
// a bunch needs beside codes, then the codes. Of all there are 16 lanes, one after the other.
//   SMALL: a bunch is 256 inputs: d and (MIN) e as float16, then a byte for the scale and (MIN) a byte for the minimum of
//          each 32 or (FINE) 16 inputs, and zeros up to a whole cache line. Else d and (MIN) m as float16 of each 32, of
//          one group with MIN and of two without, which fill whole cache lines.
//   codes: of each group vectors of 16 dwords, of output n in dword n; a dword is four inputs, a byte each. With 8 bits
//          vector j holds inputs 4j … 4j+3, j = 0 … 7. With fewer, codes that have a sign are stored as code + half of
//          what the bits can say, so that none is negative, and vector j = 0 … 3 holds the low four bits of inputs
//          4j …, and in the bytes' high halves those of inputs 16+4j … ; then the rest: bit j of a byte of vector 4 is the
//          fifth bit of what byte of inputs 4j …; or bits 2(j % 4) and the next of vector 4 + j / 4 are its fifth and
//          sixth.
// The last bunch ends with the last group.
// A weight is (d * scale) * code - e * minimum, or d * code + m.
template <int BITS_, bool SIGNED_, bool SMALL, bool FINE_, bool MIN_>
struct Packed {
  static constexpr int BITS = BITS_, CODES = 64 * BITS;
  static constexpr int UP = BITS < 5 ? 1 : 1 << (BITS - 4);  // codes with a sign are moved up by 8 of it
  static constexpr bool SIGNED = SIGNED_, FINE = FINE_, MIN = MIN_;
  static constexpr int KINDS = MIN ? 2 : 1, HALVES = 2 * LANES;  // bytes of a d
  static constexpr int GROUPS = SMALL ? SUPER / GROUP : 2 / KINDS;  // in a bunch
  static constexpr int SCALES = SMALL ? GROUPS * (FINE ? 2 : 1) * LANES : 0;
  static constexpr int HEADER = (KINDS * (SCALES + (SMALL ? 1 : GROUPS) * HALVES) + 63) / 64 * 64;
  const uint8_t* block;
  F scale, minimum;

  Packed() = default;
  LLMX_INLINE Packed(const uint8_t* from, int64_t) : block(from) {}
  LLMX_INLINE static int64_t bunch(int64_t group) { return group / GROUPS * (HEADER + GROUPS * CODES); }
  LLMX_INLINE const uint8_t* codes(int64_t group) const {
    return block + bunch(group) + HEADER + group % GROUPS * CODES;
  }
  LLMX_INLINE void begin(int64_t group, int part) {  // part: the half of a group that begins
    if (part == 1 && !(SMALL && FINE)) return;
    const uint8_t* d = block + bunch(group) + (SMALL ? 0 : group % GROUPS * HALVES);
    const uint8_t* e = d + (SMALL ? 1 : GROUPS) * HALVES;
    if constexpr (SMALL) {
      const uint8_t* at = d + KINDS * HALVES + (FINE ? 2 * (group % GROUPS) + part : group % GROUPS) * LANES;
      scale = mul(MIN ? load_bytes(at) : load_signed(at), load_half(d));
      if constexpr (MIN) minimum = mul(mul(load_bytes(at + SCALES), load_half(e)), all(-1.0f));
    } else {
      scale = load_half(d);
      if constexpr (MIN) minimum = load_half(e);
    }
  }
  // Into the cache: what lies `ahead` of a group.
  template <int LEVEL>
  LLMX_INLINE void fetch(int64_t group, int64_t ahead) const {
    const uint8_t* at = codes(group) + ahead;
    if (group % GROUPS == 0)
      for (int byte = 0; byte < HEADER; byte += 64) __builtin_prefetch(at - HEADER + byte, 0, LEVEL);
    for (int line = 0; line < BITS; ++line) __builtin_prefetch(at + 64 * line, 0, LEVEL);
  }
  // Of input 16 * part + 4 * i + byte of the group.
  LLMX_INLINE F weight(int64_t group, int part, int i, int byte) const {
    const uint8_t* at = codes(group);
    const int j = 4 * part + i;
    I code = load_words(at + 64 * (BITS == 8 ? j : i));
    if constexpr (BITS == 8) {
      code = right_signed(left(code, 24 - 8 * byte), 24);
    } else {
      code = both(right(code, 8 * byte + 4 * part), 15);
      if constexpr (BITS == 5) code = either(code, left(both(right(load_words(at + 256), 8 * byte + j), 1), 4));
      if constexpr (BITS == 6)
        code = either(code, left(both(right(load_words(at + 256 + 64 * part), 8 * byte + 2 * i), 3), 4));
    }
    const F number = to_float(code);
    const F value = mul(SIGNED && BITS < 8 ? sub(number, all(1 << (BITS - 1))) : number, scale);
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
