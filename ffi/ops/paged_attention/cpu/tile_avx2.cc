// AttendTile for x86-64 processors with AVX2, FMA and F16C; the build compiles this file with those flags.
#if defined(__x86_64__)
#define XLA_GPU_SIMD_NAMESPACE simd_avx2
#include "ffi/ops/paged_attention/cpu/tile_impl.h"
#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "compile this file with -mavx2 -mfma -mf16c"
#endif
#endif
