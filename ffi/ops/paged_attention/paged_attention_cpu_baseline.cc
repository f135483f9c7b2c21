// AttendTile for every processor of the architecture.
#define XLA_GPU_SIMD_NAMESPACE simd_baseline
#include "ffi/ops/paged_attention/paged_attention_cpu_tile_impl.h"
