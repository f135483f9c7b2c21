// Sizes of the decode kernels for one cache format, head size and number of query rows.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_TRAITS_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_TRAITS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "ffi/ops/paged_attention/decode/params.h"

namespace xla_gpu::decode {

// A thread of a block. Hidden: the compiler does not know that it is always the same, and works out nothing that
// follows from it before that place.
struct Thread {
  int lane;
  int warp;

  __device__ static Thread Hidden() {
    unsigned index = threadIdx.x;
    asm volatile("" : "+r"(index));
    return {static_cast<int>(index % 32), static_cast<int>(index / 32)};
  }
};

// What the cache holds. Products are computed in bf16 for kBF16 and in float16 for all others; float8 is exact in it.
enum class Format { kF16, kBF16, kE4M3, kE5M2 };

// Whether code for an architecture, given as in __CUDA_ARCH__, has the kernels of deep shapes, or those of the others.
// Those of sm_90 and sm_100 have 228 KiB of shared memory, those before 164 or 100, sm_120 has 100.
__host__ __device__ constexpr bool CodeIsDeep(int architecture) { return architecture >= 900 && architecture < 1200; }

// For a cache of format `kFormat`, head_dim up to kDim, and kRowTiles times eight (query, head) rows at a time.
// kNarrow: rows of the cache may start at any multiple of 8 bytes, so that 16 of them are fetched in two parts. kDeep:
// for GPUs where two blocks of more than 99 KiB find room on an SM: see CodeIsDeep. It changes no result.
template <Format kFormat_, int kDim_, int kRowTiles_, bool kNarrow_, bool kDeep_>
struct Shape {
  static constexpr Format kFormat = kFormat_;
  static constexpr int kDim = kDim_;
  static constexpr int kRowTiles = kRowTiles_;  // columns of 8 in the products
  static constexpr int kRows = 8 * kRowTiles;
  static constexpr bool kNarrow = kNarrow_;
  static constexpr bool kDeep = kDeep_;
  static constexpr bool kFloat8 = kFormat == Format::kE4M3 || kFormat == Format::kE5M2;
  static constexpr __nv_fp8_interpretation_t kFloat8Kind = kFormat == Format::kE4M3 ? __NV_E4M3 : __NV_E5M2;
  using Operand = std::conditional_t<kFormat == Format::kBF16, __nv_bfloat16, __half>;

  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;

  static constexpr int kElementBytes = kFloat8 ? 1 : 2;
  static constexpr int kRowBytes = kDim * kElementBytes;
  static constexpr int kKeyTiles = kRowBytes <= 128 ? 2 : 1;  // matrix tiles of 16 keys in a warp's step
  static constexpr int kTileKeys = 16 * kKeyTiles;
  static constexpr int kBlockKeys =
      kWarps * kTileKeys;  // keys of a block's step: the unit in which chunks are measured

  // Tiles wait in shared memory, row after row in chunks of 16 bytes. Chunks of a row trade places with others of its
  // 128 bytes, by the row's number: then eight rows' chunks of one column, which a matrix load takes at once, lie in
  // different banks.
  static constexpr int kRowChunks = kRowBytes / 16;
  static constexpr int kTileBytes = kTileKeys * kRowBytes;  // of keys, and again of values
  static constexpr int kSwizzleBytes = kRowBytes < 128 ? kRowBytes : 128;
  // Of row `row`, what its chunks' numbers are combined with (XOR).
  __host__ __device__ static constexpr int Swizzle(int row) {
    return kRowBytes < 128 ? row / (128 / kRowBytes) % kRowChunks : row % 8;
  }
  // A row is copied by the lanes of a power of two, several rows at a time.
  static constexpr int kRowLanes = kRowChunks == 24 ? 32 : kRowChunks;
  static constexpr int kCopyRows = 32 / kRowLanes;

  // Tiles, each of keys and of values, that a warp has in flight or at hand. With one, steps end with another barrier.
  static constexpr int kStageBytes = 2 * kTileBytes;
  static constexpr int kRing = kDim == 256 && !kFloat8              ? (kDeep ? 3 : 1)
                               : kDeep && kKeyTiles * kRowTiles < 4 ? 24576 / kStageBytes
                               : kStageBytes > 8192                 ? 1
                                                                    : 16384 / kStageBytes;

  // A warp scores the keys of its own tile, and adds up its own columns of the values of all warps' tiles.
  static constexpr int kOwnTiles = kDim / 16 / kWarps;  // matrix tiles of 16 columns
  static constexpr int kSteps = kDim / 16;              // of the scores' sum over columns
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_TRAITS_CUH_
