// Sizes of the decode kernels for one cache format, head size and number of query rows.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_SHAPE_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_SHAPE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "ffi/ops/paged_attention/paged_attention_decode_args.h"

namespace xla_gpu::decode {

// What the cache holds. Products are computed in bf16 for kBF16 and in float16 for all others; float8 is exact in it.
enum class Format { kF16, kBF16, kE4M3, kE5M2 };

// For a cache of format `kFormat`, head_dim up to kDim, and kRowTiles times eight (query, head) rows at a time.
// kNarrow: rows of the cache may start at any multiple of 8 bytes, so that 16 of them are fetched in two parts.
template <Format kFormat_, int kDim_, int kRowTiles_, bool kNarrow_ = false>
struct Shape {
  static constexpr Format kFormat = kFormat_;
  static constexpr int kDim = kDim_;
  static constexpr int kRowTiles = kRowTiles_;  // columns of 8 in the products
  static constexpr int kRows = 8 * kRowTiles;
  static constexpr bool kNarrow = kNarrow_;
  static constexpr bool kFloat8 = kFormat == Format::kE4M3 || kFormat == Format::kE5M2;
  static constexpr __nv_fp8_interpretation_t kFloat8Kind = kFormat == Format::kE4M3 ? __NV_E4M3 : __NV_E5M2;
  using Operand = std::conditional_t<kFormat == Format::kBF16, __nv_bfloat16, __half>;

  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocksPerSm = DecodeBlocksPerSm(kDim, kRowTiles);

  static constexpr int kElementBytes = kFloat8 ? 1 : 2;
  static constexpr int kRowBytes = kDim * kElementBytes;
  static constexpr int kKeyTiles = kRowBytes <= 128 ? 2 : 1;  // matrix tiles of 16 keys in a warp's step
  static constexpr int kTileKeys = 16 * kKeyTiles;
  static constexpr int kBlockKeys =
      kWarps * kTileKeys;  // keys of a block's step: the unit in which chunks are measured

  // A lane's part of a key is kKeyChunks times 16 bytes, of a value kValueChunks times kValueBytes. Only the last
  // 64 columns (float8: up to 128) of a row may lie past head_dim; offsets before them are constants.
  static constexpr int kKeyChunks = kRowBytes / 64;
  static constexpr int kValueBytes = kRowBytes / 8 < 16 ? kRowBytes / 8 : 16;
  static constexpr int kValueChunks = kRowBytes / (8 * kValueBytes);
  static constexpr int kValueColumns = kValueBytes / kElementBytes;  // neighbouring columns of a lane
  static constexpr int kFixedBytes = (kDim == 64               ? 0
                                      : kDim == 128            ? 64
                                      : kDim == 192 || kFloat8 ? 128
                                                               : 192) *
                                     kElementBytes;
  static constexpr int kFixedKeyChunks = kFixedBytes / 64;
  static constexpr int kFixedValueChunks = kFixedBytes / (8 * kValueBytes);
  static constexpr int kOutTiles = kDim / 16;

  static constexpr int kSteps = kDim / 16;         // of the scores' sum over columns
  static constexpr int kQueryVectors = kDim / 32;  // of 16 bytes, that a lane loads of a query row

  // Keys and values of a tile are in flight together where a lane has registers for both; if not, one after the other.
  static constexpr int kTileRegisters = kKeyTiles * 2 * kKeyChunks * 4;
  static constexpr bool kOverlap = 2 * kTileRegisters + kRowTiles * kDim / 4 <= 176;
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_SHAPE_CUH_
