// The sizes of the split-KV kernel for one cache format, head size and number of query rows.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_TRAITS_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_TRAITS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "ffi/ops/paged_attention/decode/cta.cuh"
#include "ffi/ops/paged_attention/decode/params.h"

namespace xla_gpu::decode {

// A thread of a CTA.
struct Thread {
  int lane;
  int warp;

  // Opaque: the compiler does not know that the value never changes, so it computes nothing that follows from it before
  // this place, where registers are short.
  __device__ static Thread Opaque(int thread) {
    auto index = static_cast<unsigned>(thread);
    asm volatile("" : "+r"(index));
    return {static_cast<int>(index % 32), static_cast<int>(index / 32)};
  }
};

// The dtype of the cache. kBF16 multiplies in bfloat16. All others multiply in float16, which holds float8 exactly.
enum class CacheFormat { kF16, kBF16, kE4M3, kE5M2 };

// Whether an architecture, given as __CUDA_ARCH__, takes the kernels with more stages: SMs of sm_90 and sm_100 have
// 228 KiB of shared memory, SMs before them 164 or 100, and those of sm_120 100.
__host__ __device__ constexpr bool HasLargeSharedMemory(int architecture) {
  return architecture >= 900 && architecture < 1200;
}

// kHeadDim: the largest head_dim. kRowTiles: of 8 query rows. kNarrowCopies: cache rows are aligned to 8 bytes only, so
// that 16 bytes are two copies. kLargeSharedMemory: two CTAs of more than 99 KiB fit on an SM (HasLargeSharedMemory);
// it sets the number of stages, and changes no result.
template <CacheFormat kFormat_, int kHeadDim_, int kRowTiles_, bool kNarrowCopies_, bool kLargeSharedMemory_>
struct KernelTraits {
  static constexpr CacheFormat kFormat = kFormat_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRowTiles = kRowTiles_;  // n8 tiles of the matrix products
  static constexpr int kRowsLog2 = kRowTiles == 4 ? 5 : kRowTiles == 2 ? 4 : 3;
  static constexpr int kRows = 8 * kRowTiles;  // query rows of a work tile
  static constexpr bool kNarrowCopies = kNarrowCopies_;
  static constexpr bool kLargeSharedMemory = kLargeSharedMemory_;
  static constexpr bool kFloat8 = kFormat == CacheFormat::kE4M3 || kFormat == CacheFormat::kE5M2;
  static constexpr __nv_fp8_interpretation_t kFloat8Kind = kFormat == CacheFormat::kE4M3 ? __NV_E4M3 : __NV_E5M2;
  using Operand = std::conditional_t<kFormat == CacheFormat::kBF16, __nv_bfloat16, __half>;

  using Cta = WholeCta;
  static constexpr bool kWide = false;               // see WideKernelTraits
  static constexpr bool kDependent = false;          // see DependentKernelTraits
  static constexpr bool kWholeTiles = false;         // see WholeTilesTraits
  static constexpr bool kTreeMask = kRowTiles == 4;  // of a half of a wide work tile
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;

  // A KV block is what a CTA consumes in one iteration: one KV tile for each warp.
  static constexpr int kElementBytes = kFloat8 ? 1 : 2;
  static constexpr int kRowBytes = kHeadDim * kElementBytes;
  static constexpr int kKeyTiles = kRowBytes <= 128 ? 2 : 1;  // m16 tiles of a KV tile
  static constexpr int kTileKeys = 16 * kKeyTiles;
  static constexpr int kBlockKeys = kWarps * kTileKeys;
  static constexpr int kBlockKeysLog2 = kKeyTiles == 2 ? 7 : 6;
  static_assert(kRows == 1 << kRowsLog2 && kBlockKeys == 1 << kBlockKeysLog2);

