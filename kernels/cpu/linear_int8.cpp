// A linear layer from packed weights in whole numbers, with the rows rounded to 8 bits: products of bytes.
//
// A row is rounded in groups of 32 inputs: scale = max |x| / 127, q = round(x * (127 / max |x|)), ties to even. An
// output is one chain over the groups: acc = fma(sum of code * q, weight's scale * scale, acc), and where the weights
// have a minimum acc = fma(minimum, scale * sum of q, acc) after it. The sums are exact, so that a row's bits depend on
// neither rows, tiles nor threads. A group with an infinity or a NaN gives NaN, one of numbers below 1e-36 zero.
//
// Where a single q of a group would be above LIMIT, which leaves few bits to all others, its number is apart: the group is
// rounded with zero in its place, and it is multiplied as it is, after the chain: acc = fma(weight, number, acc), in the
// order of inputs. Keeping what exceeds the rest in full precision is LLM.int8()'s way (arXiv:2208.07339).
//
// With `powers` a scale is the next power of two, from 2^-100 to 2^100: smaller numbers give zero, larger ones NaN. That
// loses up to a bit of each number; in return AVX-512 has one product less in each group of an output, of 10 or 11.
#include "dots.h"
#include "ops.h"
#include "packed.h"
#include "runtime/pool.h"

namespace LLMX_ISA {
namespace {

#define LLMX_UNROLL _Pragma("GCC unroll 16")
constexpr int64_t SOME = 4 * 1024;  // numbers that are worth a task of their own
constexpr float TINIEST = 1e-36f;   // 127 by less is infinite
constexpr float LEAST = 0x1p-93f, MOST = 0x1p106f;  // of what powers of two scale: a weight times one is a normal number

constexpr int MOST_PARTS = 8;  // of a tile's inputs, rounded side by side
// Rows from which on weights are unpacked beforehand, and those of a tile then, or one less.
constexpr int64_t MANY = 28, SMALL_TILE = 6;
static_assert(MANY >= SMALL_TILE * (SMALL_TILE - 2), "shared among tiles none has less");
template <bool POWERS>
constexpr int LIMIT = POWERS ? 15 : 21;

// A number that is apart: input and row of the tile.
struct Apart {
  int32_t place;
  float number;
};
constexpr int ROW_BITS = 4;
static_assert(INT8_ROWS <= 1 << ROW_BITS, "a row's number has so many bits");

// What a tile of `rows` rows keeps of each group, rows side by side: 8 dwords of q, then the scale, scale * sum of q,
// and minus 8 times that sum, of all 32 and of the first 16.
constexpr int64_t ROW_BYTES = 8 * 4 + 4 * 4;

// What is kept of rounded rows: groups, tile after tile; then numbers that are apart, for which each part of a tile's
// inputs has room; how many those are of each part; and of each row with powers whether one of its numbers is none, which
// scales don't say then.
struct Rounded {
  struct Shares {  // of a whole in so many, in turn
    int64_t each, more;  // the first `more` have one more
    LLMX_INLINE int64_t first(int64_t share) const { return share * each + (share < more ? share : more); }
  };
  int64_t rows, inputs, tiles, parts;
  Shares rows_of, groups_of;  // a tile's and a part's
  uint8_t* groups;
  Apart* apart;
  int32_t* counts;
  uint8_t* bad;

