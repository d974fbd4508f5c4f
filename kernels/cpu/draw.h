// The numbers behind a draw, which kernels/reference/sample.py defines, bit for bit on any instruction set.
#pragma once
#include "philox.h"
#include "simd.h"

namespace LLMX_ISA {
namespace {

constexpr int LANES = 16;

// Is any lane of a above b's, or no number?
#if defined(__AVX512F__)
LLMX_INLINE bool any_over(F a, F b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_NLE_UQ) != 0; }
#elif defined(__AVX2__)
LLMX_INLINE bool any_over(F x, F y) {
  const __m256 a = _mm256_cmp_ps(x.a, y.a, _CMP_NLE_UQ), b = _mm256_cmp_ps(x.b, y.b, _CMP_NLE_UQ);
  return _mm256_movemask_ps(_mm256_or_ps(a, b)) != 0;
}
#else
LLMX_INLINE bool any_over(F a, F b) {
  const auto over = ~(a.v <= b.v);
  int32_t lanes[LANES], any = 0;
  __builtin_memcpy(lanes, &over, sizeof lanes);
  for (int i = 0; i < LANES; ++i) any |= lanes[i];
  return any != 0;
}
#endif

// e^(x - largest) in units of 2^-34, whole.
LLMX_INLINE void weigh(F x, float largest, double* to) {
  const F below = most(sub(x, all(largest)), all(-30.0f)), n = nearest(mul(below, all(1.44269504f)));
  F r = sub(below, mul(n, all(0.693359375f)));
  r = sub(r, mul(n, all(-2.12194440e-4f)));
  F p = all(1.9875691500e-4f);
  p = add(mul(p, r), all(1.3981999507e-3f));
  p = add(mul(p, r), all(8.3334519073e-3f));
  p = add(mul(p, r), all(4.1665795894e-2f));
  p = add(mul(p, r), all(1.6666665459e-1f));
  p = add(mul(p, r), all(5.0000001201e-1f));
  p = add(add(mul(p, mul(r, r)), r), all(1.0f));
  float e[LANES];
  store(e, mul(p, power_of_two(n)));
  for (int i = 0; i < LANES; ++i) to[i] = (static_cast<double>(e[i]) * 0x1p34 + 0x1.8p52) - 0x1.8p52;
}

inline int64_t order_of(float x) {  // whole numbers that compare as the floats do
  int32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits < 0 ? -static_cast<int64_t>(bits & 0x7FFFFFFF) : bits;
}

inline float with_order(int64_t order) {
  const int32_t bits = order < 0 ? static_cast<int32_t>(-order) | INT32_MIN : static_cast<int32_t>(order);
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

LLMX_INLINE F logarithm(const float* x) {  // of positive normal numbers
  int32_t bits[LANES];
  float n[LANES], m[LANES];
  __builtin_memcpy(bits, x, sizeof bits);
  for (int i = 0; i < LANES; ++i) {
    const int32_t power = (bits[i] - 0x3F3504F3) >> 23;
    n[i] = static_cast<float>(power);
    bits[i] -= power * (1 << 23);
  }
  __builtin_memcpy(m, bits, sizeof m);
  const F f = sub(load(m), all(1.0f)), z = mul(f, f), power = load(n);
  F y = all(7.0376836292e-2f);
  y = add(mul(y, f), all(-1.1514610310e-1f));
  y = add(mul(y, f), all(1.1676998740e-1f));
  y = add(mul(y, f), all(-1.2420140846e-1f));
  y = add(mul(y, f), all(1.4249322787e-1f));
  y = add(mul(y, f), all(-1.6668057665e-1f));
  y = add(mul(y, f), all(2.0000714765e-1f));
  y = add(mul(y, f), all(-2.4999993993e-1f));
  y = add(mul(y, f), all(3.3333331174e-1f));
  y = mul(mul(y, f), z);
  y = add(y, mul(power, all(-2.12194440e-4f)));
  y = sub(y, mul(z, all(0.5f)));
  return add(add(f, y), mul(power, all(0.693359375f)));
}

LLMX_INLINE void gumbel(float* u) {  // of 16 uniform numbers, in their place
  store(u, sub(zero(), logarithm(u)));
  store(u, sub(zero(), logarithm(u)));
}

}  // namespace
}  // namespace LLMX_ISA
