// AVX-512 for a processor that has only AVX2: what kernels/cpu's `#if defined(__AVX512F__)` branches call, as Intel's
// Intrinsics Guide defines it. CMake puts it before each kernel of the set when LLMX_EMULATE_AVX512 asks for that.
//
// The names lie in the kernels' own namespace, where they hide <immintrin.h>'s, and a register is a struct. So an
// intrinsic that is not here doesn't compile: the real one takes or returns other types, or wants other flags.
// tests/native/emulated_driver.cpp holds each against a definition in plain arithmetic.
#pragma once
#pragma GCC diagnostic push  // GCC 12 calls its own undefined vectors uninitialized
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#include <stdint.h>

#if defined(__AVX512F__) || !defined(__AVX2__)
#error "compile this with the flags of the set avx2"
#endif
#define __AVX512F__ 1

// Without optimization these are macros.
#undef _mm512_cmp_ps_mask
#undef _mm512_extractf32x8_ps
#undef _mm512_roundscale_ps

namespace LLMX_ISA {

// Of an immediate that the kernels don't use: called, and then an error, only where the compiler can't leave it out.
void not_emulated() __attribute__((error("this immediate is not emulated")));

namespace {

#define EMULATED inline __attribute__((always_inline, unused))

struct __m512 { __m256 a, b; };  // lanes 0 … 7, and 8 … 15
struct __m512i { __m256i a, b; };
struct Dwords { int32_t at[16]; };

EMULATED Dwords dwords(__m512i x) {
  Dwords d;
  __builtin_memcpy(&d, &x, sizeof d);
  return d;
}

// ---- sources of registers, and stores: none asks for an alignment
EMULATED __m512 _mm512_setzero_ps() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
EMULATED __m512 _mm512_set1_ps(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
EMULATED __m512i _mm512_set1_epi32(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
EMULATED __m512i _mm512_set1_epi8(char x) { return {_mm256_set1_epi8(x), _mm256_set1_epi8(x)}; }
EMULATED __m512 _mm512_loadu_ps(const void* p) {
  const float* at = static_cast<const float*>(p);
  return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)};
}
EMULATED __m512i _mm512_loadu_si512(const void* p) {
  const __m256i* at = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
EMULATED void _mm512_storeu_ps(void* p, __m512 x) {
  float* at = static_cast<float*>(p);
  _mm256_storeu_ps(at, x.a), _mm256_storeu_ps(at + 8, x.b);
}
EMULATED void _mm512_storeu_si512(void* p, __m512i x) {
  __m256i* at = static_cast<__m256i*>(p);
  _mm256_storeu_si256(at, x.a), _mm256_storeu_si256(at + 1, x.b);
}

// ---- what AVX2 does with half as many lanes, and nothing else
#define EACH(type, name, half) \
  EMULATED type _mm512_##name(type x, type y) { return {_mm256_##half(x.a, y.a), _mm256_##half(x.b, y.b)}; }
EACH(__m512, add_ps, add_ps)
EACH(__m512, sub_ps, sub_ps)
EACH(__m512, mul_ps, mul_ps)
EACH(__m512, div_ps, div_ps)
EACH(__m512, max_ps, max_ps)  // the second where either is a NaN, or both are zeros
EACH(__m512, min_ps, min_ps)
EACH(__m512i, add_epi32, add_epi32)
EACH(__m512i, mullo_epi32, mullo_epi32)
EACH(__m512i, mul_epu32, mul_epu32)
EACH(__m512i, and_si512, and_si256)
EACH(__m512i, or_si512, or_si256)
EACH(__m512i, xor_si512, xor_si256)
#undef EACH
// By an immediate of 8 bits; past the width of a lane it leaves zeros, or copies of the sign.
#define SHIFT(name)                                               \
  EMULATED __m512i _mm512_##name(__m512i x, unsigned count) {     \
    const int n = static_cast<int>(count & 255);                  \
    return {_mm256_##name(x.a, n), _mm256_##name(x.b, n)};        \
  }
SHIFT(slli_epi32)
SHIFT(srli_epi32)
SHIFT(srai_epi32)
SHIFT(srli_epi64)
#undef SHIFT
EMULATED __m512 _mm512_fmadd_ps(__m512 x, __m512 y, __m512 z) {  // rounded once
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
EMULATED __m512 _mm512_abs_ps(__m512 x) {  // of a NaN, too
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
// To whole numbers: the immediate's low bits say how, its high four to how many binary places.
EMULATED __m512 _mm512_roundscale_ps(__m512 x, int how) {
  if (how != (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)) not_emulated();
  return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
EMULATED __m512i _mm512_cvtps_epi32(__m512 x) {  // to the nearest, ties to even; INT32_MIN for what has no int32
  return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)};
}
EMULATED __m512 _mm512_cvtepi32_ps(__m512i x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }

// ---- the same bits as another type, and half of them
EMULATED __m512i _mm512_castps_si512(__m512 x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
EMULATED __m512 _mm512_castsi512_ps(__m512i x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
EMULATED __m256 _mm512_castps512_ps256(__m512 x) { return x.a; }
EMULATED __m256 _mm512_extractf32x8_ps(__m512 x, int which) {
  if (which != 0 && which != 1) not_emulated();
  return which ? x.b : x.a;
}

// ---- masks: bit i is of lane i
EMULATED __mmask16 _mm512_cmp_ps_mask(__m512 x, __m512 y, int how) {
  __m256 a = x.a, b = x.b;
  switch (how) {
    case _CMP_LT_OQ: a = _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), b = _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ); break;
    case _CMP_NLE_UQ: a = _mm256_cmp_ps(x.a, y.a, _CMP_NLE_UQ), b = _mm256_cmp_ps(x.b, y.b, _CMP_NLE_UQ); break;
    case _CMP_UNORD_Q: a = _mm256_cmp_ps(x.a, y.a, _CMP_UNORD_Q), b = _mm256_cmp_ps(x.b, y.b, _CMP_UNORD_Q); break;
    default: not_emulated();
  }
  return static_cast<__mmask16>(_mm256_movemask_ps(a) | _mm256_movemask_ps(b) << 8);
}
EMULATED __m256i spread(int mask) {  // all bits of lane i where bit i is set
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(mask), bits), bits);
}
EMULATED __m512i _mm512_mask_mov_epi32(__m512i unset, __mmask16 mask, __m512i set) {
  return {_mm256_blendv_epi8(unset.a, set.a, spread(mask)), _mm256_blendv_epi8(unset.b, set.b, spread(mask >> 8))};
}
EMULATED __m512 _mm512_mask_mov_ps(__m512 unset, __mmask16 mask, __m512 set) {
  return _mm512_castsi512_ps(_mm512_mask_mov_epi32(_mm512_castps_si512(unset), mask, _mm512_castps_si512(set)));
}
EMULATED __m512i _mm512_maskz_add_epi32(__mmask16 mask, __m512i x, __m512i y) {
  return _mm512_mask_mov_epi32(_mm512_set1_epi32(0), mask, _mm512_add_epi32(x, y));
}

// ---- to and from narrower lanes
EMULATED __m512i _mm512_cvtepu8_epi32(__m128i x) {
  return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}
EMULATED __m512i _mm512_cvtepi8_epi32(__m128i x) {
  return {_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))};
}
EMULATED __m512i _mm512_cvtepu16_epi32(__m256i x) {
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1))};
}
EMULATED __m512 _mm512_cvtph_ps(__m256i x) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
EMULATED __m256i _mm512_cvtepi32_epi16(__m512i x) {  // the low halves
  const Dwords from = dwords(x);
  uint16_t to[16];
  for (int i = 0; i < 16; ++i) to[i] = static_cast<uint16_t>(from.at[i]);
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(to));
}
EMULATED __m128i _mm512_cvtsepi32_epi8(__m512i x) {  // the nearest number that a byte holds
  const Dwords from = dwords(x);
  int8_t to[16];
  for (int i = 0; i < 16; ++i)
    to[i] = static_cast<int8_t>(from.at[i] < -128 ? -128 : from.at[i] > 127 ? 127 : from.at[i]);
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(to));
}

// ---- sums
EMULATED int _mm512_reduce_add_epi32(__m512i x) {  // of the low 32 bits
  const Dwords from = dwords(x);
  uint32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += static_cast<uint32_t>(from.at[i]);
  return static_cast<int>(sum);
}
// Four bytes without a sign by four with one, added to a dword; only the last sum may wrap, and nothing saturates.
EMULATED __m256i add_products(__m256i sum, __m256i u, __m256i s) {
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
  return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
EMULATED __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i u, __m512i s) {
  return {add_products(sum.a, u.a, s.a), add_products(sum.b, u.b, s.b)};
}

#undef EMULATED

}  // namespace
}  // namespace LLMX_ISA
