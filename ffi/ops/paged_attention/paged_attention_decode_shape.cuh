// Sizes of the decode kernel for one cache format and head size.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_SHAPE_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_SHAPE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "ffi/ops/paged_attention/paged_attention_decode_args.h"

namespace xla_gpu::decode {

// What the cache holds. Products are computed in bf16 for kBF16 and in float16 for all others; float8 is exact in it.
enum class Format { kF16, kBF16, kE4M3, kE5M2 };

// For a cache of format `kFormat` and head_dim up to kDim.
template <Format kFormat_, int kDim_>
struct Shape {
  static constexpr Format kFormat = kFormat_;
  static constexpr int kDim = kDim_;
  static constexpr bool kFloat8 = kFormat == Format::kE4M3 || kFormat == Format::kE5M2;
  static constexpr __nv_fp8_interpretation_t kFloat8Kind = kFormat == Format::kE4M3 ? __NV_E4M3 : __NV_E5M2;
  using Operand = std::conditional_t<kFormat == Format::kBF16, __nv_bfloat16, __half>;

  static constexpr int kWarps = 4;                          // of a block; each computes a strand
  static constexpr int kBlocksPerSm = kDim <= 128 ? 2 : 1;  // that registers and shared memory allow
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStrands = kTeam * kWarps;  // of a unit, at most

  static constexpr int kElementBytes = kFloat8 ? 1 : 2;
  static constexpr int kRowBytes = kDim * kElementBytes;
  static constexpr int kTile = kFloat8 ? 32 : 16;       // keys of a warp's tile
  static constexpr int kTileBytes = kTile * kRowBytes;  // of K, and again of V
  static constexpr int kWarpStageBytes = 2 * kTileBytes;
  static constexpr int kStageBytes = kWarps * kWarpStageBytes;
  static constexpr int kMaxStages = kDim <= 64 ? 6 : kDim <= 128 ? 3 : 4;
  static constexpr int kSteps = kDim / 16;                // of the scores' sum over head_dim
  static constexpr bool kQueryInRegisters = kDim <= 128;  // else in shared memory: no room beside the sums

  // A tile is stored in slices of 128 or 64 bytes of all its rows, as the copy engine writes them.
  static constexpr int kSliceRowBytes = kRowBytes % 128 == 0 ? 128 : 64;
  static constexpr int kSlices = kRowBytes / kSliceRowBytes;
  static constexpr int kSliceBytes = kTile * kSliceRowBytes;

  // Byte of 16-byte chunk `chunk` of row `row` of a tile. Chunks of a slice's row change places so that the same chunk
  // of eight consecutive rows lies in eight different groups of banks.
  __device__ static uint32_t At(int row, int chunk) {
    constexpr int kChunks = kSliceRowBytes / 16;
    const int swap = kSliceRowBytes == 128 ? row & 7 : row >> 1 & 3;
    return chunk / kChunks * kSliceBytes + row * kSliceRowBytes + ((chunk % kChunks ^ swap) << 4);
  }
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_SHAPE_CUH_
