// Sums of products of bytes: four codes of an output in a dword, times four numbers of a row.
//
// A Codes is WIDE outputs; PARTS of them are the 16 of a block. Codes are from 0 to 15 (Nibble), from 0 to 63 (Wider), or
// from -128 to 127 (Byte); a row's numbers from -127 to 127. All of it is exact, so that an order need not be kept.
#pragma once
#include "simd.h"

namespace LLMX_ISA {
namespace {

struct Nibble {};
struct Wider {};
struct Byte {};

#if defined(__AVX512F__)

#if !defined(__AVX512BF16__)
#define LLMX_UNPACKED  // what linear_int8.cpp does with many rows, for the reason that MOST_SUMS is larger
#endif
constexpr int INT8_ROWS = 12, WIDE = 16, PARTS = 1;  // rows of a tile

struct Codes { __m512i v; };
struct V { __m512 v; };
template <class> struct Dots { __m512i v; };
LLMX_INLINE Codes load_codes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
LLMX_INLINE Codes shifted(Codes w, int up) {  // within dwords: the caller masks what crosses bytes
  return {up >= 0 ? _mm512_slli_epi32(w.v, static_cast<unsigned>(up)) : _mm512_srli_epi32(w.v, static_cast<unsigned>(-up))};
}
LLMX_INLINE Codes masked(Codes w, int bits) { return {_mm512_and_si512(w.v, _mm512_set1_epi8(static_cast<char>(bits)))}; }
LLMX_INLINE Codes either(Codes a, Codes b) { return {_mm512_or_si512(a.v, b.v)}; }
LLMX_INLINE Codes moved_up(Codes w) { return {_mm512_xor_si512(w.v, _mm512_set1_epi8(-128))}; }  // bytes, by 128
LLMX_INLINE void store_codes(uint8_t* p, Codes w) { _mm512_storeu_si512(p, w.v); }
// `less`: minus what codes were moved up by, times the sum of the row's numbers. `no_dots` or `total` adds it.
template <class K> LLMX_INLINE Dots<K> no_dots(int32_t less) { return {_mm512_set1_epi32(less)}; }
// The product takes one side without a sign, of all 8 bits: bytes are moved up by 128, and `less` moves them back.
template <class K> LLMX_INLINE void dot(Dots<K>& sum, Codes w, int32_t x) {
  sum.v = _mm512_dpbusd_epi32(sum.v, w.v, _mm512_set1_epi32(x));
}
LLMX_INLINE void dot(Dots<Byte>& sum, Codes w, int32_t x) {
  sum.v = _mm512_dpbusd_epi32(sum.v, moved_up(w).v, _mm512_set1_epi32(x));
}
LLMX_INLINE void dot(Dots<Wider>& sum, Codes w, int32_t x, Codes w2, int32_t x2) {
  sum.v = _mm512_dpbusd_epi32(sum.v, w.v, _mm512_set1_epi32(x));
  sum.v = _mm512_dpbusd_epi32(sum.v, w2.v, _mm512_set1_epi32(x2));
}
template <class K> LLMX_INLINE V total(Dots<K> sum, int32_t) { return {_mm512_cvtepi32_ps(sum.v)}; }
LLMX_INLINE V part_of(F x, int) { return {x.v}; }
constexpr bool SEPARATE = true;
using Held = V;  // what a tile adds up: here there are registers for all of it
LLMX_INLINE V given(const Held& from) { return from; }
LLMX_INLINE void hold(Held& to, V x) { to = x; }
LLMX_INLINE F joined(const Held (&parts)[1]) { return {parts[0].v}; }
LLMX_INLINE V every(float x) { return {_mm512_set1_ps(x)}; }
LLMX_INLINE V mul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
LLMX_INLINE V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }

constexpr bool EXPONENTS = true;  // adding to an exponent is cheaper than a product: other pipes do it

// Weights with their exponents less by that of 1.
struct Exponents {
  V plain;
  __m512i less;
  __mmask16 some;  // which aren't zero
  LLMX_INLINE explicit Exponents(V w) : plain(w) {
    less = _mm512_add_epi32(_mm512_castps_si512(plain.v), _mm512_set1_epi32(-0x3F800000));
    some = _mm512_cmp_ps_mask(_mm512_setzero_ps(), _mm512_abs_ps(plain.v), _CMP_LT_OQ);
  }
  LLMX_INLINE bool finite() const {
    const __m512 infinity = _mm512_castsi512_ps(_mm512_set1_epi32(0x7F800000));
    return _mm512_cmp_ps_mask(_mm512_abs_ps(plain.v), infinity, _CMP_LT_OQ) == 0xFFFF;
  }
  LLMX_INLINE V times(float power) const {
    int32_t bits;
    __builtin_memcpy(&bits, &power, sizeof bits);
    return {_mm512_castsi512_ps(_mm512_maskz_add_epi32(some, less, _mm512_set1_epi32(bits)))};
  }
};

#elif defined(__AVX2__)

constexpr int INT8_ROWS = 8, WIDE = 8, PARTS = 2;

// GCC would add up all products as a tree, and run out of registers.
#define LLMX_KEEP(vector) __asm__("" : "+x"(vector))

struct Codes { __m256i v; };
struct V { __m256 v; };
template <class> struct Dots { __m256i v; };
LLMX_INLINE Codes load_codes(const uint8_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
LLMX_INLINE Codes shifted(Codes w, int up) {  // within dwords: the caller masks what crosses bytes
  return {up >= 0 ? _mm256_slli_epi32(w.v, up) : _mm256_srli_epi32(w.v, -up)};
}
LLMX_INLINE Codes masked(Codes w, int bits) { return {_mm256_and_si256(w.v, _mm256_set1_epi8(static_cast<char>(bits)))}; }
LLMX_INLINE Codes either(Codes a, Codes b) { return {_mm256_or_si256(a.v, b.v)}; }
template <class K> LLMX_INLINE Dots<K> no_dots(int32_t) { return {_mm256_setzero_si256()}; }
// A pair of products is at most 15 * 127 * 2 = 3810, so that the 8 pairs of a group fit into 16 bits.
LLMX_INLINE void dot(Dots<Nibble>& sum, Codes w, int32_t x) {
  sum.v = _mm256_add_epi16(sum.v, _mm256_maddubs_epi16(w.v, _mm256_set1_epi32(x)));
  LLMX_KEEP(sum.v);
}
// A pair is at most 63 * 127 * 2 = 16002: two fit.
LLMX_INLINE void dot(Dots<Wider>& sum, Codes w, int32_t x, Codes w2, int32_t x2) {
  const __m256i pairs = _mm256_maddubs_epi16(w.v, _mm256_set1_epi32(x));
  const __m256i more = _mm256_maddubs_epi16(w2.v, _mm256_set1_epi32(x2));
  sum.v = _mm256_add_epi32(sum.v, _mm256_madd_epi16(_mm256_add_epi16(pairs, more), _mm256_set1_epi16(1)));
  LLMX_KEEP(sum.v);
}
// |w| * (x with the sign of w): one side of the product has no sign. A pair is at most 128 * 127 * 2 = 32512.
LLMX_INLINE void dot(Dots<Byte>& sum, Codes w, int32_t x) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w.v), _mm256_sign_epi8(_mm256_set1_epi32(x), w.v));
  sum.v = _mm256_add_epi32(sum.v, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  LLMX_KEEP(sum.v);
}
LLMX_INLINE __m256i whole(Dots<Nibble> sum) { return _mm256_madd_epi16(sum.v, _mm256_set1_epi16(1)); }
LLMX_INLINE __m256i whole(Dots<Wider> sum) { return sum.v; }
template <class K> LLMX_INLINE V total(Dots<K> sum, int32_t less) {
  return {_mm256_cvtepi32_ps(_mm256_add_epi32(whole(sum), _mm256_set1_epi32(less)))};
}
LLMX_INLINE V total(Dots<Byte> sum, int32_t) { return {_mm256_cvtepi32_ps(sum.v)}; }
LLMX_INLINE V part_of(F x, int part) { return {part ? x.b : x.a}; }
struct Held { float lanes[WIDE]; };  // what a tile adds up: in memory, as there are 16 registers
LLMX_INLINE V given(const Held& from) { return {_mm256_loadu_ps(from.lanes)}; }
LLMX_INLINE void hold(Held& to, V x) { _mm256_storeu_ps(to.lanes, x.v); }
LLMX_INLINE F joined(const Held (&parts)[2]) { return {given(parts[0]).v, given(parts[1]).v}; }
LLMX_INLINE V every(float x) { return {_mm256_set1_ps(x)}; }
LLMX_INLINE V mul(V a, V b) { return {_mm256_mul_ps(a.v, b.v)}; }
LLMX_INLINE V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }

