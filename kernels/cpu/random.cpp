// Philox4x32-10 (Salmon et al. 2011); kernels/reference/random.py defines the op, bit for bit.
#include "ops.h"

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

// The upper 23 bits, plus a half: exact in float, never 0 and never 1.
inline float uniform(uint32_t bits) {
  return (static_cast<float>(static_cast<int32_t>(bits >> 9)) + 0.5f) * 0x1p-23f;
}

inline void row(float* out, uint64_t seed, uint64_t position, int64_t vocab, uint32_t stream) {
  for (int64_t start = 0; start < vocab; start += 4 * WIDTH) {
    Block block;
    for (int i = 0; i < WIDTH; ++i) {
      block.word[0][i] = static_cast<uint32_t>(position);
      block.word[1][i] = static_cast<uint32_t>(position >> 32);
      block.word[2][i] = stream;
      block.word[3][i] = static_cast<uint32_t>(start / 4) + static_cast<uint32_t>(i);
    }
    rounds(block, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    float values[4 * WIDTH];
    for (int i = 0; i < WIDTH; ++i)
      for (int lane = 0; lane < 4; ++lane) values[4 * i + lane] = uniform(block.word[lane][i]);
    const int64_t left = vocab - start;
    __builtin_memcpy(out + start, values, sizeof(float) * static_cast<uint64_t>(left < 4 * WIDTH ? left : 4 * WIDTH));
  }
}

}  // namespace

void philox_uniform(float* out, const int64_t* seeds, const int64_t* positions, int64_t rows, int64_t vocab,
                    uint32_t stream) {
  for (int64_t r = 0; r < rows; ++r)
    row(out + r * vocab, static_cast<uint64_t>(seeds[r]), static_cast<uint64_t>(positions[r]), vocab, stream);
}

}  // namespace LLMX_ISA
