// Holds each intrinsic of avx512_emulated.h against its definition in plain arithmetic, lane by lane; says which
// differ, else "ok". Values at edges in all pairs, then random bits. A NaN that arithmetic made equals any other.
#define LLMX_ISA avx512
#include "avx512_emulated.h"

#include <initializer_list>
#include <math.h>
#include <stdio.h>
#include <string.h>

namespace avx512 {
namespace {

constexpr int LANES = 16, ROUNDS = 20000;

template <class T> struct Row { T at[LANES]; };
template <class To, class From> To as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

uint64_t state = 1;
uint32_t random_bits() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state >> 32);
}

constexpr uint32_t EDGES[] = {
    0,          1,          0x80000000, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F000000, 0xBF000000, 0x3F800000,
    0xBF800000, 0x3FC00000, 0x40200000, 0xC0200000, 0x3EFFFFFF, 0x3F000001, 0x4AFFFFFF, 0x4B000001, 0x4B7FFFFF,
    0x42FE0000, 0xC3000000, 0x42FF0000, 0x4F000000, 0xCF000000, 0x4EFFFFFF, 0x4F7FFFFF, 0x7F7FFFFF, 0xFF7FFFFF,
    0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x7F,       0x80,       0xFFFFFF80, 0xFFFFFF7F,
    0x7FFFFFFF, 0xFFFFFFFF, 0x7F7F7F7F, 0x80808080, 0x00FF00FF, 0xFF7FFF7F, 0x12345678,
};
constexpr uint32_t EDGE_COUNT = sizeof EDGES / sizeof *EDGES;

// Edges in all pairs, then anything: bits, and numbers of like sizes.
Row<uint32_t> numbers(int round, uint32_t divisor) {
  Row<uint32_t> row;
  for (int i = 0; i < LANES; ++i) {
    const uint32_t at = static_cast<uint32_t>(round) * LANES + static_cast<uint32_t>(i);
    row.at[i] = at < EDGE_COUNT * EDGE_COUNT ? EDGES[at / divisor % EDGE_COUNT] : random_bits();
    if (at >= EDGE_COUNT * EDGE_COUNT && round % 2) row.at[i] = (row.at[i] & 0x80FFFFFF) + 0x3E000000;
  }
  return row;
}

int wrong = 0;
void differs(const char* name, int lane, uint32_t got, uint32_t want) {
  if (++wrong <= 20) fprintf(stderr, "%s, lane %d: %08x, not %08x\n", name, lane, got, want);
}

template <class T, class Want> void check(const char* name, const Row<T>& got, bool any_nan, const Want& want) {
  for (int i = 0; i < LANES; ++i) {
    const T wanted = want(i);
    if (any_nan && got.at[i] != got.at[i] && wanted != wanted) continue;
    if (memcmp(&got.at[i], &wanted, sizeof(T)) == 0) continue;
    uint32_t a = 0, b = 0;
    memcpy(&a, &got.at[i], sizeof(T)), memcpy(&b, &wanted, sizeof(T));
    differs(name, i, a, b);
  }
}
#define EXACT(type, call, want) \
  check(#call, as<Row<type>>(call), false, [&]([[maybe_unused]] int i) -> type { return want; })
#define ROUNDED(call, want) check(#call, as<Row<float>>(call), true, [&](int i) -> float { return want; })

double to_even(double x) {
  if (!(fabs(x) < 0x1p52)) return x;
  const double below = floor(x), over = x - below;
  const bool up = over > 0.5 || (over == 0.5 && fmod(below, 2.0) != 0.0);
  return copysign(up ? below + 1.0 : below, x);
}
int32_t whole(float x) {
  const double n = to_even(x);
  return n >= -0x1p31 && n < 0x1p31 ? static_cast<int32_t>(n) : INT32_MIN;
}
float half(uint16_t h) {
  const int power = h >> 10 & 31, fraction = h & 1023;
  const double size = power == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, power - 25);
  const float x = power < 31 ? static_cast<float>(size) : fraction ? __builtin_nanf("") : __builtin_inff();
  return h >> 15 ? -x : x;
}
int32_t quad(int32_t sum, uint32_t u, uint32_t s) {
  int64_t total = sum;
  for (int byte = 0; byte < 32; byte += 8)
    total += static_cast<int64_t>(u >> byte & 255) * static_cast<int8_t>(s >> byte & 255);
  return static_cast<int32_t>(static_cast<uint32_t>(total));
}

