// Sixteen lanes, whatever the processor: what kernels are written in. One definition per instruction set.
#pragma once
#include <stdint.h>

#pragma GCC diagnostic ignored "-Wpsabi"  // all of this is inlined

#if defined(__AVX2__)
#pragma GCC diagnostic push  // GCC 12 calls its own undefined vectors uninitialized
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#define LLMX_INLINE inline __attribute__((always_inline))

namespace LLMX_ISA {
namespace {

#if defined(__AVX512F__)

constexpr int MOST_ROWS = 12;  // rows of a tile: what the registers hold beside the weights
// Of a tile of several blocks. Ice Lake multiplies two vectors in a cycle but reads little more than one, so that blocks
// have to share each number that is read. Zen 4 multiplies one: there, where sums are of pairs, it was not measured.
#if defined(__AVX512BF16__)
constexpr int MOST_SUMS = 12;
#else
constexpr int MOST_SUMS = 24;
#endif
struct F { __m512 v; };
struct I { __m512i v; };
LLMX_INLINE F zero() { return {_mm512_setzero_ps()}; }
LLMX_INLINE F all(float x) { return {_mm512_set1_ps(x)}; }
LLMX_INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
LLMX_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
LLMX_INLINE F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
LLMX_INLINE F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
LLMX_INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
LLMX_INLINE F load_half(const void* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)))}; }
LLMX_INLINE F load_bfloat(const void* p) {
  const __m256i wide = _mm256_loadu_si256(static_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(wide), 16))};
}
LLMX_INLINE F load_bytes(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
LLMX_INLINE F load_signed(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
LLMX_INLINE I load_words(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
LLMX_INLINE I left(I a, int n) { return {_mm512_slli_epi32(a.v, static_cast<unsigned>(n))}; }
LLMX_INLINE I right(I a, int n) { return {_mm512_srli_epi32(a.v, static_cast<unsigned>(n))}; }
LLMX_INLINE I right_signed(I a, int n) { return {_mm512_srai_epi32(a.v, static_cast<unsigned>(n))}; }
LLMX_INLINE I both(I a, int mask) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(mask))}; }
LLMX_INLINE I either(I a, I b) { return {_mm512_or_si512(a.v, b.v)}; }
LLMX_INLINE F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
LLMX_INLINE F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
LLMX_INLINE F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
LLMX_INLINE F most(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }   // b where either is no number
LLMX_INLINE F least(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
LLMX_INLINE F nearest(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
LLMX_INLINE F size_of(F a) { return {_mm512_abs_ps(a.v)}; }
LLMX_INLINE int32_t round_to_bytes(F a, int8_t* to) {  // to the nearest, ties to even; the sum of them
  const __m512i n = _mm512_cvtps_epi32(a.v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(n));
  return _mm512_reduce_add_epi32(n);
}
LLMX_INLINE F power_of_two(F n) {  // whole n
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
LLMX_INLINE F zero_where_below(F value, F a, F b) {
  return {_mm512_mask_mov_ps(value.v, _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), _mm512_setzero_ps())};
}
LLMX_INLINE void store_bfloat(void* p, F a) {  // to the nearest, ties to even
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
  const __m512i nan = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  const __m512i chosen = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), nan);
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(chosen));
}

#elif defined(__AVX2__)