  // A KV tile lies in shared memory row after row, in vectors of 16 bytes. The vectors within 128 bytes are permuted by
  // XOR with the row's number: the eight rows of one column that ldmatrix reads at once then hit different banks.
  static constexpr int kRowVectors = kRowBytes / 16;
  static constexpr int kTileBytes = kTileKeys * kRowBytes;  // of K, and again of V
  static constexpr int kSwizzleBytes = kRowBytes < 128 ? kRowBytes : 128;
  // What the vector numbers of row `row` are XORed with.
  __host__ __device__ static constexpr int Swizzle(int row) {
    return kRowBytes < 128 ? row / (128 / kRowBytes) % kRowVectors : row % 8;
  }
  // A power of two of lanes copies a row, and a warp several rows at a time.
  static constexpr int kCopyLanes = kRowVectors == 24 ? 32 : kRowVectors;
  static constexpr int kCopyRows = 32 / kCopyLanes;

  // Stages of a warp's pipeline, of a K and a V tile each. With a single one, a second barrier ends each iteration.
  static constexpr int kStageBytes = 2 * kTileBytes;
  static constexpr int kStages = kHeadDim == 256 && !kFloat8                       ? (kLargeSharedMemory ? 3 : 1)
                                 : kLargeSharedMemory && kKeyTiles * kRowTiles < 4 ? 24576 / kStageBytes
                                 : kStageBytes > 8192                              ? 1
                                                                                   : 16384 / kStageBytes;

  // Each warp computes the scores of its own KV tile, and its own columns of the output over the whole KV block.
  static constexpr int kColumnTiles = kHeadDim / 16 / kWarps;  // m16 tiles of columns
  static constexpr int kQkSteps = kHeadDim / 16;               // k16 steps of Q * K^T
};

// The split-KV kernel behind one of the same call (LaunchOrder::kDependent): it waits for that one when it has planned.
template <CacheFormat kFormat_, int kHeadDim_, int kRowTiles_>
struct DependentKernelTraits : KernelTraits<kFormat_, kHeadDim_, kRowTiles_, false, true> {
  static constexpr bool kDependent = true;
};

// Where a warpgroup of another kernel takes whole work tiles (whole_tiles.cuh).
template <CacheFormat kFormat_, int kHeadDim_, bool kLargeSharedMemory_>
struct WholeTilesTraits : KernelTraits<kFormat_, kHeadDim_, 1, false, kLargeSharedMemory_> {
  using Cta = WarpgroupCta;
  static constexpr bool kWholeTiles = true;
};

// The split-KV work of the prefill path's kernel, by each of its warpgroups.
template <CacheFormat kFormat_, int kHeadDim_>
struct WarpgroupKernelTraits : KernelTraits<kFormat_, kHeadDim_, 1, false, true> {
  using Cta = WarpgroupCta;
};

// The split-KV kernel for work tiles of 64 query rows (wide_mainloop.cuh): two halves of the rows share the KV blocks
// of a CTA. Each half is four warps, whose products are those of KernelTraits with 32 rows. For GPUs with large shared
// memory alone.
template <CacheFormat kFormat_, int kHeadDim_>
struct WideKernelTraits : KernelTraits<kFormat_, kHeadDim_, 4, false, true> {
  using Half = KernelTraits<kFormat_, kHeadDim_, 4, false, true>;
  static constexpr bool kWide = true;
  static constexpr int kHalves = 2;
  static constexpr int kRows = Half::kRows * kHalves;
  static constexpr int kRowsLog2 = Half::kRowsLog2 + 1;
  static constexpr int kWarps = Half::kWarps * kHalves;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlockTiles = Half::kBlockKeys / 16;               // m16 tiles of a KV block
  static constexpr int kBlockBytes = Half::kBlockKeys * Half::kRowBytes;  // of K, and again of V
  static constexpr int kStages = 5;                                       // of a KV block each

  // The part of a KV block that a warp copies.
  struct Copy : Half {
    static constexpr int kTileKeys = Half::kBlockKeys / kWarps;
    static constexpr int kTileBytes = kTileKeys * Half::kRowBytes;
  };
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_TRAITS_CUH_