void floats(const Row<uint32_t>& a, const Row<uint32_t>& b, const Row<uint32_t>& c) {
  const auto x = as<Row<float>>(a), y = as<Row<float>>(b), z = as<Row<float>>(c);
  const __m512 X = _mm512_loadu_ps(&x), Y = _mm512_loadu_ps(&y), Z = _mm512_loadu_ps(&z);
  ROUNDED(_mm512_add_ps(X, Y), x.at[i] + y.at[i]);
  ROUNDED(_mm512_sub_ps(X, Y), x.at[i] - y.at[i]);
  ROUNDED(_mm512_mul_ps(X, Y), x.at[i] * y.at[i]);
  ROUNDED(_mm512_div_ps(X, Y), x.at[i] / y.at[i]);
  ROUNDED(_mm512_fmadd_ps(X, Y, Z), fmaf(x.at[i], y.at[i], z.at[i]));
  EXACT(uint32_t, _mm512_max_ps(X, Y), x.at[i] > y.at[i] ? a.at[i] : b.at[i]);
  EXACT(uint32_t, _mm512_min_ps(X, Y), x.at[i] < y.at[i] ? a.at[i] : b.at[i]);
  EXACT(uint32_t, _mm512_abs_ps(X), a.at[i] & 0x7FFFFFFF);
  ROUNDED(_mm512_roundscale_ps(X, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), static_cast<float>(to_even(x.at[i])));
  EXACT(int32_t, _mm512_cvtps_epi32(X), whole(x.at[i]));
  EXACT(uint32_t, _mm512_castps_si512(X), a.at[i]);
  EXACT(float, _mm512_set1_ps(x.at[3]), x.at[3]);
  EXACT(float, _mm512_setzero_ps(), 0.0f);
  float stored[LANES + 2] = {7.0f};
  stored[LANES + 1] = 8.0f;
  _mm512_storeu_ps(stored + 1, X);
  if (memcmp(stored + 1, &x, sizeof x) || stored[0] != 7.0f || stored[LANES + 1] != 8.0f) differs("storeu_ps", 0, 0, 0);
  const auto low = as<Row<uint16_t>>(_mm512_castps512_ps256(X)), high = as<Row<uint16_t>>(_mm512_extractf32x8_ps(X, 1));
  const auto first = as<Row<uint16_t>>(_mm512_extractf32x8_ps(X, 0));
  if (memcmp(&low, &x, 32) || memcmp(&first, &x, 32)) differs("the lower half", 0, 0, 0);
  if (memcmp(&high, x.at + 8, 32)) differs("the upper half", 8, 0, 0);
  const __mmask16 less = _mm512_cmp_ps_mask(X, Y, _CMP_LT_OQ), over = _mm512_cmp_ps_mask(X, Y, _CMP_NLE_UQ);
  const __mmask16 none = _mm512_cmp_ps_mask(X, Y, _CMP_UNORD_Q), any = static_cast<__mmask16>(c.at[5]);
  for (int i = 0; i < LANES; ++i) {
    const bool nan = x.at[i] != x.at[i] || y.at[i] != y.at[i];
    if ((less >> i & 1) != (!nan && x.at[i] < y.at[i])) differs("cmp_ps_mask LT_OQ", i, less, 0);
    if ((over >> i & 1) != (nan || x.at[i] > y.at[i])) differs("cmp_ps_mask NLE_UQ", i, over, 0);
    if ((none >> i & 1) != nan) differs("cmp_ps_mask UNORD_Q", i, none, 0);
  }
  EXACT(uint32_t, _mm512_mask_mov_ps(X, any, Y), (any >> i & 1 ? b : a).at[i]);
  const __m512i A = _mm512_castps_si512(X), B = _mm512_castps_si512(Y);
  EXACT(uint32_t, _mm512_mask_mov_epi32(A, any, B), (any >> i & 1 ? b : a).at[i]);
  EXACT(uint32_t, _mm512_maskz_add_epi32(any, A, B),
        any >> i & 1 ? as<Row<uint32_t>>(a).at[i] + as<Row<uint32_t>>(b).at[i] : 0u);
}