constexpr int MOST_ROWS = 6, MOST_SUMS = 6;
struct F { __m256 a, b; };
struct I { __m256i a, b; };
LLMX_INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
LLMX_INLINE F all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
LLMX_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
LLMX_INLINE void store(float* p, F a) { _mm256_storeu_ps(p, a.a), _mm256_storeu_ps(p + 8, a.b); }
LLMX_INLINE F add(F a, F b) { return {_mm256_add_ps(a.a, b.a), _mm256_add_ps(a.b, b.b)}; }
LLMX_INLINE F mul(F a, F b) { return {_mm256_mul_ps(a.a, b.a), _mm256_mul_ps(a.b, b.b)}; }
LLMX_INLINE F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)}; }
LLMX_INLINE __m128i sixteen(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
LLMX_INLINE __m128i eight(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
LLMX_INLINE F load_half(const void* p) {
  return {_mm256_cvtph_ps(sixteen(p)), _mm256_cvtph_ps(sixteen(static_cast<const char*>(p) + 16))};
}
LLMX_INLINE __m256 bfloat(const void* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(sixteen(p)), 16));
}
LLMX_INLINE F load_bfloat(const void* p) { return {bfloat(p), bfloat(static_cast<const char*>(p) + 16)}; }
LLMX_INLINE F load_bytes(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight(p))), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight(p + 8)))};
}
LLMX_INLINE F load_signed(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight(p))), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight(p + 8)))};
}
LLMX_INLINE I load_words(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
LLMX_INLINE I left(I x, int n) { return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)}; }
LLMX_INLINE I right(I x, int n) { return {_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)}; }
LLMX_INLINE I right_signed(I x, int n) { return {_mm256_srai_epi32(x.a, n), _mm256_srai_epi32(x.b, n)}; }
LLMX_INLINE I both(I x, int mask) {
  const __m256i m = _mm256_set1_epi32(mask);
  return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
LLMX_INLINE I either(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
LLMX_INLINE F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
LLMX_INLINE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
LLMX_INLINE F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
LLMX_INLINE F most(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }  // y where either is NaN
LLMX_INLINE F least(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
LLMX_INLINE F nearest(F x) {
  constexpr int how = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, how), _mm256_round_ps(x.b, how)};
}
LLMX_INLINE F size_of(F x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
LLMX_INLINE int32_t round_to_bytes(F x, int8_t* to) {  // to the nearest, ties to even; the sum of them
  const __m256i a = _mm256_cvtps_epi32(x.a), b = _mm256_cvtps_epi32(x.b), sums = _mm256_add_epi32(a, b);
  const __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
  const __m128i low = _mm256_castsi256_si128(halves), high = _mm256_extracti128_si256(halves, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(low, high));
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1)));
}
LLMX_INLINE __m256 power_of_two(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
LLMX_INLINE F power_of_two(F n) { return {power_of_two(n.a), power_of_two(n.b)}; }  // whole n
LLMX_INLINE F zero_where_below(F value, F x, F y) {
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), value.a),
          _mm256_andnot_ps(_mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ), value.b)};
}
LLMX_INLINE __m256i bfloat_bits(__m256 x) {  // to the nearest, ties to even; in the low halves
  const __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i up = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
  const __m256i nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(up, nan, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
LLMX_INLINE void store_bfloat(void* p, F x) {
  const __m256i both = _mm256_packus_epi32(bfloat_bits(x.a), bfloat_bits(x.b));
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_permute4x64_epi64(both, 0xD8));
}

#else  // GCC's and Clang's vectors, which become whatever the processor has

constexpr int MOST_ROWS = 2, MOST_SUMS = 2;
template <class T, int N>
struct Lanes {
  typedef T Type __attribute__((vector_size(sizeof(T) * N)));
};
using Floats = Lanes<float, 16>::Type;
using Words = Lanes<uint32_t, 16>::Type;
using Signed = Lanes<int32_t, 16>::Type;
struct F { Floats v; };
struct I { Words v; };
template <class T>
LLMX_INLINE void copy(T& to, const void* from) { __builtin_memcpy(&to, from, sizeof to); }
LLMX_INLINE F zero() { return {Floats{}}; }
LLMX_INLINE F all(float x) { return {Floats{} + x}; }
LLMX_INLINE F load(const float* p) {
  F a;
  copy(a, p);
  return a;
}
LLMX_INLINE void store(float* p, F a) { __builtin_memcpy(p, &a, sizeof a); }
LLMX_INLINE F add(F a, F b) { return {a.v + b.v}; }
LLMX_INLINE F mul(F a, F b) { return {a.v * b.v}; }
LLMX_INLINE F fma(F a, F b, F c) { return {a.v * b.v + c.v}; }
LLMX_INLINE Words halves(const void* p) {
  Lanes<uint16_t, 16>::Type h;
  copy(h, p);
  return __builtin_convertvector(h, Words);
}
LLMX_INLINE F as_floats(Words bits) {
  F a;
  copy(a, &bits);
  return a;
}
LLMX_INLINE F load_half(const void* p) {
  const Words h = halves(p), sign = (h & 0x8000u) << 16, rest = h & 0x7FFFu;
  const Words normal = (rest << 13) + (112u << 23), special = 0x7F800000u | (rest & 0x3FFu) << 13;
  const Floats tiny = __builtin_convertvector(rest, Floats) * 0x1p-24f;  // zero and subnormals
  Words small;
  copy(small, &tiny);
  return as_floats(sign | (rest < 0x400u ? small : (rest >= 0x7C00u ? special : normal)));
}
LLMX_INLINE F load_bfloat(const void* p) { return as_floats(halves(p) << 16); }
LLMX_INLINE F load_bytes(const uint8_t* p) {
  Lanes<uint8_t, 16>::Type bytes;
  copy(bytes, p);
  return {__builtin_convertvector(bytes, Floats)};
}
LLMX_INLINE F load_signed(const uint8_t* p) {
  Lanes<int8_t, 16>::Type bytes;
  copy(bytes, p);
  return {__builtin_convertvector(bytes, Floats)};
}
LLMX_INLINE I load_words(const uint8_t* p) {
  I a;
  copy(a, p);
  return a;
}
LLMX_INLINE I left(I a, int n) { return {a.v << static_cast<uint32_t>(n)}; }
LLMX_INLINE I right(I a, int n) { return {a.v >> static_cast<uint32_t>(n)}; }
LLMX_INLINE I right_signed(I a, int n) { return {(Words)((Signed)a.v >> n)}; }
LLMX_INLINE I both(I a, int mask) { return {a.v & static_cast<uint32_t>(mask)}; }
LLMX_INLINE I either(I a, I b) { return {a.v | b.v}; }
LLMX_INLINE F to_float(I a) { return {__builtin_convertvector((Signed)a.v, Floats)}; }
LLMX_INLINE F sub(F a, F b) { return {a.v - b.v}; }
LLMX_INLINE F div(F a, F b) { return {a.v / b.v}; }
LLMX_INLINE F most(F a, F b) { return {a.v > b.v ? a.v : b.v}; }  // b where either is no number
LLMX_INLINE F least(F a, F b) { return {a.v < b.v ? a.v : b.v}; }
LLMX_INLINE F nearest(F a) {  // of |a| < 2^22
  const Floats big = Floats{} + 0x1.8p23f;
  return {(a.v + big) - big};
}
LLMX_INLINE F size_of(F a) { return {a.v < 0.0f ? -a.v : a.v}; }
LLMX_INLINE int32_t round_to_bytes(F a, int8_t* to) {  // to the nearest, ties to even; the sum of them
  F n = nearest(a);
  n.v = n.v >= -128.0f && n.v <= 127.0f ? n.v : Floats{};  // what is no number is no whole one either
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) {
    to[i] = static_cast<int8_t>(n.v[i]);
    sum += to[i];
  }
  return sum;
}
LLMX_INLINE F power_of_two(F n) {  // whole n
  return as_floats((Words)(__builtin_convertvector(n.v, Signed) + 127) << 23);
}
LLMX_INLINE F zero_where_below(F value, F a, F b) { return {a.v < b.v ? Floats{} : value.v}; }
LLMX_INLINE void store_bfloat(void* p, F a) {  // to the nearest, ties to even
  Words bits;
  copy(bits, &a);
  const Words up = (bits + ((bits >> 16 & 1u) + 0x7FFFu)) >> 16, nan = bits >> 16 | 0x40u;
  const auto halves = __builtin_convertvector(a.v != a.v ? nan : up, Lanes<uint16_t, 16>::Type);
  __builtin_memcpy(p, &halves, sizeof halves);
}

