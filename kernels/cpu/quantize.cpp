// Weights to GGUF's blocks: kernels/reference/quantize.py says how, and has the same bytes. Eight groups at a time, a
// lane each, so that the sums of a group run in order.
#include "fits.h"
#include "ops.h"
#include "runtime/pool.h"

namespace LLMX_ISA {
namespace {

constexpr int SUPER = 256;

inline uint16_t half_of(float value) {  // to the nearest, ties to even
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7FFFFFFFu;
  if (size > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (size >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7C00u);  // 65536 and more
  if (size < 0x38800000u) {  // below float16's smallest normal number: whole multiples of 2^-24
    float small;
    __builtin_memcpy(&small, &size, 4);
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(nearest(small * 0x1p24f)));
  }
  return static_cast<uint16_t>(sign | (size - 0x38000000u + 0xFFFu + (size >> 13 & 1u)) >> 13);
}
inline float from_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, size = half & 0x7FFFu;
  uint32_t bits = size >= 0x7C00u ? 0x7F800000u | (size & 0x3FFu) << 13 : (size << 13) + (112u << 23);
  if (size < 0x400u) {
    const float tiny = static_cast<float>(size) * 0x1p-24f;
    __builtin_memcpy(&bits, &tiny, 4);
  }
  bits |= sign;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
inline float put_half(uint8_t* to, float value) {  // what was put
  const uint16_t half = half_of(value);
  __builtin_memcpy(to, &half, 2);
  return from_half(half);
}

// The inverse of pack.cpp's `numbers`: RUN bytes take a number of WIDTH bits each in their lowest bits, then one more.
template <int WIDTH, int RUN, int BYTES>
inline void put_bits(uint8_t* to, const uint8_t* codes, int shift = 0) {
  constexpr int EACH = 8 / WIDTH;
  for (int run = 0; run < BYTES / RUN; ++run)
    for (int j = 0; j < RUN; ++j) {
      int byte = 0;
      for (int part = 0; part < EACH; ++part)
        byte |= (codes[(run * EACH + part) * RUN + j] >> shift & ((1 << WIDTH) - 1)) << WIDTH * part;
      to[run * RUN + j] = static_cast<uint8_t>(byte);
    }
}
inline void put_six_bits(uint8_t* to, const uint8_t* scales, const uint8_t* minima) {
  for (int i = 0; i < 4; ++i) {
    to[i] = static_cast<uint8_t>(scales[i] | scales[4 + i] >> 4 << 6);
    to[4 + i] = static_cast<uint8_t>(minima[i] | minima[4 + i] >> 4 << 6);
    to[8 + i] = static_cast<uint8_t>((scales[4 + i] & 15) | (minima[4 + i] & 15) << 4);
  }
}

// Eight groups of N numbers that lie one after the other; `count` of them are there, the rest are zeros.
template <int N>
inline void columns(Eight* to, const float* from, int count) {
  for (int i = 0; i < N; ++i)
    for (int lane = 0; lane < WIDE; ++lane) to[i][lane] = lane < count ? from[lane * N + i] : 0.0f;
}
inline float squares(const float* x, int64_t n) {
  float sum = 0.0f;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
  return sum;
}
// The weights of errors: importance * sqrt(mean square around + own square), or the square alone without importance.
template <int N>
inline void weigh(Eight* w, const Eight* x, const float* importance, int count, float square) {
  if (!importance) {
    for (int i = 0; i < N; ++i) w[i] = x[i] * x[i];
    return;
  }
  columns<N>(w, importance, count);
  for (int i = 0; i < N; ++i) w[i] = w[i] * root(square + x[i] * x[i]);
}
template <int N>
inline Eight sum_of(const Eight* terms) {
  Eight sum = {};
  for (int i = 0; i < N; ++i) sum = sum + terms[i];
  return sum;
}

// Of a row: `square` is its mean square; x and importance (null: none) begin at the block.
struct Some {
  const float *x, *importance;
  float square;
  int count;  // blocks of 32, up to eight
};

// A block of 32 numbers as it lies.
struct Block {
  Eight x[4];
  explicit Block(const float* from) { __builtin_memcpy(x, from, sizeof x); }
  float lowest() const {
    Eight low = x[0];
    for (int i = 1; i < 4; ++i) low = x[i] < low ? x[i] : low;
    float found = low[0];
    for (int lane = 1; lane < WIDE; ++lane) found = low[lane] < found ? low[lane] : found;
    return found;
  }
  Block negative() const {
    Block other = *this;
    for (Eight& part : other.x) part = -part;
    return other;
  }
};
inline float largest_of(const float* x, const Block& block) {  // without its sign; the first of equals
  const float low = block.lowest(), high = -block.negative().lowest();
  return size_of(low) == size_of(high) ? largest(x, 32) : (size_of(low) > size_of(high) ? low : high);
}
template <class Byte>
inline void put_whole(uint8_t* to, const Eight* numbers) {  // without their fractions
  typedef Byte Bytes __attribute__((vector_size(WIDE)));
  for (int i = 0; i < 4; ++i) {
    const Bytes bytes = __builtin_convertvector(__builtin_convertvector(numbers[i], Mask), Bytes);
    __builtin_memcpy(to + WIDE * i, &bytes, WIDE);
  }
}

template <bool HIGH>
inline void put_codes(uint8_t* to, const uint8_t* codes) {
  if (HIGH) put_bits<1, 1, 4>(to, codes, 4);
  put_bits<4, 16, 16>(to + (HIGH ? 4 : 0), codes);
}

template <int MOST>
struct Q_0 {  // Q4_0, Q5_0
  static constexpr int SIZE = 32, BATCH = WIDE, BYTES = MOST == 8 ? 18 : 22;
  static constexpr float top = static_cast<float>(MOST);
  static void write(uint8_t* to, const Some& some) {
    uint8_t codes[32];
    if (!some.importance) {
      for (int b = 0; b < some.count; ++b, to += BYTES) {
        Block block(some.x + 32 * b);
        const float scale = largest_of(some.x + 32 * b, block) / -top, inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
        for (Eight& x : block.x) x = between<Eight>(x * inverse + (top + 0.5f), 0.0f, 2.0f * top - 1.0f);
        put_whole<uint8_t>(codes, block.x), put_half(to, scale), put_codes<MOST == 16>(to + 2, codes);
      }
      return;
    }
    Eight x[32], w[32];
    columns<32>(x, some.x, some.count), weigh<32>(w, x, some.importance, some.count, some.square);
    const Fit<Eight> fit = symmetric_fit(x, w, 32, MOST);
    for (int i = 0; i < 32; ++i) x[i] = symmetric_code(fit, x[i], MOST) + top;
    for (int lane = 0; lane < some.count; ++lane, to += BYTES) {
      for (int i = 0; i < 32; ++i) codes[i] = static_cast<uint8_t>(x[i][lane]);
      put_half(to, fit.scale[lane]), put_codes<MOST == 16>(to + 2, codes);
    }
  }
};

template <int MOST>
struct Q_1 {  // Q4_1, Q5_1
  static constexpr int SIZE = 32, BATCH = WIDE, BYTES = MOST == 15 ? 20 : 24;
  static constexpr float top = static_cast<float>(MOST);
  static void write(uint8_t* to, const Some& some) {
    uint8_t codes[32];
    if (!some.importance) {
      for (int b = 0; b < some.count; ++b, to += BYTES) {
        Block block(some.x + 32 * b);
        const float low = block.lowest() + 0.0f, high = -block.negative().lowest();
        const float scale = (high - low) / top, inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
        for (Eight& x : block.x) x = between<Eight>((x - low) * inverse + 0.5f, 0.0f, top);
        put_whole<uint8_t>(codes, block.x), put_half(to, scale), put_half(to + 2, low);
        put_codes<MOST == 31>(to + 4, codes);
      }
      return;
    }
    Eight x[32], w[32];
    columns<32>(x, some.x, some.count), weigh<32>(w, x, some.importance, some.count, some.square);
    const Fit<Eight> fit = affine_fit<32, false>(x, w, MOST, -0.9f, 0.05f, 36);
    for (int i = 0; i < 32; ++i) x[i] = affine_code(fit, x[i], top);
    for (int lane = 0; lane < some.count; ++lane, to += BYTES) {
      for (int i = 0; i < 32; ++i) codes[i] = static_cast<uint8_t>(x[i][lane]);
      put_half(to, fit.scale[lane]), put_half(to + 2, -fit.minimum[lane]), put_codes<MOST == 31>(to + 4, codes);
    }
  }
};

struct Q8_0 {
  static constexpr int SIZE = 32, BATCH = 1, BYTES = 34;
  static void write(uint8_t* to, const Some& some) {
    Block block(some.x);
    const float low = -block.lowest(), high = -block.negative().lowest(), scale = (low > high ? low : high) / 127.0f;
    const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    for (Eight& x : block.x) {  // halves away from zero
      const Eight scaled = x * inverse;
      x = between<Eight>(scaled + (scaled < Eight{} ? Eight{} - 0.5f : Eight{} + 0.5f), -127.0f, 127.0f);
    }
    put_half(to, scale), put_whole<int8_t>(to + 2, block.x);
  }
};

struct IQ4_NL {
  static constexpr int SIZE = 32, BATCH = WIDE, BYTES = 18;
  static void write(uint8_t* to, const Some& some) {
    Eight x[32], w[32], square = {};
    columns<32>(x, some.x, some.count);
    if (some.importance) {
      for (int i = 0; i < 32; ++i) square = square + x[i] * x[i];
      square = square * (2.0f / 32);
      columns<32>(w, some.importance, some.count);
      for (int i = 0; i < 32; ++i) w[i] = w[i] * root(square + x[i] * x[i]);
    } else {
      weigh<32>(w, x, nullptr, some.count, 0.0f);
    }
    const Eight scale = level_fit(x, w, 32);
    uint8_t bytes[32];
    for (int lane = 0; lane < some.count; ++lane, to += BYTES) {
      const float inverse = scale[lane] == 0.0f ? 0.0f : 1.0f / scale[lane];
      for (int i = 0; i < 32; ++i) bytes[i] = level_index(inverse * some.x[32 * lane + i]);
      put_half(to, scale[lane]), put_bits<4, 16, 16>(to + 2, bytes);
    }
  }
};

struct IQ4_XS {
  static constexpr int SIZE = 256, BATCH = 1, BYTES = 136;
  static void write(uint8_t* to, const Some& some) {
    Eight x[32], w[32];
    columns<32>(x, some.x, WIDE);
    weigh<32>(w, x, some.importance, WIDE, some.importance ? squares(some.x, SUPER) * (2.0f / SUPER) : 0.0f);
    const Eight found = level_fit(x, w, 32);
    float scale[8];
    for (int g = 0; g < 8; ++g) scale[g] = found[g];
    const float d = -largest(scale, 8) / 32.0f, inverse = d == 0.0f ? 0.0f : 1.0f / d;
    uint8_t codes[SUPER], s[8];
    put_half(to, d);
    for (int g = 0; g < 8; ++g) {
      const float code = nearest(between(inverse * scale[g], -32.0f, 31.0f)), step = d * code;
      const float by = step == 0.0f ? 0.0f : 1.0f / step;
      s[g] = static_cast<uint8_t>(static_cast<int>(code) + 32);
      for (int i = 0; i < 32; ++i) codes[32 * g + i] = level_index(by * some.x[32 * g + i]);
    }
    put_bits<2, 1, 2>(to + 2, s, 4), put_bits<4, 1, 4>(to + 4, s), put_bits<4, 16, 128>(to + 8, codes);
  }
};

// Codes, and the scales of a block of 256 in groups of N.
template <int N>
struct Scaled {
  uint8_t codes[SUPER], scales[SUPER / N], minima[SUPER / N];
  float d, e;
};

// Numbers >= 0 -> whole numbers up to `most`, and what they count.
inline float whole(uint8_t* to, const float* numbers, int n, float most) {
  float peak = 0.0f;
  for (int i = 0; i < n; ++i) peak = numbers[i] > peak ? numbers[i] : peak;
  const float factor = peak > 0.0f ? most / peak : 0.0f;
  for (int i = 0; i < n; ++i) to[i] = static_cast<uint8_t>(nearest(between(factor * numbers[i], 0.0f, most)));
  return from_half(half_of(peak / most));
}
inline float fitted(uint8_t* to, const float* numbers, const float* w, int n, int most) {
  float codes[16];
  const float scale = positive_fit(numbers, w, codes, n, most);
  for (int i = 0; i < n; ++i) to[i] = static_cast<uint8_t>(codes[i]);
  return from_half(half_of(scale));
}

template <int N, int MOST, int MOST_SCALE>
inline void k_affine(Scaled<N>& out, const Some& some) {
  constexpr int GROUPS = SUPER / N, PARTS = GROUPS / WIDE;
  constexpr float top = static_cast<float>(MOST);
  float scale[GROUPS], minimum[GROUPS], weight[GROUPS];
  Eight x[PARTS][N], w[N];
  Fit<Eight> fits[PARTS];
  const float square = some.importance ? squares(some.x, SUPER) * (N == 16 ? 1.0f : 2.0f) / SUPER : 0.0f;
  for (int part = 0; part < PARTS; ++part) {
    columns<N>(x[part], some.x + part * WIDE * N, WIDE);
    if (some.importance) {
      weigh<N>(w, x[part], some.importance + part * WIDE * N, WIDE, square);
      fits[part] = affine_fit<N, false>(x[part], w, MOST, -0.9f, 0.05f, 36);
    } else {
      Eight around = {};
      if (MOST != 3) {
        for (int i = 0; i < N; ++i) around = around + x[part][i] * x[part][i];
        around = root(around / (Eight{} + static_cast<float>(N)));
      }
      for (int i = 0; i < N; ++i) w[i] = around + size_of(x[part][i]);
      fits[part] = affine_fit<N, MOST == 3>(x[part], w, MOST, MOST == 15 ? -1.0f : -0.5f, 0.1f, MOST == 15 ? 20 : 15);
    }
    const Eight sum = sum_of<N>(w);
    for (int lane = 0; lane < WIDE; ++lane) {
      const int g = part * WIDE + lane;
      scale[g] = fits[part].scale[lane], minimum[g] = fits[part].minimum[lane], weight[g] = sum[lane];
    }
  }
  if (some.importance) {
    out.d = fitted(out.scales, scale, weight, GROUPS, MOST_SCALE);
    out.e = fitted(out.minima, minimum, weight, GROUPS, MOST_SCALE);
  } else {
    out.d = whole(out.scales, scale, GROUPS, MOST_SCALE), out.e = whole(out.minima, minimum, GROUPS, MOST_SCALE);
  }
  for (int part = 0; part < PARTS; ++part) {
    Eight step, low;
    for (int lane = 0; lane < WIDE; ++lane) {
      step[lane] = out.d * out.scales[part * WIDE + lane], low[lane] = out.e * out.minima[part * WIDE + lane];
    }
    for (int i = 0; i < N; ++i) {
      const Eight code = nearest(between<Eight>((x[part][i] + low) / step, 0.0f, top));
      const Eight chosen = step == Eight{} ? affine_code(fits[part], x[part][i], top) : code;
      for (int lane = 0; lane < WIDE; ++lane)
        out.codes[(part * WIDE + lane) * N + i] = static_cast<uint8_t>(chosen[lane]);
    }
  }
}

struct Q2_K {
  static constexpr int SIZE = 256, BATCH = 1, BYTES = 84;
  static void write(uint8_t* to, const Some& some) {
    Scaled<16> s;
    k_affine<16, 3, 15>(s, some);
    for (int i = 0; i < 16; ++i) to[i] = static_cast<uint8_t>(s.scales[i] | s.minima[i] << 4);
    put_bits<2, 32, 64>(to + 16, s.codes), put_half(to + 80, s.d), put_half(to + 82, s.e);
  }
};
struct Q4_K {
  static constexpr int SIZE = 256, BATCH = 1, BYTES = 144;
  static void write(uint8_t* to, const Some& some) {
    Scaled<32> s;
    k_affine<32, 15, 63>(s, some);
    put_half(to, s.d), put_half(to + 2, s.e), put_six_bits(to + 4, s.scales, s.minima);
    put_bits<4, 32, 128>(to + 16, s.codes);
  }
};
struct Q5_K {
  static constexpr int SIZE = 256, BATCH = 1, BYTES = 176;
  static void write(uint8_t* to, const Some& some) {
    Scaled<32> s;
    k_affine<32, 31, 63>(s, some);
    put_half(to, s.d), put_half(to + 2, s.e), put_six_bits(to + 4, s.scales, s.minima);
    put_bits<1, 32, 32>(to + 16, s.codes, 4), put_bits<4, 32, 128>(to + 48, s.codes);
  }
};

// Codes of a group of 16 by its step; those that its fit has where the step is 0.
template <class Else>
inline void round_sixteen(uint8_t* codes, const Eight* x, Eight step, int most, int first, const Else& otherwise) {
  const float top = static_cast<float>(most);
  for (int i = 0; i < 16; ++i) {
    const Eight code = nearest(between<Eight>(x[i] / step, -top, top - 1.0f));
    const Eight chosen = step == Eight{} ? otherwise(i) : code;
    for (int lane = 0; lane < WIDE; ++lane)
      codes[(first + lane) * 16 + i] = static_cast<uint8_t>(static_cast<int>(chosen[lane]) + most);
  }
}

struct Q3_K {
  static constexpr int SIZE = 256, BATCH = 1, BYTES = 110;
  static void write(uint8_t* to, const Some& some) {
    Eight x[2][16], w[16], fitted_codes[2][16];
    float scale[16], weight[16];
    const float square = some.importance ? squares(some.x, SUPER) * 2.0f / SUPER : 0.0f;
    for (int part = 0; part < 2; ++part) {
      columns<16>(x[part], some.x + 128 * part, WIDE);
      Eight found, sum = {};
      if (some.importance) {
        weigh<16>(w, x[part], some.importance + 128 * part, WIDE, square);
        const Fit<Eight> fit = symmetric_fit(x[part], w, 16, 4);
        for (int i = 0; i < 16; ++i) fitted_codes[part][i] = symmetric_code(fit, x[part][i], 4);
        found = fit.scale, sum = sum_of<16>(w);
      } else {
        found = improved_fit(x[part], fitted_codes[part], 16, 4);
      }
      for (int lane = 0; lane < WIDE; ++lane) scale[8 * part + lane] = found[lane], weight[8 * part + lane] = sum[lane];
    }
    uint8_t codes[SUPER], s[16];
    float whole_scale[16], d;
    if (some.importance) {
      const Fit<float> outer = symmetric_fit(scale, weight, 16, 32);
      for (int g = 0; g < 16; ++g) whole_scale[g] = symmetric_code(outer, scale[g], 32);
      d = outer.scale;
    } else {
      const float peak = largest(scale, 16), factor = peak == 0.0f ? 0.0f : -32.0f / peak;
      for (int g = 0; g < 16; ++g)
        whole_scale[g] = peak == 0.0f ? -32.0f : nearest(between(factor * scale[g], -32.0f, 31.0f));
      d = peak == 0.0f ? 0.0f : 1.0f / factor;
    }
    d = put_half(to + 108, d);
    for (int part = 0; part < 2; ++part) {
      Eight step;
      for (int lane = 0; lane < WIDE; ++lane) step[lane] = d * whole_scale[8 * part + lane];
      round_sixteen(codes, x[part], step, 4, 8 * part, [&](int i) { return fitted_codes[part][i]; });
    }
    for (int g = 0; g < 16; ++g) s[g] = static_cast<uint8_t>(static_cast<int>(whole_scale[g]) + 32);
    put_bits<1, 32, 32>(to, codes, 2), put_bits<2, 32, 64>(to + 32, codes);
    put_bits<4, 8, 8>(to + 96, s), put_bits<2, 4, 4>(to + 104, s, 4);
  }
};

struct Q6_K {
  static constexpr int SIZE = 256, BATCH = 1, BYTES = 210;
  static void write(uint8_t* to, const Some& some) {
    Eight x[2][16], w[16];
    Fit<Eight> fits[2];
    float scale[16];
    for (int part = 0; part < 2; ++part) {
      columns<16>(x[part], some.x + 128 * part, WIDE);
      if (some.importance)
        columns<16>(w, some.importance + 128 * part, WIDE);
      else
        weigh<16>(w, x[part], nullptr, WIDE, 0.0f);
      fits[part] = symmetric_fit(x[part], w, 16, 32);
      for (int lane = 0; lane < WIDE; ++lane) scale[8 * part + lane] = fits[part].scale[lane];
    }
    const float peak = largest(scale, 16);
    if (size_of(peak) < EMPTY) {
      __builtin_memset(to, 0, BYTES);
      return;
    }
    const float factor = -128.0f / peak, d = put_half(to + 208, 1.0f / factor);
    uint8_t codes[SUPER];
    for (int part = 0; part < 2; ++part) {
      Eight step;
      for (int lane = 0; lane < WIDE; ++lane) {
        const float code = nearest(between(factor * scale[8 * part + lane], -128.0f, 127.0f));
        to[192 + 8 * part + lane] = static_cast<uint8_t>(static_cast<int>(code));
        step[lane] = d * code;
      }
      round_sixteen(codes, x[part], step, 32, 8 * part,
                    [&](int i) { return symmetric_code(fits[part], x[part][i], 32); });
    }
    put_bits<4, 64, 128>(to, codes), put_bits<2, 32, 64>(to + 128, codes, 4);
  }
};

struct Job {
  uint8_t* out;
  const float *rows, *importance;
  int64_t count, inputs, each;  // each: rows of a task
};

template <class Kind>
void quantize_row(uint8_t* out, const float* x, const float* importance, int64_t inputs) {
  const float square = importance && Kind::SIZE == 32 ? squares(x, inputs) / static_cast<float>(inputs) : 0.0f;
  const int64_t blocks = inputs / Kind::SIZE;
  for (int64_t at = 0; at < blocks; at += Kind::BATCH) {
    const int count = blocks - at < Kind::BATCH ? static_cast<int>(blocks - at) : Kind::BATCH;
    const float* own = importance ? importance + at * Kind::SIZE : nullptr;
    Kind::write(out + at * Kind::BYTES, {x + at * Kind::SIZE, own, square, count});
  }
}

template <class Kind>
void quantize_some(void* context, int64_t task, int) {
  const Job& job = *static_cast<const Job*>(context);
  const int64_t row_bytes = job.inputs / Kind::SIZE * Kind::BYTES, end = (task + 1) * job.each;
  for (int64_t row = task * job.each; row < (end < job.count ? end : job.count); ++row)
    quantize_row<Kind>(job.out + row * row_bytes, job.rows + row * job.inputs, job.importance, job.inputs);
}

template <class Kind>
void run(Job& job, int threads) {
  job.each = 1 + 16384 / (job.inputs + 1);
  const int64_t tasks = (job.count + job.each - 1) / job.each;
  if (threads > 1) return llmx_pool::each(quantize_some<Kind>, &job, tasks, threads);
  // Callers with threads of their own don't wait for the pool, whose scratch memory isn't used here.
  for (int64_t task = 0; task < tasks; ++task) quantize_some<Kind>(&job, task, 0);
}

}  // namespace

// kind: in the order of kernels/cpu/quantize.py's KINDS.
void quantize_blocks(uint8_t* out, const float* rows, const float* importance, int64_t count, int64_t inputs,
                     int32_t kind, int32_t threads) {
  Job job{out, rows, importance, count, inputs, 1};
  constexpr void (*RUN[])(Job&, int) = {run<Q_0<8>>, run<Q_1<15>>, run<Q_0<16>>, run<Q_1<31>>, run<Q8_0>, run<IQ4_NL>,
                                        run<Q2_K>, run<Q3_K>, run<Q4_K>, run<Q5_K>, run<Q6_K>, run<IQ4_XS>};
  RUN[kind](job, threads);
}

}  // namespace LLMX_ISA