  LLMX_INLINE Rounded(uint8_t* at, int64_t rows_, int64_t inputs_, int threads)
      : rows(rows_), inputs(inputs_), parts(1), groups(at) {
#if defined(LLMX_UNPACKED)
    const int64_t most = rows < MANY ? INT8_ROWS : SMALL_TILE;
#else
    const int64_t most = INT8_ROWS;
#endif
    tiles = (rows + most - 1) / most;
    if (tiles < 4 * threads && rows * inputs >= SOME * tiles)  // too few tiles to share them evenly
      parts = threads < MOST_PARTS ? threads : MOST_PARTS;
    rows_of = {rows / tiles, rows % tiles}, groups_of = {inputs / GROUP / parts, inputs / GROUP % parts};
    const int64_t all = rows * (inputs / GROUP);
    apart = reinterpret_cast<Apart*>(groups + all * ROW_BYTES);
    counts = reinterpret_cast<int32_t*>(apart + all);
    bad = reinterpret_cast<uint8_t*>(counts + rows * MOST_PARTS);
  }
  LLMX_INLINE Apart* room(int64_t tile, int64_t part) const {
    const int64_t row = rows_of.first(tile), count = rows_of.first(tile + 1) - row;
    return apart + row * (inputs / GROUP) + count * groups_of.first(part);
  }
};

struct Rounding {
  const float* x;
  const Rounded& to;
};

struct Sums {
  float scale, weighted;
  int32_t less, first_less;
};

LLMX_INLINE float power_above(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  bits = (bits + 0x7FFFFFu) & 0xFF800000u;
  __builtin_memcpy(&x, &bits, sizeof bits);
  return x;
}

// 32 numbers -> q, and what belongs to it.
template <bool POWERS>
LLMX_INLINE Sums round_group(const float* x, int8_t* q) {
  const F a = load(x), b = load(x + LANES);
  const float highest = most_of(most(size_of(a), size_of(b)));
  const float bad = sum_of(add(mul(a, zero()), mul(b, zero())));  // zero, or NaN
  float scale = highest / 127.0f, up = highest > TINIEST ? 127.0f / highest : 0.0f;
  if constexpr (POWERS) {
    if (bad != bad || highest > MOST) {
      __builtin_memset(q, 0, GROUP);
      return {1.0f, __builtin_nanf(""), 0, 0};
    }
    const bool some = highest > LEAST;
    scale = some ? power_above(scale) : 1.0f, up = some ? 1.0f / scale : 0.0f;
  }
  const int32_t first = round_to_bytes(mul(a, all(up)), q), second = round_to_bytes(mul(b, all(up)), q + LANES);
  if (bad != bad) return {bad, bad, 0, 0};  // what was no number has become INT32_MIN: sums of it overflow
  return {scale, scale * static_cast<float>(first + second), -8 * (first + second), -8 * first};
}

#if defined(__AVX2__)

// Four groups of 32 at a time, to the same bits: their reductions share instructions.
struct Four {
  __m256i q[4];
  __m128 scale, weighted;
  __m128i less, first_less;
};

template <bool POWERS>
LLMX_INLINE Four round_four(const float* const (&x)[4]) {
  const __m256i sign = _mm256_set1_epi32(INT32_MIN), one = _mm256_set1_epi8(1), ones = _mm256_set1_epi16(1);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m128 most = _mm_set1_ps(127.0f);
  __m256i m[4];
LLMX_UNROLL
  for (int g = 0; g < 4; ++g) {  // sizes of numbers are in the order of their bits, infinities and NaNs last
    __m256i size[4];
    LLMX_UNROLL for (int i = 0; i < 4; ++i)
      size[i] = _mm256_andnot_si256(sign, _mm256_castps_si256(_mm256_loadu_ps(x[g] + 8 * i)));
    m[g] = _mm256_max_epi32(_mm256_max_epi32(size[0], size[1]), _mm256_max_epi32(size[2], size[3]));
  }
  const __m256i ab = _mm256_max_epi32(_mm256_unpacklo_epi32(m[0], m[1]), _mm256_unpackhi_epi32(m[0], m[1]));
  const __m256i cd = _mm256_max_epi32(_mm256_unpacklo_epi32(m[2], m[3]), _mm256_unpackhi_epi32(m[2], m[3]));
  const __m256i abcd = _mm256_max_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
  const __m128i bits = _mm_max_epi32(_mm256_castsi256_si128(abcd), _mm256_extracti128_si256(abcd, 1));
  const __m128 highest = _mm_castsi128_ps(bits);
  const __m128i largest = _mm_castps_si128(_mm_set1_ps(POWERS ? MOST : 0x1.fffffep127f));
  const __m128 bad = _mm_castsi128_ps(_mm_cmpgt_epi32(bits, largest));
  __m128 scale = _mm_div_ps(highest, most), up;
  if constexpr (POWERS) {
    const __m128 some = _mm_andnot_ps(bad, _mm_cmpgt_ps(highest, _mm_set1_ps(LEAST))), one_of_it = _mm_set1_ps(1.0f);
    const __m128i above = _mm_and_si128(_mm_add_epi32(_mm_castps_si128(scale), _mm_set1_epi32(0x7FFFFF)),
                                        _mm_set1_epi32(-0x800000));
    scale = _mm_blendv_ps(one_of_it, _mm_castsi128_ps(above), some);
    up = _mm_and_ps(some, _mm_div_ps(one_of_it, scale));
  } else {
    up = _mm_and_ps(_mm_cmpgt_ps(highest, _mm_set1_ps(TINIEST)), _mm_div_ps(most, highest));
  }
  float ups[4];
  _mm_storeu_ps(ups, up);
  Four f;
  __m256i sums[4];
LLMX_UNROLL
  for (int g = 0; g < 4; ++g) {
    const __m256 by = _mm256_set1_ps(ups[g]);
    __m256i n[4];
    LLMX_UNROLL for (int i = 0; i < 4; ++i) n[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x[g] + 8 * i), by));
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
    f.q[g] = _mm256_permutevar8x32_epi32(packed, order);
    sums[g] = _mm256_madd_epi16(_mm256_maddubs_epi16(one, f.q[g]), ones);
  }
  const __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(sums[0], sums[1]), _mm256_hadd_epi32(sums[2], sums[3]));
  const __m128i first = _mm256_castsi256_si128(all), sum = _mm_add_epi32(first, _mm256_extracti128_si256(all, 1));
  f.scale = POWERS ? scale : _mm_or_ps(scale, bad);  // all bits set: NaN
  f.weighted = _mm_or_ps(_mm_mul_ps(scale, _mm_cvtepi32_ps(sum)), bad);
  const __m128i none = _mm_castps_si128(bad);
  f.less = _mm_andnot_si128(none, _mm_slli_epi32(_mm_sub_epi32(_mm_setzero_si128(), sum), 3));
  f.first_less = _mm_andnot_si128(none, _mm_slli_epi32(_mm_sub_epi32(_mm_setzero_si128(), first), 3));
  return f;
}

