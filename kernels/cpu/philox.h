// Philox4x32-10 (Salmon et al. 2011), several counters at a time.
#pragma once
#include <stdint.h>

namespace LLMX_ISA {
namespace {

constexpr int WIDTH = 16;  // counters at a time: the compiler turns the loops over them into vectors

struct Block {
  uint32_t word[4][WIDTH];
};

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