void whole_numbers(const Row<uint32_t>& a, const Row<uint32_t>& b, const Row<uint32_t>& c) {
  const __m512i A = _mm512_loadu_si512(&a), B = _mm512_loadu_si512(&b), C = _mm512_loadu_si512(&c);
  const auto s = as<Row<int32_t>>(a);
  EXACT(uint32_t, _mm512_add_epi32(A, B), a.at[i] + b.at[i]);
  EXACT(uint32_t, _mm512_mullo_epi32(A, B), static_cast<uint32_t>(uint64_t{a.at[i]} * b.at[i]));
  EXACT(uint32_t, _mm512_mul_epu32(A, B),
        static_cast<uint32_t>(uint64_t{a.at[i & ~1]} * b.at[i & ~1] >> (i % 2 ? 32 : 0)));
  EXACT(uint32_t, _mm512_and_si512(A, B), a.at[i] & b.at[i]);
  EXACT(uint32_t, _mm512_or_si512(A, B), a.at[i] | b.at[i]);
  EXACT(uint32_t, _mm512_xor_si512(A, B), a.at[i] ^ b.at[i]);
  for (const unsigned n : {0u, 1u, 16u, 23u, 31u, 32u, 100u}) {
    EXACT(uint32_t, _mm512_slli_epi32(A, n), n < 32 ? a.at[i] << n : 0);
    EXACT(uint32_t, _mm512_srli_epi32(A, n), n < 32 ? a.at[i] >> n : 0);
    EXACT(int32_t, _mm512_srai_epi32(A, n), static_cast<int32_t>(static_cast<int64_t>(s.at[i]) >> (n < 32 ? n : 32)));
    const auto wide = [&](int i) { return uint64_t{a.at[i | 1]} << 32 | a.at[i & ~1]; };
    EXACT(uint32_t, _mm512_srli_epi64(A, n), n < 64 ? static_cast<uint32_t>(wide(i) >> n >> (i % 2 ? 32 : 0)) : 0);
  }
  EXACT(float, _mm512_cvtepi32_ps(A), static_cast<float>(s.at[i]));
  EXACT(uint32_t, _mm512_castsi512_ps(A), a.at[i]);
  EXACT(int32_t, _mm512_dpbusd_epi32(A, B, C), quad(s.at[i], b.at[i], c.at[i]));
  EXACT(int32_t, _mm512_set1_epi32(s.at[2]), s.at[2]);
  EXACT(uint32_t, _mm512_set1_epi8(static_cast<char>(a.at[2])), (a.at[2] & 255) * 0x01010101u);
  uint32_t stored[LANES + 2] = {7}, sum = 0;
  stored[LANES + 1] = 8;
  _mm512_storeu_si512(stored + 1, A);
  if (memcmp(stored + 1, &a, sizeof a) || stored[0] != 7 || stored[LANES + 1] != 8) differs("storeu_si512", 0, 0, 0);
  for (const uint32_t x : a.at) sum += x;
  const uint32_t reduced = static_cast<uint32_t>(_mm512_reduce_add_epi32(A));
  if (reduced != sum) differs("reduce_add_epi32", 0, reduced, sum);
  const auto bytes = as<Row<uint8_t>>(_mm_loadu_si128(reinterpret_cast<const __m128i*>(&a)));
  const auto words = as<Row<uint16_t>>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(&a)));
  EXACT(int32_t, _mm512_cvtepu8_epi32(as<__m128i>(bytes)), bytes.at[i]);
  EXACT(int32_t, _mm512_cvtepi8_epi32(as<__m128i>(bytes)), static_cast<int8_t>(bytes.at[i]));
  EXACT(int32_t, _mm512_cvtepu16_epi32(as<__m256i>(words)), words.at[i]);
  ROUNDED(_mm512_cvtph_ps(as<__m256i>(words)), half(words.at[i]));
  EXACT(uint16_t, _mm512_cvtepi32_epi16(A), static_cast<uint16_t>(a.at[i] & 0xFFFF));
  EXACT(int8_t, _mm512_cvtsepi32_epi8(A), static_cast<int8_t>(fmax(-128.0, fmin(127.0, s.at[i]))));
}

}  // namespace
}  // namespace avx512

int main() {
  using namespace avx512;
  for (int round = 0; round < ROUNDS; ++round) {
    const auto a = numbers(round, 1), b = numbers(round, EDGE_COUNT), c = numbers(round, EDGE_COUNT / 3);
    floats(a, b, c);
    whole_numbers(a, b, c);
  }
  if (wrong) return 1;
  puts("ok");
  return 0;
}