LLMX_INLINE void put(uint8_t* to, __m128i four) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), four); }

// Of four rows, the first of them number `row` of a tile of `count`.
LLMX_INLINE void put_rows(const Four& f, uint8_t* to, int64_t count, int64_t row) {
  const __m256i a = _mm256_unpacklo_epi32(f.q[0], f.q[1]), b = _mm256_unpackhi_epi32(f.q[0], f.q[1]);
  const __m256i c = _mm256_unpacklo_epi32(f.q[2], f.q[3]), d = _mm256_unpackhi_epi32(f.q[2], f.q[3]);
  const __m256i dwords[4] = {_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c), _mm256_unpacklo_epi64(b, d),
                             _mm256_unpackhi_epi64(b, d)};
  LLMX_UNROLL for (int i = 0; i < 4; ++i) {
    put(to + 4 * (i * count + row), _mm256_castsi256_si128(dwords[i]));
    put(to + 4 * ((i + 4) * count + row), _mm256_extracti128_si256(dwords[i], 1));
  }
  put(to + 4 * (8 * count + row), _mm_castps_si128(f.scale));
  put(to + 4 * (9 * count + row), _mm_castps_si128(f.weighted));
  put(to + 4 * (10 * count + row), f.less);
  put(to + 4 * (11 * count + row), f.first_less);
}

// Of four groups of one row.
LLMX_INLINE void put_groups(const Four& f, uint8_t* to, int64_t count, int64_t row) {
  alignas(32) int32_t q[4][8], rest[4][4];  // dwords; then what belongs to them
  LLMX_UNROLL for (int g = 0; g < 4; ++g) _mm256_store_si256(reinterpret_cast<__m256i*>(q[g]), f.q[g]);
  _mm_store_ps(reinterpret_cast<float*>(rest[0]), f.scale), _mm_store_ps(reinterpret_cast<float*>(rest[1]), f.weighted);
  _mm_store_si128(reinterpret_cast<__m128i*>(rest[2]), f.less);
  _mm_store_si128(reinterpret_cast<__m128i*>(rest[3]), f.first_less);
  LLMX_UNROLL for (int g = 0; g < 4; ++g, to += count * ROW_BYTES) {
    LLMX_UNROLL for (int i = 0; i < 8; ++i) __builtin_memcpy(to + 4 * (i * count + row), &q[g][i], 4);
    LLMX_UNROLL for (int i = 0; i < 4; ++i) __builtin_memcpy(to + 4 * ((8 + i) * count + row), &rest[i][g], 4);
  }
}

#endif

// The only of 32 that is above the limit; -1 if there are none or several.
LLMX_INLINE int only_above(const int8_t* q, int limit) {
  int found = -1, count = 0;
  for (int i = 0; i < GROUP; ++i)
    if (q[i] > limit || (q[i] < -limit && q[i] != -128)) found = i, ++count;
  return count == 1 ? found : -1;
}

