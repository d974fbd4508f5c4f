// From GGUF's blocks to the packed layouts of packed.h, several blocks of outputs at once. What the types mean is
// defined by llmx/schemes/gguf_*.py, and what lies where by kernels/cpu/linear.py's pack_codes; tests hold both against
// this. A new type needs a reader here, and codes of another width a way to write them.
#include "ops.h"
#include "runtime/pool.h"

namespace LLMX_ISA {
namespace {

constexpr int LANES = 16, GROUP = 32, SUPER = 256;

struct Layout {
  int bits;
  bool small, fine, minimum;  // scales of a byte each; of 16 inputs, not 32; a minimum beside each scale or d
};

// A block taken apart, as llmx/schemes/blocks.py's Parts.
struct Parts {
  uint8_t codes[SUPER], scales[16], minima[16];
  uint8_t d[2], e[2];
};

inline void copy(uint8_t* to, const uint8_t* from, uint64_t bytes) { __builtin_memcpy(to, from, bytes); }

// The numbers of WIDTH bits in BYTES bytes: each RUN bytes hold one after the other in their lowest bits, then more.
template <int WIDTH, int RUN, int BYTES>
inline void numbers(uint8_t* to, const uint8_t* from) {
  constexpr int EACH = 8 / WIDTH;
  for (int run = 0; run < BYTES / RUN; ++run)
    for (int part = 0; part < EACH; ++part)
      for (int j = 0; j < RUN; ++j)
        to[(run * EACH + part) * RUN + j] =
            static_cast<uint8_t>(from[run * RUN + j] >> WIDTH * part & ((1 << WIDTH) - 1));
}
template <int COUNT>
inline void above(uint8_t* to, const uint8_t* high, int shift) {
  for (int i = 0; i < COUNT; ++i) to[i] = static_cast<uint8_t>(to[i] | high[i] << shift);
}
template <int COUNT>
inline void less(uint8_t* to, int by) {
  for (int i = 0; i < COUNT; ++i) to[i] = static_cast<uint8_t>(to[i] - by);
}
template <int COUNT>
inline void levels(uint8_t* to) {  // IQ4_NL's
  constexpr int8_t LEVELS[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  for (int i = 0; i < COUNT; ++i) to[i] = static_cast<uint8_t>(LEVELS[to[i]]);
}
inline void six_bits(Parts& p, const uint8_t* from) {
  const uint8_t *a = from, *b = from + 4, *low = from + 8;
  for (int i = 0; i < 4; ++i) {
    p.scales[i] = a[i] & 63, p.scales[4 + i] = static_cast<uint8_t>((low[i] & 15) | (a[i] >> 2 & 48));
    p.minima[i] = b[i] & 63, p.minima[4 + i] = static_cast<uint8_t>(low[i] >> 4 | (b[i] >> 2 & 48));
  }
}

struct Q4_0 {
  static constexpr int SIZE = 32, BYTES = 18;
  static void read(Parts& p, const uint8_t* b) {
    copy(p.d, b, 2), numbers<4, 16, 16>(p.codes, b + 2), less<32>(p.codes, 8);
  }
};
struct Q4_1 {
  static constexpr int SIZE = 32, BYTES = 20;
  static void read(Parts& p, const uint8_t* b) {
    copy(p.d, b, 2), copy(p.e, b + 2, 2), numbers<4, 16, 16>(p.codes, b + 4);
  }
};
struct Q5_0 {
  static constexpr int SIZE = 32, BYTES = 22;
  static void read(Parts& p, const uint8_t* b) {
    uint8_t high[32];
    copy(p.d, b, 2), numbers<1, 1, 4>(high, b + 2), numbers<4, 16, 16>(p.codes, b + 6);
    above<32>(p.codes, high, 4), less<32>(p.codes, 16);
  }
};
struct Q5_1 {
  static constexpr int SIZE = 32, BYTES = 24;
  static void read(Parts& p, const uint8_t* b) {
    uint8_t high[32];
    copy(p.d, b, 2), copy(p.e, b + 2, 2), numbers<1, 1, 4>(high, b + 4), numbers<4, 16, 16>(p.codes, b + 8);
    above<32>(p.codes, high, 4);
  }
};
struct Q8_0 {
  static constexpr int SIZE = 32, BYTES = 34;
  static void read(Parts& p, const uint8_t* b) { copy(p.d, b, 2), copy(p.codes, b + 2, 32); }
};
struct IQ4_NL {
  static constexpr int SIZE = 32, BYTES = 18;
  static void read(Parts& p, const uint8_t* b) {
    copy(p.d, b, 2), numbers<4, 16, 16>(p.codes, b + 2), levels<32>(p.codes);
  }
};
struct Q2_K {
  static constexpr int SIZE = 256, BYTES = 84;
  static void read(Parts& p, const uint8_t* b) {
    for (int i = 0; i < 16; ++i) p.scales[i] = b[i] & 15, p.minima[i] = b[i] >> 4;
    numbers<2, 32, 64>(p.codes, b + 16), copy(p.d, b + 80, 2), copy(p.e, b + 82, 2);
  }
};
struct Q3_K {
  static constexpr int SIZE = 256, BYTES = 110;
  static void read(Parts& p, const uint8_t* b) {
    uint8_t high[256], top[16];
    numbers<1, 32, 32>(high, b), numbers<2, 32, 64>(p.codes, b + 32);
    above<256>(p.codes, high, 2), less<256>(p.codes, 4);
    numbers<4, 8, 8>(p.scales, b + 96), numbers<2, 4, 4>(top, b + 104);
    above<16>(p.scales, top, 4), less<16>(p.scales, 32), copy(p.d, b + 108, 2);
  }
};
struct Q4_K {
  static constexpr int SIZE = 256, BYTES = 144;
  static void read(Parts& p, const uint8_t* b) {
    copy(p.d, b, 2), copy(p.e, b + 2, 2), six_bits(p, b + 4), numbers<4, 32, 128>(p.codes, b + 16);
  }
};
struct Q5_K {
  static constexpr int SIZE = 256, BYTES = 176;
  static void read(Parts& p, const uint8_t* b) {
    uint8_t high[256];
    copy(p.d, b, 2), copy(p.e, b + 2, 2), six_bits(p, b + 4);
    numbers<1, 32, 32>(high, b + 16), numbers<4, 32, 128>(p.codes, b + 48), above<256>(p.codes, high, 4);
  }
};
struct Q6_K {
  static constexpr int SIZE = 256, BYTES = 210;
  static void read(Parts& p, const uint8_t* b) {
    uint8_t high[256];
    numbers<4, 64, 128>(p.codes, b), numbers<2, 32, 64>(high, b + 128);
    above<256>(p.codes, high, 4), less<256>(p.codes, 32), copy(p.scales, b + 192, 16), copy(p.d, b + 208, 2);
  }
};
struct IQ4_XS {
  static constexpr int SIZE = 256, BYTES = 136;
  static void read(Parts& p, const uint8_t* b) {
    uint8_t high[8];
    copy(p.d, b, 2), numbers<2, 1, 2>(high, b + 2), numbers<4, 1, 4>(p.scales, b + 4);
    above<8>(p.scales, high, 4), less<8>(p.scales, 32), numbers<4, 16, 128>(p.codes, b + 8), levels<256>(p.codes);
  }
};

struct Job {
  uint8_t* packed;
  int64_t block_bytes;
  const uint8_t* rows;
  int64_t row_bytes, outputs, inputs, wide;  // wide: blocks of 16 outputs in a task
  Layout layout;
};

// WIDTH bits of `count` codes four inputs apart, from bit 4 on, side by side.
template <int WIDTH>
inline uint8_t high_bits(const uint8_t* codes, int count) {
  int bits = 0;
  for (int j = 0; j < count; ++j) bits |= (codes[4 * j] >> 4 & ((1 << WIDTH) - 1)) << WIDTH * j;
  return static_cast<uint8_t>(bits);
}

// 32 codes of output `lane` -> their dwords among those of 16 outputs; packed.h says which bits are where.
inline void write_codes(uint8_t* group, uint8_t* codes, int lane, int bits, bool minimum) {
  if (bits < 8 && !minimum) less<GROUP>(codes, -(1 << (bits - 1)));  // with a sign: moved up
  for (int vector = 0; vector < bits; ++vector) {  // there are as many vectors as bits
    const int low = 4 * vector;
    uint8_t dword[4];
    for (int i = 0; i < 4; ++i) {
      if (bits == 8)
        dword[i] = codes[low + i];
      else if (vector < 4)
        dword[i] = static_cast<uint8_t>((codes[low + i] & 15) | codes[16 + low + i] << 4);
      else
        dword[i] = bits == 5 ? high_bits<1>(codes + i, 8) : high_bits<2>(codes + 16 * (vector - 4) + i, 4);
    }
    copy(group + 4 * (LANES * vector + lane), dword, 4);
  }
}

template <class Kind>
void pack_block(const Job& job, int64_t block) {
  const Layout layout = job.layout;
  const int64_t code_bytes = LANES * GROUP * layout.bits / 8, kinds = layout.minimum ? 2 : 1;
  const int64_t groups = layout.small ? SUPER / GROUP : 2 / kinds;  // in a bunch: packed.h
  const int64_t scale_bytes = layout.small ? groups * (layout.fine ? 2 : 1) * LANES : 0;
  const int64_t half_bytes = (layout.small ? 1 : groups) * 2 * LANES;
  const int64_t header = (kinds * (scale_bytes + half_bytes) + 63) / 64 * 64;
  const int64_t first = block * LANES, left = job.outputs - first;
  Parts p = {};
  for (int64_t at = 0; at < job.inputs / Kind::SIZE; ++at) {
    const int64_t group = at * (Kind::SIZE / GROUP), within = group % groups;
    uint8_t* bunch = job.packed + block * job.block_bytes + group / groups * (header + groups * code_bytes);
    uint8_t *d = bunch + within * 2 * LANES, *e = d + half_bytes, *scales = bunch + kinds * half_bytes;
    for (int lane = 0; lane < LANES && lane < left; ++lane) {
      Kind::read(p, job.rows + (first + lane) * job.row_bytes + at * Kind::BYTES);
      for (int g = 0; g < Kind::SIZE / GROUP; ++g)
        write_codes(bunch + header + (within + g) * code_bytes, p.codes + GROUP * g, lane, layout.bits, layout.minimum);
      for (int i = 0; i < scale_bytes / LANES; ++i) {
        scales[i * LANES + lane] = p.scales[i];
        if (layout.minimum) scales[scale_bytes + i * LANES + lane] = p.minima[i];
      }
      copy(d + 2 * lane, p.d, 2);
      if (layout.minimum) copy(e + 2 * lane, p.e, 2);
    }
  }
}

template <class Kind>
void pack_some(void* context, int64_t task, int) {
  const Job& job = *static_cast<const Job*>(context);
  const int64_t blocks = (job.outputs + LANES - 1) / LANES, end = (task + 1) * job.wide;
  for (int64_t block = task * job.wide; block < (end < blocks ? end : blocks); ++block) pack_block<Kind>(job, block);
}

template <class Kind>
void run(Job& job, int threads) {
  const int64_t blocks = (job.outputs + LANES - 1) / LANES;
  job.wide = 1 + 65536 / (LANES * (job.inputs + 1));
  llmx_pool::each(pack_some<Kind>, &job, (blocks + job.wide - 1) / job.wide, threads);
}

}  // namespace

// kind: in the order of kernels/cpu/pack.py's KINDS. layout: its bits, then one bit for small, fine and minimum each.
void pack_blocks(uint8_t* packed, int64_t block_bytes, const uint8_t* rows, int64_t row_bytes, int64_t outputs,
                 int64_t inputs, int32_t kind, int32_t layout, int32_t threads) {
  const Layout parts{layout & 15, (layout & 16) != 0, (layout & 32) != 0, (layout & 64) != 0};
  Job job{packed, block_bytes, rows, row_bytes, outputs, inputs, 1, parts};
  constexpr void (*RUN[])(Job&, int) = {run<Q4_0>, run<Q4_1>, run<Q5_0>, run<Q5_1>, run<Q8_0>, run<IQ4_NL>,
                                        run<Q2_K>, run<Q3_K>, run<Q4_K>, run<Q5_K>, run<Q6_K>, run<IQ4_XS>};
  RUN[kind](job, threads);
}

}  // namespace LLMX_ISA
