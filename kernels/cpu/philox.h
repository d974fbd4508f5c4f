// Philox4x32-10 (Salmon et al. 2011), several counters at a time.
#pragma once
#include <stdint.h>

#include "simd.h"

namespace LLMX_ISA {
namespace {

constexpr int WIDTH = 16;  // counters at a time

struct Block {
  uint32_t word[4][WIDTH];
};

#if defined(__AVX2__)  // the compiler finds worse ways to take the two halves of a product

#if defined(__AVX512F__)
constexpr int WORDS = 16;
using W = __m512i;
LLMX_INLINE W all_words(uint32_t x) { return _mm512_set1_epi32(static_cast<int32_t>(x)); }
LLMX_INLINE W load_block(const uint32_t* p) { return _mm512_loadu_si512(p); }
LLMX_INLINE void store_block(uint32_t* p, W a) { _mm512_storeu_si512(p, a); }
LLMX_INLINE W differ(W a, W b, W c) { return _mm512_xor_si512(_mm512_xor_si512(a, b), c); }
LLMX_INLINE W low_of(W a, W b) { return _mm512_mullo_epi32(a, b); }
LLMX_INLINE W high_of(W a, W b) {
  const W even = _mm512_mul_epu32(a, b), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), b);
  return _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xAAAA, odd);
}
#else
constexpr int WORDS = 8;
using W = __m256i;
LLMX_INLINE W all_words(uint32_t x) { return _mm256_set1_epi32(static_cast<int32_t>(x)); }
LLMX_INLINE W load_block(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
LLMX_INLINE void store_block(uint32_t* p, W a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
LLMX_INLINE W differ(W a, W b, W c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
LLMX_INLINE W low_of(W a, W b) { return _mm256_mullo_epi32(a, b); }
LLMX_INLINE W high_of(W a, W b) {
  const W even = _mm256_mul_epu32(a, b), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b);
  return _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}
#endif

inline void rounds(Block& block, uint32_t key0, uint32_t key1) {
  constexpr int N = WIDTH / WORDS;
  W word[4][N];
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < N; ++i) word[j][i] = load_block(block.word[j] + i * WORDS);
  const W m0 = all_words(0xD2511F53u), m1 = all_words(0xCD9E8D57u);
  for (int round = 0; round < 10; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u)
    for (int i = 0; i < N; ++i) {
      const W a = word[0][i], c = word[2][i];
      word[0][i] = differ(high_of(c, m1), word[1][i], all_words(key0));
      word[1][i] = low_of(c, m1);
      word[2][i] = differ(high_of(a, m0), word[3][i], all_words(key1));
      word[3][i] = low_of(a, m0);
    }
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < N; ++i) store_block(block.word[j] + i * WORDS, word[j][i]);
}

#else

inline void rounds(Block& block, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u)
    for (int i = 0; i < WIDTH; ++i) {
      const uint64_t p0 = uint64_t{0xD2511F53u} * block.word[0][i];
      const uint64_t p1 = uint64_t{0xCD9E8D57u} * block.word[2][i];
      block.word[0][i] = static_cast<uint32_t>(p1 >> 32) ^ block.word[1][i] ^ key0;
      block.word[1][i] = static_cast<uint32_t>(p1);
      block.word[2][i] = static_cast<uint32_t>(p0 >> 32) ^ block.word[3][i] ^ key1;
      block.word[3][i] = static_cast<uint32_t>(p0);
    }
}

#endif

// The bits of vocabulary indices [start, start + 4 * WIDTH): word j of counter i is index start + 4 * i + j's.
inline Block random_bits(uint64_t seed, uint64_t position, uint32_t stream, int64_t start) {
  Block block;
  for (int i = 0; i < WIDTH; ++i) {
    block.word[0][i] = static_cast<uint32_t>(position);
    block.word[1][i] = static_cast<uint32_t>(position >> 32);
    block.word[2][i] = stream;
    block.word[3][i] = static_cast<uint32_t>(start / 4) + static_cast<uint32_t>(i);
  }
  rounds(block, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  return block;
}

// The upper 23 bits, plus a half: exact in float, never 0 and never 1.
inline float uniform(uint32_t bits) {
  return (static_cast<float>(static_cast<int32_t>(bits >> 9)) + 0.5f) * 0x1p-23f;
}

}  // namespace
}  // namespace LLMX_ISA