// Group g of a row; `i` is apart, if it isn't negative, and goes to `apart`.
template <bool POWERS>
LLMX_INLINE Sums round_one(const float* x, int64_t g, int i, uint8_t* to, int64_t count, int64_t row, Apart*& apart) {
  int8_t q[GROUP];
  float rest[GROUP];
  if (i >= 0) {
    __builtin_memcpy(rest, x, sizeof rest);
    rest[i] = 0.0f;
    *apart++ = {static_cast<int32_t>((g * GROUP + i) << ROW_BITS | row), x[i]};
    x = rest;
  }
  const Sums sums = round_group<POWERS>(x, q);
  for (int i = 0; i < 8; ++i) __builtin_memcpy(to + 4 * (i * count + row), q + 4 * i, 4);
  __builtin_memcpy(to + 4 * (8 * count + row), &sums.scale, 4);
  __builtin_memcpy(to + 4 * (9 * count + row), &sums.weighted, 4);
  __builtin_memcpy(to + 4 * (10 * count + row), &sums.less, 4);
  __builtin_memcpy(to + 4 * (11 * count + row), &sums.first_less, 4);
  return sums;
}

LLMX_INLINE bool none(float x) { return x != x; }
#if defined(__AVX2__)
LLMX_INLINE int none(const Four& f) { return _mm_movemask_ps(_mm_cmpunord_ps(f.weighted, f.weighted)); }
LLMX_INLINE int only_above(__m256i q, int limit) {  // what is no number has become -128
  const __m256i above = _mm256_cmpgt_epi8(_mm256_abs_epi8(q), _mm256_set1_epi8(static_cast<char>(limit)));
  const uint32_t which = static_cast<uint32_t>(_mm256_movemask_epi8(above));
  return which != 0 && (which & (which - 1)) == 0 ? __builtin_ctz(which) : -1;
}
#endif
LLMX_INLINE void say(uint8_t* bad) { __atomic_store_n(bad, uint8_t{1}, __ATOMIC_RELAXED); }  // parts say it of the same row

template <bool POWERS>
void round_part(void* context, int64_t task, int) {
  const Rounding& job = *static_cast<const Rounding*>(context);
  const Rounded& r = job.to;
  const int64_t tile = task / r.parts, part = task % r.parts, n = r.inputs;
  const int64_t first = r.rows_of.first(tile), count = r.rows_of.first(tile + 1) - first;
  const int64_t from = r.groups_of.first(part), end = r.groups_of.first(part + 1);
  uint8_t* to = r.groups + first * (n / GROUP) * ROW_BYTES;
  Apart *const room = r.room(tile, part), *apart = room;
  const float* x = job.x + first * n;
  const auto one = [&](int64_t row, int64_t g, int i) {
    const Sums sums = round_one<POWERS>(x + row * n + g * GROUP, g, i, to + g * count * ROW_BYTES, count, row, apart);
    if (POWERS && none(sums.weighted)) say(r.bad + first + row);
  };
  int64_t row = 0;
#if defined(__AVX2__)
  for (; row + 4 <= count; row += 4)
    for (int64_t g = from; g < end; ++g) {
      const float* at = x + row * n + g * GROUP;
      const Four four = round_four<POWERS>({at, at + n, at + 2 * n, at + 3 * n});
      put_rows(four, to + g * count * ROW_BYTES, count, row);
      for (int i = 0; i < 4; ++i)
        if (const int k = only_above(four.q[i], LIMIT<POWERS>); k >= 0) one(row + i, g, k);
      if constexpr (POWERS)
        for (int which = none(four), i = 0; which >> i; ++i)
          if (which >> i & 1) say(r.bad + first + row + i);
    }
#endif
  for (; row < count; ++row) {
    int64_t g = from;
#if defined(__AVX2__)
    for (; g + 4 <= end; g += 4) {
      const float* at = x + row * n + g * GROUP;
      const Four four = round_four<POWERS>({at, at + GROUP, at + 2 * GROUP, at + 3 * GROUP});
      put_groups(four, to + g * count * ROW_BYTES, count, row);
      for (int i = 0; i < 4; ++i)
        if (const int k = only_above(four.q[i], LIMIT<POWERS>); k >= 0) one(row, g + i, k);
      if (POWERS && none(four)) say(r.bad + first + row);
    }
#endif
    for (; g < end; ++g) {
      int8_t q[GROUP];
      round_group<POWERS>(x + row * n + g * GROUP, q);
      one(row, g, only_above(q, LIMIT<POWERS>));
    }
  }
  r.counts[task] = static_cast<int32_t>(apart - room);
}

struct Job {
  const uint8_t* packed;
  int64_t block_bytes, inputs, outputs;
  const Rounded& x;
  float* out;        // (rows, stride)
  int64_t stride;
  const float* bias;
  int64_t wide;  // blocks in a task
};

