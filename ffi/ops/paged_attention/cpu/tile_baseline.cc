// AttendTile for every processor of the architecture.
#define XLA_GPU_SIMD_NAMESPACE simd_baseline
#include "ffi/ops/paged_attention/cpu/tile_impl.h"
