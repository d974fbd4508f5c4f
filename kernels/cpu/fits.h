// Scales and whole numbers for groups of weights, a lane for each group: kernels/reference/fits.py says what they are and
// where they come from, and has the same bits. T is Eight, eight groups at once, or float, one.
#pragma once
#include <stdint.h>

namespace LLMX_ISA {
namespace {

constexpr int WIDE = 8;  // lanes
typedef float Eight __attribute__((vector_size(4 * WIDE)));
typedef int32_t Mask __attribute__((vector_size(4 * WIDE)));

constexpr float EMPTY = 1e-15f;

inline bool any(bool mask) { return mask; }
inline bool any(Mask mask) {
  int32_t found = 0;
  for (int i = 0; i < WIDE; ++i) found |= mask[i];
  return found != 0;
}
template <class T>
inline T nearest(T a) {  // of |a| < 2^22, ties to even
  return (a + 12582912.0f) - 12582912.0f;
}
template <class T>
inline T between(T a, float low, float high) {  // low where a is no number
  const T bottom = T{} + low, top = T{} + high, risen = a > bottom ? a : bottom;
  return risen < top ? risen : top;
}
template <class T>
inline T size_of(T a) {
  return a < T{} ? -a : a;
}
inline float root(float a) { return __builtin_sqrtf(a); }
inline Eight root(Eight a) {
  Eight result = {};
  for (int i = 0; i < WIDE; ++i) result[i] = __builtin_sqrtf(a[i]);
  return result;
}

template <class T>
inline T largest(const T* x, int n) {  // without its sign; the first of equals
  T found = {};
  for (int i = 0; i < n; ++i) found = size_of(x[i]) > size_of(found) ? x[i] : found;
  return found;
}
inline float stepped(float first, float step, int index, int most) {
  return (first + step * static_cast<float>(index)) + static_cast<float>(most);
}

// How far apart the codes of a column are (scale), how far its numbers lie above (minimum), and what codes come from.
template <class T>
struct Fit {
  T scale, minimum, inverse, low;
};
template <class T>
inline T affine_code(const Fit<T>& fit, T x, float most) {
  return nearest(between<T>(fit.inverse * (x - fit.low), 0.0f, most));
}

template <bool ABSOLUTE, class T>
inline T affine_error(const T* x, const T* w, const T* codes, int n, T scale, T low) {
  T sum = {};
  for (int i = 0; i < n; ++i) {
    const T off = scale * codes[i] + low - x[i];
    sum = sum + w[i] * (ABSOLUTE ? size_of(off) : off * off);
  }
  return sum;
}

template <int N, bool ABSOLUTE, class T>
inline Fit<T> affine_fit(const T* x, const T* w, int most, float first, float step, int tries) {
  const T zero = {}, one = zero + 1.0f;
  T lowest = x[0], high = x[0], sum_w = {}, sum_x = {}, codes[N];
  for (int i = 0; i < N; ++i) {
    lowest = x[i] < lowest ? x[i] : lowest, high = x[i] > high ? x[i] : high;
    sum_w = sum_w + w[i], sum_x = sum_x + w[i] * x[i];
  }
  lowest = (lowest < zero ? lowest : zero) + 0.0f;
  const float top = static_cast<float>(most);
  Fit<T> fit = {zero, zero, top / (high - lowest), lowest};
  T scale = one / fit.inverse, low = lowest;
  for (int i = 0; i < N; ++i) codes[i] = affine_code(fit, x[i], top);
  T best = affine_error<ABSOLUTE>(x, w, codes, N, scale, low);
  for (int index = 0; index <= tries; ++index) {
    const Fit<T> tried = {zero, zero, stepped(first, step, index, most) / (high - low), low};
    T sum_l = {}, sum_l2 = {}, sum_xl = {};
    for (int i = 0; i < N; ++i) {
      codes[i] = affine_code(tried, x[i], top);
      const T weighted = w[i] * codes[i];
      sum_l = sum_l + weighted, sum_l2 = sum_l2 + weighted * codes[i], sum_xl = sum_xl + weighted * x[i];
    }
    const T determinant = sum_w * sum_l2 - sum_l * sum_l;
    T new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
    T new_low = (sum_l2 * sum_x - sum_l * sum_xl) / determinant;
    new_scale = new_low > zero ? sum_xl / sum_l2 : new_scale;
    new_low = new_low > zero ? zero : new_low;
    const T error = affine_error<ABSOLUTE>(x, w, codes, N, new_scale, new_low);
    const auto better = (determinant > zero) & (error < best);
    best = better ? error : best, scale = better ? new_scale : scale, low = better ? new_low : low;
    fit.inverse = better ? tried.inverse : fit.inverse, fit.low = better ? tried.low : fit.low;
  }
  const auto flat = high <= lowest;
  fit.scale = flat ? zero : scale, fit.minimum = -(flat ? lowest : low);
  fit.inverse = flat ? zero : fit.inverse, fit.low = flat ? lowest : fit.low;
  return fit;
}

template <class T>
inline T symmetric_code(T inverse, T x, float most) {
  return nearest(between<T>(inverse * x, -most, most - 1.0f));
}

// `inverse` is 0 where all is empty; its codes then are the lowest.
template <class T>
inline Fit<T> symmetric_fit(const T* x, const T* w, int n, int most) {
  const T zero = {}, peak = largest(x, n);
  const float top = static_cast<float>(most);
  T scale = {}, best = {}, inverse = {};
  for (int index = -10; index < 10; ++index) {  // -10: as it is, the first
    const int by = index == -10 ? 0 : (index < 0 ? index : index + 1);
    if (by == 10) break;
    const T tried = (index == -10 ? zero - top : zero - stepped(top, 0.1f, by, 0)) / peak;
    T sum_xl = {}, sum_l2 = {};
    for (int i = 0; i < n; ++i) {
      const T code = symmetric_code(tried, x[i], top);
      sum_xl = sum_xl + w[i] * x[i] * code, sum_l2 = sum_l2 + w[i] * code * code;
    }
    const T found = sum_l2 > zero ? sum_xl / sum_l2 : zero;
    if (index == -10) {
      scale = found, best = found * sum_xl, inverse = tried;
      continue;
    }
    const auto better = (sum_l2 > zero) & (sum_xl * sum_xl > best * sum_l2);
    scale = better ? found : scale, best = better ? found * sum_xl : best, inverse = better ? tried : inverse;
  }
  const auto empty = size_of(peak) < zero + EMPTY;
  return {empty ? zero : scale, zero, empty ? zero : inverse, zero};
}
template <class T>
inline T symmetric_code(const Fit<T>& fit, T x, int most) {
  const float top = static_cast<float>(most);
  return fit.inverse == T{} ? T{} - top : symmetric_code(fit.inverse, x, top);
}

// The sums of a fit, as its codes change one after the other.
template <class T>
struct Sums {
  T xl, l2;
};

// One pass over the codes, each set to its best beside the others. POSITIVE: ggml's make_qp_quants, else make_q3_quants.
template <bool POSITIVE, class T>
inline bool improve(const T* x, const T* w, T* codes, int n, float lowest, float highest, Sums<T>& sums) {
  const T zero = {};
  bool changed = false;
  for (int i = 0; i < n; ++i) {
    const T part = w[i] * x[i], old = codes[i];
    const T rest_xl = sums.xl - part * old, rest_l2 = sums.l2 - w[i] * old * old;
    const T code = nearest(between<T>(x[i] * rest_l2 / rest_xl, lowest, highest));
    const T xl = rest_xl + part * code, l2 = rest_l2 + w[i] * code * code;
    const auto may = (rest_xl > zero) & ((POSITIVE ? rest_l2 : l2) > zero) & (code != old);
    const auto better = may & (xl * xl * sums.l2 > sums.xl * sums.xl * l2);
    codes[i] = better ? code : old, sums.xl = better ? xl : sums.xl, sums.l2 = better ? l2 : sums.l2;
    changed |= any(better);
  }
  return changed;
}

template <class T>
inline Sums<T> sums_of(const T* x, const T* w, const T* codes, int n) {
  Sums<T> sums = {};
  for (int i = 0; i < n; ++i)
    sums.xl = sums.xl + w[i] * x[i] * codes[i], sums.l2 = sums.l2 + w[i] * codes[i] * codes[i];
  return sums;
}

// codes (n) -> the scale.
template <class T>
inline T improved_fit(const T* x, T* codes, int n, int most) {
  const T zero = {}, peak = largest(x, n);
  const float top = static_cast<float>(most);
  T w[16];
  const T inverse = (zero - top) / peak;
  for (int i = 0; i < n; ++i) w[i] = x[i] * x[i], codes[i] = symmetric_code(inverse, x[i], top);
  Sums<T> sums = sums_of(x, w, codes, n);
  for (int pass = 0; pass < 5; ++pass)
    if (!improve<false>(x, w, codes, n, -top, top - 1.0f, sums)) break;
  const auto empty = size_of(peak) < zero + EMPTY;
  for (int i = 0; i < n; ++i) codes[i] = empty ? zero - top : codes[i];
  return (sums.l2 > zero) & ~empty ? sums.xl / sums.l2 : zero;
}

// Of one column: codes (n) -> the scale.
inline float positive_fit(const float* x, const float* w, float* codes, int n, int most) {
  float peak = 0.0f;
  for (int i = 0; i < n; ++i) peak = x[i] > peak ? x[i] : peak, codes[i] = 0.0f;
  if (peak < EMPTY) return 0.0f;
  const float top = static_cast<float>(most);
  float inverse = 0.0f, best = 0.0f;
  for (int index = -5; index <= 4; ++index) {  // -5: as it is, the first
    if (index == 0) continue;
    const float tried = (index == -5 ? top : stepped(0.0f, 0.1f, index, most)) / peak, scale = 1.0f / tried;
    float error = 0.0f;
    for (int i = 0; i < n; ++i) {
      const float off = x[i] - scale * nearest(between(tried * x[i], 0.0f, top));
      error += w[i] * off * off;
    }
    if (index == -5 || error < best) best = error, inverse = tried;
  }
  for (int i = 0; i < n; ++i) codes[i] = nearest(between(inverse * x[i], 0.0f, top));
  Sums<float> sums = sums_of(x, w, codes, n);
  for (int pass = 0; pass < 5; ++pass)
    if (!improve<true>(x, w, codes, n, 0.0f, top, sums)) break;
  return sums.l2 > 0.0f ? sums.xl / sums.l2 : 0.0f;
}

constexpr int8_t LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

template <class T>
inline T nearest_level(T x) {  // of two equally near the higher; the first where x is no number
  T level = T{} + LEVELS[0];
  for (int i = 1; i < 16; ++i) {
    const float middle = 0.5f * static_cast<float>(LEVELS[i - 1] + LEVELS[i]);
    level = x >= T{} + middle ? T{} + static_cast<float>(LEVELS[i]) : level;
  }
  return level;
}
inline uint8_t level_index(float x) {
  int index = 0;
  for (int i = 1; i < 16; ++i) index += x >= 0.5f * static_cast<float>(LEVELS[i - 1] + LEVELS[i]);
  return static_cast<uint8_t>(index);
}

template <class T>
inline T level_fit(const T* x, const T* w, int n) {
  const T zero = {}, one = zero + 1.0f, peak = largest(x, n);
  T scale = {}, best = {};
  for (int index = -8; index <= 7; ++index) {  // -8: the first
    const T tried = index == -8 ? one / (-peak / (zero + LEVELS[0])) : (zero + static_cast<float>(index + LEVELS[0])) / peak;
    T sum_xl = {}, sum_l2 = {};
    for (int i = 0; i < n; ++i) {
      const T level = nearest_level(tried * x[i]);
      sum_xl = sum_xl + w[i] * level * x[i], sum_l2 = sum_l2 + w[i] * level * level;
    }
    const T found = sum_l2 > zero ? sum_xl / sum_l2 : zero;
    if (index == -8) {
      scale = found, best = found * sum_xl;
      continue;
    }
    const auto better = (sum_l2 > zero) & (sum_xl * sum_xl > best * sum_l2);
    scale = better ? found : scale, best = better ? found * sum_xl : best;
  }
  return size_of(peak) < zero + EMPTY ? zero : scale;
}

}  // namespace
}  // namespace LLMX_ISA