template <int BITS> struct KindOf { using Type = Wider; };
template <> struct KindOf<4> { using Type = Nibble; };
template <> struct KindOf<8> { using Type = Byte; };
template <> struct KindOf<0> { using Type = Nibble; };  // unpacked: where a product takes any byte without a sign

// Four inputs' codes, 4j …, as they are stored.
template <class Source>
LLMX_INLINE Codes code(const uint8_t* codes, int j) {
  if constexpr (Source::BITS == 8 || Source::BITS == 0) {
    return load_codes(codes + 4 * LANES * j);
  } else {
    const int i = j % 4;
    Codes found = masked(shifted(load_codes(codes + 4 * LANES * i), j < 4 ? 0 : -4), 15);
    if constexpr (Source::BITS == 5)
      found = either(found, masked(shifted(load_codes(codes + 4 * LANES * 4), 4 - j), 16));
    if constexpr (Source::BITS == 6)
      found = either(found, masked(shifted(load_codes(codes + 4 * LANES * (4 + j / 4)), 4 - 2 * i), 48));
    return found;
  }
}

// Adds the products of four inputs, and of four others.
template <class Source, int R, int B, class K>
LLMX_INLINE void products(const uint8_t* const (&codes)[B], const int32_t* q, int j, int k, Dots<K> (&sums)[B][R]) {
  if constexpr (Source::BITS == 5 || Source::BITS == 6) {
    Codes first[B], second[B];
    LLMX_UNROLL for (int b = 0; b < B; ++b) first[b] = code<Source>(codes[b], j), second[b] = code<Source>(codes[b], k);
    LLMX_UNROLL for (int r = 0; r < R; ++r) {
      LLMX_UNROLL for (int b = 0; b < B; ++b) dot(sums[b][r], first[b], q[j * R + r], second[b], q[k * R + r]);
    }
  } else {
    const auto add_all = [&](int j) __attribute__((always_inline)) {
      Codes four[B];
      LLMX_UNROLL for (int b = 0; b < B; ++b) four[b] = code<Source>(codes[b], j);
      LLMX_UNROLL for (int r = 0; r < R; ++r) {
        LLMX_UNROLL for (int b = 0; b < B; ++b) dot(sums[b][r], four[b], q[j * R + r]);
      }
    };
    add_all(j), add_all(k);
  }
}

// What a tile of R rows and B blocks gains from the inputs that share a scale: `turn` of a group's.
template <class Source, int R, int B, class Scales>
LLMX_INLINE void gain(Source (&sources)[B], int64_t group, int turn, const int32_t* x, Held (&sums)[B][R][PARTS]) {
  using K = typename KindOf<Source::BITS>::Type;
  constexpr int UP = Source::UP;
  const float *scale = reinterpret_cast<const float*>(x + 8 * R), *weighted = scale + R;
  const int32_t *less = x + 10 * R, *first_less = less + R;
LLMX_UNROLL
  for (int part = 0; part < PARTS; ++part) {
    if (part) __asm__("" : "+r"(x));  // or GCC keeps what all parts read in registers, and runs out of them
    const uint8_t* codes[B];
    Dots<K> dots[B][R];
    int32_t mine[R];  // minus 8 times the sum of a row's numbers
    LLMX_UNROLL for (int r = 0; r < R; ++r) {
      mine[r] = !Source::FINE ? less[r] : turn == 0 ? first_less[r] : less[r] - first_less[r];
      LLMX_UNROLL for (int b = 0; b < B; ++b) dots[b][r] = no_dots<K>(Source::SIGNED ? mine[r] * UP : 0);
    }
    LLMX_UNROLL for (int b = 0; b < B; ++b) codes[b] = sources[b].codes(group) + 4 * WIDE * part;
    if constexpr (Source::FINE) {
      products<Source, R, B, K>(codes, x, 4 * turn, 4 * turn + 1, dots);
      products<Source, R, B, K>(codes, x, 4 * turn + 2, 4 * turn + 3, dots);
    } else {
      LLMX_UNROLL
      for (int i = 0; i < 4; ++i) products<Source, R, B, K>(codes, x, i, 4 + i, dots);
    }
    LLMX_UNROLL for (int b = 0; b < B; ++b) {
      if (B > 1) sources[b].begin(group, turn);  // late, for the sake of registers
      const Scales weights(part_of(sources[b].scale, part));
      const auto add_minimum = [&](int r) __attribute__((always_inline)) {
        const float numbers = Source::FINE ? scale[r] * (-0.125f * static_cast<float>(mine[r])) : weighted[r];
        hold(sums[b][r][part], fma(part_of(sources[b].minimum, part), every(numbers), given(sums[b][r][part])));
      };
      LLMX_UNROLL for (int r = 0; r < R; ++r) {
        const V dotted = total(dots[b][r], Source::SIGNED ? mine[r] * UP : 0);
        hold(sums[b][r][part], fma(dotted, weights.times(scale[r]), given(sums[b][r][part])));
        if constexpr (Source::MIN && !SEPARATE) add_minimum(r);
      }
      if (!weights.finite()) {
        LLMX_UNROLL for (int r = 0; r < R; ++r)
          hold(sums[b][r][part], fma(weights.plain, every(0.0f), given(sums[b][r][part])));
      }
      if constexpr (Source::MIN && SEPARATE) {
        LLMX_UNROLL for (int r = 0; r < R; ++r) add_minimum(r);
      }
    }
  }
}