#endif

// e^x to about 2 units in the last place; 0 below the smallest normal number; NaN stays. Cody & Waite's reduction and
// a polynomial of degree 6 (Cephes' expf).
LLMX_INLINE F exponential(F x) {
  const F low = all(-87.33f), n0 = nearest(mul(x, all(1.44269504f)));
  const F n = least(all(127.0f), most(all(-126.0f), n0));
  F r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  F p = fma(all(1.9875691500e-4f), r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), all(1.0f));
  return zero_where_below(mul(p, power_of_two(n)), x, low);
}

LLMX_INLINE F tanh_of(F x) {  // 1 - 2 / (e^2x + 1)
  const F bounded = least(all(20.0f), most(all(-20.0f), x));
  return sub(all(1.0f), div(all(2.0f), add(exponential(add(bounded, bounded)), all(1.0f))));
}

// Lanes i and i + 8, then i and i + 4, … : the same order everywhere.
#if defined(__AVX2__)

LLMX_INLINE __m256 lower(F x) {
#if defined(__AVX512F__)
  return _mm512_castps512_ps256(x.v);
#else
  return x.a;
#endif
}
LLMX_INLINE __m256 upper(F x) {
#if defined(__AVX512F__)
  return _mm512_extractf32x8_ps(x.v, 1);
#else
  return x.b;
#endif
}
LLMX_INLINE float sum_of(F x) {
  const __m256 eight = _mm256_add_ps(lower(x), upper(x));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
LLMX_INLINE float most_of(F x) {  // the second where either is no number
  const __m256 eight = _mm256_max_ps(lower(x), upper(x));
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

#else

LLMX_INLINE float sum_of(F x) {
  float lanes[16];
  store(lanes, x);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}
LLMX_INLINE float most_of(F x) {
  float lanes[16];
  store(lanes, x);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
}

#endif

}  // namespace
}  // namespace LLMX_ISA
