// Random numbers; kernels/reference/random.py defines the op, bit for bit.
#include "ops.h"
#include "philox.h"

namespace LLMX_ISA {

namespace {

inline void row(float* out, uint64_t seed, uint64_t position, int64_t vocab, uint32_t stream) {
  for (int64_t start = 0; start < vocab; start += 4 * WIDTH) {
    const Block block = random_bits(seed, position, stream, start);
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