struct Tile {
  int64_t row, rows;
  const Apart *apart[MOST_PARTS], *end[MOST_PARTS];  // of each part
  bool any = false;  // number is apart

  LLMX_INLINE Tile(const Rounded& x, int64_t number) : row(x.rows_of.first(number)) {
    rows = x.rows_of.first(number + 1) - row;
    for (int64_t part = 0; part < x.parts; ++part) {
      const int32_t count = x.counts[number * x.parts + part];
      apart[part] = x.room(number, part), end[part] = apart[part] + count;
      any |= count != 0;
    }
  }
};

// What numbers that are apart add to a tile's outputs.
template <class Source, int R>
void add_apart(Source source, const Tile& tile, int64_t parts, F (&sums)[R]) {
  for (int64_t p = 0; p < parts; ++p)
    for (const Apart* apart = tile.apart[p]; apart < tile.end[p]; ++apart) {
      const uint32_t place = static_cast<uint32_t>(apart->place), row = place % (1 << ROW_BITS), k = place >> ROW_BITS;
      const int64_t group = k / GROUP;
      const int half = static_cast<int>(k % GROUP / 16), i = static_cast<int>(k % 16 / 4), byte = static_cast<int>(k % 4);
      source.begin(group, 0);
      if constexpr (Source::FINE) source.begin(group, half);
      sums[row] = fma(source.weight(group, half, i, byte), all(apart->number), sums[row]);
    }
}

template <class Source, int R, class Scales>
void tile(const Job& job, const Tile& tile, int64_t block) {
  Source sources[1] = {Source(job.packed + block * job.block_bytes, job.inputs)}, &source = sources[0];
  const int64_t at = block * LANES;
  const uint8_t* x = job.x.groups + tile.row * (job.inputs / GROUP) * ROW_BYTES;
  Held sums[1][R][PARTS];
  LLMX_UNROLL for (int r = 0; r < R; ++r) {
    LLMX_UNROLL for (int part = 0; part < PARTS; ++part) hold(sums[0][r][part], every(0.0f));
  }
  for (int64_t group = 0; group < job.inputs / GROUP; ++group, x += R * ROW_BYTES) {
    source.template fetch<R == 1 ? 3 : 2>(group, job.block_bytes);  // of the next block, which is too short to be guessed
    source.begin(group, 0);
    gain<Source, R, 1, Scales>(sources, group, 0, reinterpret_cast<const int32_t*>(x), sums);
    if constexpr (Source::FINE) {
      source.begin(group, 1);
      gain<Source, R, 1, Scales>(sources, group, 1, reinterpret_cast<const int32_t*>(x), sums);
    }
  }
  F found[R];
  LLMX_UNROLL for (int r = 0; r < R; ++r) found[r] = joined(sums[0][r]);
  if (tile.any) add_apart<Source, R>(source, tile, job.x.parts, found);
  LLMX_UNROLL for (int r = 0; r < R; ++r)
    put_outputs(job.out + (tile.row + r) * job.stride + at, found[r], job.bias ? job.bias + at : nullptr, job.outputs - at);
}

template <bool FIRST, class A, class B> struct Either { using Type = A; };
template <class A, class B> struct Either<false, A, B> { using Type = B; };

template <class Source, class Scales, int R>
LLMX_INLINE void choose(const Job& job, const Tile& t, int64_t block) {
  using Mine = typename Either<(R < 4), Numbers, Scales>::Type;  // of few rows a product is cheaper than what they share
  if (t.rows == R) return tile<Source, R, Mine>(job, t, block);
  if constexpr (R > 1) choose<Source, Scales, R - 1>(job, t, block);
}

