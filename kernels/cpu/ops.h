// The one list of CPU ops: name and C signature. Everything else is generated from it.
// Kernel files see only this header: no C++ library templates there, because a weak template instance compiled
// with AVX-512 may be the copy that the linker keeps for the portable code too (tests/unit/test_native.py checks).
#pragma once
#include <stdint.h>

#define LLMX_OPS(OP, isa)                                                                                \
  OP(isa, philox_uniform, (float* out, const int64_t* seeds, const int64_t* positions, int64_t rows,     \
                           int64_t vocab, uint32_t stream))                                              \
  OP(isa, linear_packed, (float* out, int64_t stride, const float* x, int64_t rows, int64_t inputs,      \
                          const uint8_t* packed, int64_t block_bytes, int64_t outputs, int32_t format,   \
                          const float* bias, int32_t threads))                                           \
  OP(isa, linear_int8, (float* out, int64_t stride, const float* x, uint8_t* rounded, int64_t rows,      \
                        int64_t inputs, const uint8_t* packed, int64_t block_bytes, int64_t outputs,     \
                        int32_t format, const float* bias, int32_t powers, int32_t threads))             \
  OP(isa, unpack_linear, (float* out, const uint8_t* packed, int64_t block_bytes, int64_t inputs,        \
                          int64_t outputs, int32_t format))                                              \
  OP(isa, pack_blocks, (uint8_t* packed, int64_t block_bytes, const uint8_t* rows, int64_t row_bytes,     \
                        int64_t outputs, int64_t inputs, int32_t kind, int32_t layout, int32_t threads)) \
  OP(isa, quantize_blocks, (uint8_t* out, const float* rows, const float* importance, int64_t count,     \
                            int64_t inputs, int32_t kind, int32_t threads))                              \
  OP(isa, round_groups, (float* errors, const float* weight, const float* columns, int64_t rows,         \
                         int64_t inputs, int64_t group, float factor, int32_t top, int32_t symmetric,    \
                         int32_t dtype, int32_t threads))                                                \
  OP(isa, search_groups, (float* scales, float* zeros, const float* weight, const float* metric,         \
                          int32_t quadratic, int64_t rows, int64_t inputs, int64_t group,                \
                          const float* factors, int64_t count, int32_t top, int32_t symmetric,           \
                          int32_t dtype, int32_t threads))                                               \
  OP(isa, gptq_sweep, (const float* left, float* codes, float* errors, const float* factor,              \
                       int64_t stride, int64_t count, int64_t outputs, const float* scales,              \
                       const float* zeros, const int64_t* groups, int32_t top, int32_t threads))         \
  OP(isa, attention, (float* out, const float* q, const uint8_t* keys, const uint8_t* values,            \
                      const uint8_t* scales, int64_t heads, int64_t kv_heads, int64_t dim,               \
                      int64_t block_bytes, int64_t head_bytes, int32_t kind, const int64_t* units,       \
                      int64_t count, const int64_t* prefix, const int64_t* table, int64_t width,         \
                      int64_t size, const int64_t* base, const int64_t* paths, int64_t depth,            \
                      const float* sinks, float scale, float cap, int64_t window, int64_t first,         \
                      int32_t threads))                                                                  \
  OP(isa, rms_norm, (float* out, float* total, const float* x, const float* residual,                    \
                     const float* weight, int64_t rows, int64_t hidden, float eps, int32_t threads))     \
  OP(isa, rope_and_write, (float* q, const float* qkv, int64_t rows, uint8_t* keys, uint8_t* values,     \
                           uint8_t* scales, int64_t heads, int64_t kv_heads, int64_t dim, int64_t half,  \
                           int64_t size, int64_t block_bytes, int64_t head_bytes, int32_t kind,          \
                           const int64_t* slot, const float* cos, const float* sin, int32_t threads))    \
  OP(isa, draw, (int64_t* tokens, float* own, float* values, int64_t* top, int64_t most,                 \
                 const float* logits, int64_t stride, int64_t rows, int64_t vocab, const uint8_t* rules, \
                 const int64_t* index, const int64_t* positions, const int64_t* path, int64_t width,     \
                 const int64_t* masked, int64_t masks, const uint8_t* mask, int32_t threads))            \
  OP(isa, gated, (float* out, const float* x, int64_t rows, int64_t inner, int32_t kind,                 \
                  int32_t threads))                                                                      \
  OP(isa, norm_heads, (float* out, const float* x, int64_t rows, int64_t width, int64_t q_width,         \
                       int64_t k_width, const float* q_weight, int64_t q_unit, const float* k_weight,    \
                       int64_t k_unit, float eps, int32_t threads))                                      \
  OP(isa, add_scaled, (float* out, const float* x, float scale, const float* y, int64_t count,           \
                       int32_t threads))                                                                 \
  OP(isa, copy_rows, (uint8_t* out, int64_t out_stride, const uint8_t* x, int64_t stride, int64_t bytes, \
                      const int64_t* index, int64_t count, int64_t rows, int32_t threads))               \
  OP(isa, widen, (float* out, const uint8_t* x, int64_t count, int32_t kind, int32_t threads))           \
  OP(isa, narrow, (uint8_t* out, const float* x, int64_t count, int32_t threads))                        \
  OP(isa, look_up, (float* out, const uint8_t* stored, int64_t row_bytes, int64_t count,                 \
                    const int64_t* ids, int64_t rows, int64_t hidden, int32_t kind, int32_t threads))

// The same list as in CMakeLists.txt, worst first.
#if defined(__x86_64__) && !defined(LLMX_WITHOUT_AVX2)
#define LLMX_AVX2(X) X(avx2)
#else
#define LLMX_AVX2(X)
#endif
#if defined(__x86_64__) && !defined(LLMX_WITHOUT_AVX512)
#define LLMX_AVX512(X) X(avx512)
#else
#define LLMX_AVX512(X)
#endif
#if defined(__x86_64__) && !defined(LLMX_WITHOUT_AVX512BF16)
#define LLMX_AVX512BF16(X) X(avx512bf16)
#else
#define LLMX_AVX512BF16(X)
#endif
#define LLMX_ISAS(X) X(portable) LLMX_AVX2(X) LLMX_AVX512(X) LLMX_AVX512BF16(X)

#define LLMX_DECLARE(isa, name, args) void name args;
#ifdef LLMX_ISA
namespace LLMX_ISA { LLMX_OPS(LLMX_DECLARE, LLMX_ISA) }
#endif
