// Rows of a stored embedding as float32: plain numbers, or GGUF's blocks. llmx/schemes/gguf_*.py define them, bit for
// bit; what lies where is ggml's (ggml-common.h, ggml-quants.c).
#include "ops.h"
#include "runtime/pool.h"
#include "simd.h"

namespace LLMX_ISA {
namespace {

constexpr int LANES = 16;

// Number i of those of WIDTH bits: each RUN bytes hold one after the other in their lowest bits, then in the next ones.
template <int WIDTH, int RUN>
LLMX_INLINE int number(const uint8_t* packed, int i) {
  constexpr int EACH = 8 / WIDTH * RUN;
  const int within = i % EACH;
  return packed[i / EACH * RUN + within % RUN] >> (within / RUN * WIDTH) & ((1 << WIDTH) - 1);
}

LLMX_INLINE int as_signed(uint8_t byte) { return static_cast<int8_t>(byte); }

LLMX_INLINE float half_at(const uint8_t* p) {
  uint16_t lanes[LANES] = {0};
  __builtin_memcpy(lanes, p, 2);
  float wide[LANES];
  store(wide, load_half(lanes));
  return wide[0];
}

constexpr int8_t UNEVEN[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// A type of block: SIZE weights in BYTES bytes, a scale at byte D and, unless E is -1, a second one at E, which
// multiplies the minima or, where a block has no GROUPS with scales of their own, is added.
struct Plain {
  static constexpr int SIZE = 32, GROUPS = 0, E = -1;
  static int scale(const uint8_t*, int) { return 1; }
  static int minimum(const uint8_t*, int) { return 0; }
};
struct Q4_0 : Plain {
  static constexpr int BYTES = 18, D = 0;
  static int code(const uint8_t* b, int i) { return number<4, 16>(b + 2, i) - 8; }
};
struct Q4_1 : Plain {
  static constexpr int BYTES = 20, D = 0, E = 2;
  static int code(const uint8_t* b, int i) { return number<4, 16>(b + 4, i); }
};
struct Q5_0 : Plain {
  static constexpr int BYTES = 22, D = 0;
  static int code(const uint8_t* b, int i) { return (number<4, 16>(b + 6, i) | number<1, 1>(b + 2, i) << 4) - 16; }
};
struct Q5_1 : Plain {
  static constexpr int BYTES = 24, D = 0, E = 2;
  static int code(const uint8_t* b, int i) { return number<4, 16>(b + 8, i) | number<1, 1>(b + 4, i) << 4; }
};
struct Q8_0 : Plain {
  static constexpr int BYTES = 34, D = 0;
  static int code(const uint8_t* b, int i) { return as_signed(b[2 + i]); }
};
struct IQ4_NL : Plain {
  static constexpr int BYTES = 18, D = 0;
  static int code(const uint8_t* b, int i) { return UNEVEN[number<4, 16>(b + 2, i)]; }
};
struct Q2_K : Plain {
  static constexpr int SIZE = 256, BYTES = 84, GROUPS = 16, D = 80, E = 82;
  static int code(const uint8_t* b, int i) { return number<2, 32>(b + 16, i); }
  static int scale(const uint8_t* b, int g) { return b[g] & 15; }
  static int minimum(const uint8_t* b, int g) { return b[g] >> 4; }
};
struct Q3_K : Plain {
  static constexpr int SIZE = 256, BYTES = 110, GROUPS = 16, D = 108;
  static int code(const uint8_t* b, int i) { return (number<2, 32>(b + 32, i) | number<1, 32>(b, i) << 2) - 4; }
  static int scale(const uint8_t* b, int g) { return (number<4, 8>(b + 96, g) | number<2, 4>(b + 104, g) << 4) - 32; }
};
struct SixBits : Plain {  // scales and minima of Q4_K and Q5_K
  static constexpr int SIZE = 256, GROUPS = 8, D = 0, E = 2;
  static int scale(const uint8_t* b, int g) { return g < 4 ? b[4 + g] & 63 : (b[8 + g] & 15) | (b[g] >> 2 & 48); }
  static int minimum(const uint8_t* b, int g) { return g < 4 ? b[8 + g] & 63 : b[8 + g] >> 4 | (b[4 + g] >> 2 & 48); }
};
struct Q4_K : SixBits {
  static constexpr int BYTES = 144;
  static int code(const uint8_t* b, int i) { return number<4, 32>(b + 16, i); }
};
struct Q5_K : SixBits {
  static constexpr int BYTES = 176;
  static int code(const uint8_t* b, int i) { return number<4, 32>(b + 48, i) | number<1, 32>(b + 16, i) << 4; }
};
struct Q6_K : Plain {
  static constexpr int SIZE = 256, BYTES = 210, GROUPS = 16, D = 208;
  static int code(const uint8_t* b, int i) { return (number<4, 64>(b, i) | number<2, 32>(b + 128, i) << 4) - 32; }
  static int scale(const uint8_t* b, int g) { return as_signed(b[192 + g]); }
};
struct IQ4_XS : Plain {
  static constexpr int SIZE = 256, BYTES = 136, GROUPS = 8, D = 0;
  static int code(const uint8_t* b, int i) { return UNEVEN[number<4, 16>(b + 8, i)]; }
  static int scale(const uint8_t* b, int g) { return (number<4, 1>(b + 4, g) | number<2, 1>(b + 2, g) << 4) - 32; }
};

// Products and differences are rounded one by one, as the schemes' are.
template <class Type>
void blocks(float* out, const uint8_t* row, int64_t hidden) {
  for (int64_t at = 0; at < hidden; at += Type::SIZE, row += Type::BYTES, out += Type::SIZE) {
    const float d = half_at(row + Type::D);
    float e = 0.0f;
    if constexpr (Type::E >= 0) e = half_at(row + Type::E);
    if constexpr (Type::GROUPS == 0) {
      for (int i = 0; i < Type::SIZE; ++i) {
        const float scaled = static_cast<float>(Type::code(row, i)) * d;
        out[i] = Type::E < 0 ? scaled : scaled + e;
      }
    } else {
      constexpr int EACH = Type::SIZE / Type::GROUPS;
      for (int g = 0; g < Type::GROUPS; ++g) {
        const float scale = static_cast<float>(Type::scale(row, g)) * d;
        const float minimum = static_cast<float>(Type::minimum(row, g)) * e;
        for (int i = g * EACH; i < (g + 1) * EACH; ++i) {
          const float scaled = static_cast<float>(Type::code(row, i)) * scale;
          out[i] = Type::E < 0 ? scaled : scaled - minimum;
        }
      }
    }
  }
}

void numbers(float* out, const uint8_t* row, int64_t hidden, bool half) {
  for (int64_t at = 0; at < hidden; at += LANES) {
    const int64_t count = hidden - at < LANES ? hidden - at : LANES;
    uint8_t lanes[2 * LANES] = {0};
    __builtin_memcpy(lanes, row + 2 * at, static_cast<uint64_t>(2 * count));
    float wide[LANES];
    store(wide, half ? load_half(lanes) : load_bfloat(lanes));
    __builtin_memcpy(out + at, wide, static_cast<uint64_t>(count) * sizeof(float));
  }
}

struct LookUp {
  float* out;
  const uint8_t* stored;
  int64_t row_bytes, count;
  const int64_t* ids;
  int64_t hidden;
  int32_t kind;
};

// In the order of KINDS in stored.py.
void look_up_row(void* context, int64_t token, int) {
  const LookUp& l = *static_cast<const LookUp*>(context);
  const int64_t id = l.ids[token] < 0 ? 0 : l.ids[token] < l.count ? l.ids[token] : l.count - 1;
  const uint8_t* row = l.stored + id * l.row_bytes;
  float* out = l.out + token * l.hidden;
  switch (l.kind) {
    case 0: __builtin_memcpy(out, row, static_cast<uint64_t>(l.hidden) * sizeof(float)); return;
    case 1: return numbers(out, row, l.hidden, true);
    case 2: return numbers(out, row, l.hidden, false);
    case 3: return blocks<Q4_0>(out, row, l.hidden);
    case 4: return blocks<Q4_1>(out, row, l.hidden);
    case 5: return blocks<Q5_0>(out, row, l.hidden);
    case 6: return blocks<Q5_1>(out, row, l.hidden);
    case 7: return blocks<Q8_0>(out, row, l.hidden);
    case 8: return blocks<Q2_K>(out, row, l.hidden);
    case 9: return blocks<Q3_K>(out, row, l.hidden);
    case 10: return blocks<Q4_K>(out, row, l.hidden);
    case 11: return blocks<Q5_K>(out, row, l.hidden);
    case 12: return blocks<Q6_K>(out, row, l.hidden);
    case 13: return blocks<IQ4_NL>(out, row, l.hidden);
    case 14: return blocks<IQ4_XS>(out, row, l.hidden);
  }
}

}  // namespace

void look_up(float* out, const uint8_t* stored, int64_t row_bytes, int64_t count, const int64_t* ids, int64_t rows,
             int64_t hidden, int32_t kind, int32_t threads) {
  LookUp l{out, stored, row_bytes, count, ids, hidden, kind};
  llmx_pool::each(look_up_row, &l, rows, threads);
}

}  // namespace LLMX_ISA
