// AttendTile for x86-64 processors with AVX-512; the build compiles this file with its flags.
#if defined(__x86_64__)
#define XLA_GPU_SIMD_NAMESPACE simd_avx512
#include "ffi/ops/paged_attention/cpu/tile_impl.h"
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || !defined(__AVX512VL__)
#error "compile this file with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c"
#endif
#endif