#if defined(LLMX_UNPACKED)

constexpr int64_t FEW = 20;  // groups of two blocks that are unpacked at a time: they stay in the first-level cache

// Weights of two blocks, unpacked once for all rows: each number of a row is then read once for both, and codes cost no
// shifts and masks, which wait for the same pipes as products. Of each group, block after block: 8 vectors of codes from
// zero on, a byte each, then the scales and (MIN) minima in float32.
template <class Packed>
struct Unpacked {
  static constexpr int BITS = 0, UP = Packed::UP;
  static constexpr bool SIGNED = Packed::SIGNED, FINE = Packed::FINE, MIN = Packed::MIN;
  static constexpr int CODES = 8 * 4 * LANES, SCALES = 4 * LANES * (MIN ? 2 : 1), BYTES = CODES + SCALES * (FINE ? 2 : 1);
  const uint8_t* block;
  F scale, minimum;

  LLMX_INLINE const uint8_t* codes(int64_t group) const { return block + group * (2 * BYTES); }
  LLMX_INLINE void begin(int64_t group, int part) {
    if (part == 1 && !FINE) return;
    const float* at = reinterpret_cast<const float*>(codes(group) + CODES + part * SCALES);
    scale = load(at);
    if constexpr (MIN) minimum = load(at + LANES);
  }
  // Group `group` of `from`, to `to`.
  static LLMX_INLINE void unpack(Packed& from, int64_t group, uint8_t* to) {
    LLMX_UNROLL for (int j = 0; j < 8; ++j) {
      const Codes four = code<Packed>(from.codes(group), j);
      store_codes(to + 4 * LANES * j, Packed::BITS == 8 ? moved_up(four) : four);
    }
    float* at = reinterpret_cast<float*>(to + CODES);
    LLMX_UNROLL for (int part = 0; part < (FINE ? 2 : 1); ++part, at += SCALES / 4) {
      from.begin(group, part);
      store(at, from.scale);
      if constexpr (MIN) store(at + LANES, from.minimum);
    }
  }
};

// What a tile's rows gain from `count` groups of two blocks, number `from` and up; those before it are in `out`.
template <class Source, int R, class Scales>
void unpacked_tile(const Job& job, const Tile& tile, int64_t block, const uint8_t* unpacked, int64_t from,
                   int64_t count) {
  Source sources[2];
  sources[0].block = unpacked, sources[1].block = unpacked + Source::BYTES;
  float* out = job.out + tile.row * job.stride + block * LANES;
  Held sums[2][R][PARTS];
  LLMX_UNROLL for (int r = 0; r < R; ++r) {
    LLMX_UNROLL for (int b = 0; b < 2; ++b)
      hold(sums[b][r][0], from ? part_of(load(out + r * job.stride + b * LANES), 0) : every(0.0f));
  }
  const uint8_t* x = job.x.groups + (tile.row * (job.inputs / GROUP) + from * R) * ROW_BYTES;
  for (int64_t group = 0; group < count; ++group, x += R * ROW_BYTES)
    LLMX_UNROLL for (int turn = 0; turn < (Source::FINE ? 2 : 1); ++turn)
      gain<Source, R, 2, Scales>(sources, group, turn, reinterpret_cast<const int32_t*>(x), sums);
  LLMX_UNROLL for (int r = 0; r < R; ++r) {
    LLMX_UNROLL for (int b = 0; b < 2; ++b) store(out + r * job.stride + b * LANES, joined(sums[b][r]));
  }
}

