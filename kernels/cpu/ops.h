// The one list of CPU ops: name and C signature. Everything else is generated from it.
// Kernel files see only this header: no C++ library templates there, because a weak template instance compiled
// with AVX-512 may be the copy that the linker keeps for the portable code too (tests/unit/test_native.py checks).
#pragma once
#include <stdint.h>

#define LLMX_OPS(OP, isa)                                                                                \
  OP(isa, philox_uniform, (float* out, const int64_t* seeds, const int64_t* positions, int64_t rows,     \
                           int64_t vocab, uint32_t stream))

#if defined(__x86_64__)  // the same list as in CMakeLists.txt, worst first
#define LLMX_ISAS(X) X(portable) X(avx2) X(avx512)
#else
#define LLMX_ISAS(X) X(portable)
#endif

#define LLMX_DECLARE(isa, name, args) void name args;
#ifdef LLMX_ISA
namespace LLMX_ISA { LLMX_OPS(LLMX_DECLARE, LLMX_ISA) }
#endif