#else

constexpr int INT8_ROWS = 2, WIDE = 16, PARTS = 1;

struct Codes { Words v; };
using V = F;
template <class> struct Dots { Signed v; };
LLMX_INLINE Codes load_codes(const uint8_t* p) {
  Codes w;
  copy(w, p);
  return w;
}
LLMX_INLINE Codes shifted(Codes w, int up) {  // within dwords: the caller masks what crosses bytes
  return {up >= 0 ? w.v << static_cast<uint32_t>(up) : w.v >> static_cast<uint32_t>(-up)};
}
LLMX_INLINE Codes masked(Codes w, int bits) { return {w.v & 0x01010101u * static_cast<uint32_t>(bits)}; }
LLMX_INLINE Codes either(Codes a, Codes b) { return {a.v | b.v}; }
template <class K> LLMX_INLINE Dots<K> no_dots(int32_t) { return {Signed{}}; }
template <class K> LLMX_INLINE void dot(Dots<K>& sum, Codes w, int32_t x) {
  for (int byte = 0; byte < 4; ++byte) {
    const uint32_t up = static_cast<uint32_t>(24 - 8 * byte);
    sum.v += ((Signed)(w.v << up) >> 24) * (static_cast<int32_t>(static_cast<uint32_t>(x) << up) >> 24);
  }
}
LLMX_INLINE void dot(Dots<Wider>& sum, Codes w, int32_t x, Codes w2, int32_t x2) { dot(sum, w, x), dot(sum, w2, x2); }
template <class K> LLMX_INLINE V total(Dots<K> sum, int32_t less) {
  return {__builtin_convertvector(sum.v + less, Floats)};
}
LLMX_INLINE V total(Dots<Byte> sum, int32_t) { return {__builtin_convertvector(sum.v, Floats)}; }
LLMX_INLINE V part_of(F x, int) { return x; }
struct Held { float lanes[WIDE]; };  // what a tile adds up
LLMX_INLINE V given(const Held& from) { return load(from.lanes); }
LLMX_INLINE void hold(Held& to, V x) { store(to.lanes, x); }
LLMX_INLINE F joined(const Held (&parts)[1]) { return given(parts[0]); }
LLMX_INLINE V every(float x) { return all(x); }

#endif

struct Numbers {
  V plain;
  LLMX_INLINE explicit Numbers(V w) : plain(w) {}
  LLMX_INLINE bool finite() const { return true; }  // or not: a product says it
  LLMX_INLINE V times(float by) const { return mul(plain, every(by)); }
};

#if !defined(__AVX512F__)
constexpr bool EXPONENTS = false, SEPARATE = false;
using Exponents = Numbers;
#endif

}  // namespace
}  // namespace LLMX_ISA