// Two whole blocks for all rows.
template <class Packed, class Scales>
void unpack_and_multiply(const Job& job, int64_t block) {
  using Source = Unpacked<Packed>;
  alignas(64) uint8_t unpacked[FEW * 2 * Source::BYTES];
  const int64_t groups = job.inputs / GROUP, chunks = (groups + FEW - 1) / FEW;
  const Rounded::Shares chunk{groups / chunks, groups % chunks};
  Packed sources[2];
  LLMX_UNROLL for (int b = 0; b < 2; ++b) sources[b].block = job.packed + (block + b) * job.block_bytes;
  const uint8_t* next = job.packed + (block + 2) * job.block_bytes;  // to be unpacked then: into the cache, by shares
  const int64_t lines = 2 * job.block_bytes / 64, steps = chunks * job.x.tiles;
  for (int64_t c = 0, step = 0; c < chunks; ++c) {
    const int64_t from = chunk.first(c), count = chunk.first(c + 1) - from;
    for (int64_t group = 0; group < count; ++group)
      for (int b = 0; b < 2; ++b)
        Source::unpack(sources[b], from + group, unpacked + (2 * group + b) * Source::BYTES);
    for (int64_t t = 0; t < job.x.tiles; ++t, ++step) {
      for (int64_t line = lines * step / steps; line < lines * (step + 1) / steps; ++line)
        __builtin_prefetch(next + 64 * line, 0, 2);
      const Tile tile(job.x, t);
      const auto multiply = tile.rows == SMALL_TILE ? unpacked_tile<Source, SMALL_TILE, Scales>
                                                    : unpacked_tile<Source, SMALL_TILE - 1, Scales>;
      multiply(job, tile, block, unpacked, from, count);
    }
  }
  for (int64_t t = 0; t < job.x.tiles; ++t) {
    const Tile tile(job.x, t);
    for (int b = 0; (tile.any || job.bias) && b < 2; ++b) {
      const int64_t at = (block + b) * LANES;
      F found[SMALL_TILE];
      for (int64_t r = 0; r < tile.rows; ++r) found[r] = load(job.out + (tile.row + r) * job.stride + at);
      if (tile.any) add_apart<Packed, SMALL_TILE>(sources[b], tile, job.x.parts, found);
      for (int64_t r = 0; r < tile.rows; ++r)
        put_outputs(job.out + (tile.row + r) * job.stride + at, found[r], job.bias ? job.bias + at : nullptr, LANES);
    }
  }
}

#endif

// Several blocks for a tile of rows, whose numbers stay in the first-level cache.
template <class Source, class Scales>
void some_blocks(void* context, int64_t task, int) {
  const Job& job = *static_cast<const Job*>(context);
  const int64_t blocks = (job.outputs + LANES - 1) / LANES, end = (task + 1) * job.wide, last = end < blocks ? end : blocks;
  int64_t first = task * job.wide;
#if defined(LLMX_UNPACKED)
  for (; job.x.rows >= MANY && first + 2 <= job.outputs / LANES && first + 2 <= last; first += 2)
    unpack_and_multiply<Source, Scales>(job, first);
#endif
  for (int64_t t = 0; first < last && t < job.x.tiles; ++t) {
    const Tile tile(job.x, t);
    for (int64_t block = first; block < last; ++block) choose<Source, Scales, INT8_ROWS>(job, tile, block);
  }
}

template <class Source>
void run(Job& job, bool powers, int threads) {
  const int64_t blocks = (job.outputs + LANES - 1) / LANES, wide = blocks / (8 * threads);
  job.wide = wide < 1 ? 1 : wide > 4 ? 4 : wide;
#if defined(LLMX_UNPACKED)
  if (job.x.rows >= MANY) job.wide = job.wide < 4 ? 2 : 4;
#endif
  using Cheaper = typename Either<EXPONENTS && !Source::FINE, Exponents, Numbers>::Type;  // FINE runs out of registers
  const auto task = powers ? some_blocks<Source, Cheaper> : some_blocks<Source, Numbers>;
  llmx_pool::each(task, &job, (blocks + job.wide - 1) / job.wide, threads);
}

}  // namespace

void linear_int8(float* out, int64_t stride, const float* x, uint8_t* rounded, int64_t rows, int64_t inputs,
                 const uint8_t* packed, int64_t block_bytes, int64_t outputs, int32_t format, const float* bias,
                 int32_t powers, int32_t threads) {
  if (rows == 0) return;
  const Rounded r(rounded, rows, inputs, threads);
  if (x != nullptr) {
    Rounding rounding{x, r};
    if (powers) __builtin_memset(r.bad, 0, static_cast<uint64_t>(rows));
    llmx_pool::each(powers ? round_part<true> : round_part<false>, &rounding, r.tiles * r.parts,
                    rows * inputs < SOME ? 1 : threads);
  }
  Job job{packed, block_bytes, inputs, outputs, r, out, stride, bias, 0};
  switch (format) {
#define LLMX_RUN(number, ...)                    \
  case number:                                   \
    run<__VA_ARGS__>(job, powers != 0, threads); \
    break;
    LLMX_PACKED(LLMX_RUN)
  }
  for (int64_t row = 0; powers && row < rows; ++row)
    for (int64_t n = 0; r.bad[row] && n < outputs; ++n) out[row * stride + n] = __builtin_nanf("");
}

}  // namespace LLMX_ISA
