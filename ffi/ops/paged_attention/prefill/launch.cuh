// Grids and launches of the prefill kernels.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_LAUNCH_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_LAUNCH_CUH_

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "ffi/base/cuda_status.h"
#include "ffi/ops/paged_attention/decode/decode.h"
#include "ffi/ops/paged_attention/prefill/combine.cuh"
#include "ffi/ops/paged_attention/prefill/prefill.h"
#include "ffi/ops/paged_attention/prefill/sm80_mma.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_cp_async.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma.cuh"
#include "ffi/ops/paged_attention/prefill/split_kv.h"

namespace xla_gpu::prefill {

// A block for each tile that there can be, from shapes alone, and one more for the rows that belong to no sequence. The
// grid is that large rather than as large as the GPU: the hardware hands out blocks as others end, which is the even
// load that a counter would give, and needs no memory that somebody has to reset.
inline unsigned SingleTileCtas(const PagedAttentionParams& params, int rows_per_tile) {
  const int64_t group = params.num_heads / params.num_kv_heads;
  const int64_t sequences = std::min(params.max_seqs, params.num_tokens / (kMaxDecodeRows + 1));
  // Only the last tile of a sequence may be partly filled.
  const int64_t tiles = params.num_tokens * group / rows_per_tile + sequences;
  return static_cast<unsigned>(tiles * params.num_kv_heads + 1);
}

// How a prefill kernel is launched whose blocks get ready while the last ones of the kernel before end, if that allows
// it.
class PrefillLaunch {
 public:
  PrefillLaunch(dim3 blocks, int threads, int shared_bytes, Stream stream) {
    attribute_.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute_.val.programmaticStreamSerializationAllowed = 1;
    config_.gridDim = blocks;
    config_.blockDim = dim3(static_cast<unsigned>(threads));
    config_.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config_.stream = stream;
    config_.attrs = &attribute_;
  }
  PrefillLaunch(const PrefillLaunch&) = delete;
  PrefillLaunch& operator=(const PrefillLaunch&) = delete;

  template <typename... Params>
  Status operator()(bool early, void (*kernel)(Params...), const Params&... params) {
    config_.numAttrs = early ? 1 : 0;
    XLA_GPU_RETURN_IF_CUDA(cudaLaunchKernelEx(&config_, kernel, params...));
    return Status::Ok();
  }

 private:
  cudaLaunchAttribute attribute_ = {};
  cudaLaunchConfig_t config_ = {};
};

template <typename Kernel>
Status LaunchPrefillKernel(void (*kernel)(PagedAttentionParams), const PagedAttentionParams& params, Stream stream) {
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::kSharedBytes));
  PrefillLaunch launch(dim3(SingleTileCtas(params, Kernel::kRows)), Kernel::kThreads, Kernel::kSharedBytes, stream);
  cudaFuncAttributes code;
  XLA_GPU_RETURN_IF_CUDA(cudaFuncGetAttributes(&code, kernel));
  return launch(DecodeComesFirst(params) && code.ptxVersion >= 90, kernel, params);
}

template <typename Kernel>
Status LaunchPrefillMma(const PagedAttentionParams& params, Stream stream) {
  return LaunchPrefillKernel<Kernel>(PrefillMmaKernel<Kernel>, params, stream);
}

// Whether the current device has code for sm_90a of this kernel: for other targets it is empty and of one warp.
template <typename Kernel, typename Params>
Status HasSm90Code(void (*kernel)(Params), bool* has) {
  cudaFuncAttributes attributes;
  XLA_GPU_RETURN_IF_CUDA(cudaFuncGetAttributes(&attributes, kernel));
  *has = attributes.maxThreadsPerBlock >= Kernel::kThreads;
  return Status::Ok();
}

template <typename Kernel>
Status TryLaunchPrefillCpAsync(const PagedAttentionParams& params, Stream stream, bool* launched) {
  if (Status status = HasSm90Code<Kernel>(PrefillCpAsyncKernel<Kernel>, launched); !status.ok() || !*launched) {
    return status;
  }
  return LaunchPrefillKernel<Kernel>(PrefillCpAsyncKernel<Kernel>, params, stream);
}

// `columns`: of a row of the cache, from the first kv head's on.
inline bool EncodeCache(const PagedAttentionParams& params, const void* cache, int box_rows, CUtensorMap* map) {
  const auto unsign = [](int64_t x) { return static_cast<uint64_t>(x); };
  return EncodePagedTensor(
      {cache, unsign((params.num_kv_heads - 1) * params.head_stride + params.head_dim), unsign(params.page_size),
       unsign(params.num_pages), unsign(params.slot_stride), unsign(params.page_stride),
       static_cast<uint32_t>(box_rows), static_cast<uint32_t>(params.head_dim), params.cache_dtype == DType::kBF16},
      map);
}

inline Status SmCount(unsigned* count) {
  int device, processors;
  XLA_GPU_RETURN_IF_CUDA(cudaGetDevice(&device));
  XLA_GPU_RETURN_IF_CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  *count = static_cast<unsigned>(processors);
  return Status::Ok();
}

template <typename Kernel>
Status TryLaunchPrefillTma(const PagedAttentionParams& params, Stream stream, bool* launched) {
  TmaParams tma{};
  tma.attention = params;
  tma.box_rows = static_cast<int>(std::gcd(params.page_size, int64_t{Kernel::kTileKeys}));
  tma.head_atoms = static_cast<int>(params.head_stride / 64);
  // A box is whole groups of eight rows and slabs of 64 columns, as wgmma reads them.
  *launched = tma.box_rows % 8 == 0 && params.head_dim == Kernel::kHeadDim && params.head_stride % 64 == 0 &&
              params.page_size >> 31 == 0;
  if (!*launched) return Status::Ok();
  const auto kernel = PrefillTmaKernel<Kernel>;
  if (Status status = HasSm90Code<Kernel>(kernel, launched); !status.ok() || !*launched) return status;
  *launched = EncodeCache(params, params.k_cache, tma.box_rows, &tma.k_map) &&
              EncodeCache(params, params.v_cache, tma.box_rows, &tma.v_map);
  if (!*launched) return Status::Ok();
  const auto group = static_cast<unsigned>(params.num_heads / params.num_kv_heads);
  tma.group = FastDivisor::Make(group);
  tma.kv_heads = FastDivisor::Make(params.num_kv_heads);
  tma.page = FastDivisor::Make(params.page_size);
  tma.query_by_tma =
      64 % group == 0 && EncodeQueryTensor(params.query, params.num_tokens, params.num_heads, params.head_dim,
                                           64 / group, group, params.dtype == DType::kBF16, &tma.q_map);
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::kSharedBytes));
  unsigned processors = 0;
  if (Status status = SmCount(&processors); !status.ok()) return status;
  constexpr int64_t kSequences = Kernel::Scheduler::kSequences;
  const SplitAccumulatorLayout layout = SplitAccumulatorLayout::Of(params);
  static_assert(Kernel::kTileKeys == SplitKvPolicy::TileKeys(Kernel::kHeadDim));
  static_assert(Kernel::kRows <= SplitAccumulatorLayout::kMaxTileRows &&
                Kernel::Scheduler::kSequences == SplitAccumulatorLayout::SequencesPerGridRow(Kernel::kHeadDim));
  processors = std::min(processors, static_cast<unsigned>(SplitAccumulatorLayout::kMaxCtas));
  tma.split_kv = {layout.enabled,
                  layout.max_cross_cta,
                  static_cast<int>(params.sliding_window >> 31 != 0 ? 0 : params.sliding_window),
                  static_cast<int>(group),
                  static_cast<int>(params.num_kv_heads),
                  Kernel::kTileKeys};
  tma.accumulators.o_accum = reinterpret_cast<float*>(static_cast<char*>(params.scratch) + PrefillScratchBegin(params));
  tma.accumulators.max_sum_accum =
      reinterpret_cast<float2*>(tma.accumulators.o_accum + layout.total_rows * params.head_dim);
  tma.accumulators.rows_per_split = layout.rows_per_split;
  tma.accumulators.cta_rows_begin = layout.max_cross_cta * layout.rows_per_split;
  // Parts of keys are as many tasks more.
  const dim3 grid(layout.max_cross_cta > 0 ? processors : std::min(SingleTileCtas(params, Kernel::kRows), processors),
                  static_cast<unsigned>(std::max<int64_t>(1, (params.max_seqs + kSequences - 1) / kSequences)));
  PrefillLaunch launch(grid, Kernel::kThreads, Kernel::kSharedBytes, stream);
  if (Status status = launch(true, kernel, tma); !status.ok() || layout.max_cross_cta == 0) return status;
  const auto combine_kernel = PrefillCombineKernel<typename Kernel::Element, Kernel::kHeadDim>;
  // As the kernels before and behind: an SM that is to divide its memory otherwise has to be idle first.
  XLA_GPU_RETURN_IF_CUDA(cudaFuncSetAttribute(combine_kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                              cudaSharedmemCarveoutMaxShared));
  PrefillLaunch merge(dim3(std::min(static_cast<unsigned>((layout.rows_per_split + 3) / 4), 8 * processors)),
                      kCombineThreads, 0, stream);
  return merge(true, combine_kernel, params, tma.split_kv, tma.accumulators);
}

// The kernel for pages of whole groups of eight slots, by head_dim.
template <typename T, int kDim>
Status TryLaunchPrefillPages(const PagedAttentionParams& params, Stream stream, bool* launched) {
  if constexpr (kDim == 64) {
    return TryLaunchPrefillTma<TmaKernelImpl<T, 64, 128, 3, true, 2, 4, 4>>(params, stream, launched);
  } else if constexpr (kDim == 128) {
    using Large = TmaKernelImpl<T, 128, 112, 3, false, 1, 3, 3, 512>;
    using Medium = TmaKernelImpl<T, 128, 112, 2, true, 1, 3, 3, 512>;
    using Small = TmaKernelImpl<T, 128, 112, 1, true, 1, 3, 3, 512>;
    // Smaller tiles, of which there are more, where large ones would leave parts of the GPU idle. Shapes of a batch
    // decide, so all must give the same bits: tiles of keys are the same, and so is what is done with each row.
    unsigned processors = 0;
    if (Status status = SmCount(&processors); !status.ok()) return status;
    const int64_t rows = params.num_tokens * (params.num_heads / params.num_kv_heads);
    const int64_t tiles = (rows + Large::kRows - 1) / Large::kRows * params.num_kv_heads;
    // Long contexts want larger tiles, which read their keys less often; unless there are so few rows that several
    // tiles of a sequence read them at the same time.
    const int64_t cache_bytes =
        4 * params.max_seqs * params.pages_per_seq * params.page_size * params.num_kv_heads * params.head_dim;
    if (rows <= 512 || (4 * tiles <= 3 * processors && cache_bytes <= int64_t{64} << 20)) {
      return TryLaunchPrefillTma<Small>(params, stream, launched);
    }
    const int64_t rounds = params.pages_per_seq * params.page_size <= 8192 ? 3 : 2;
    if (tiles < rounds * processors) return TryLaunchPrefillTma<Medium>(params, stream, launched);
    return TryLaunchPrefillTma<Large>(params, stream, launched);
  } else {
    return TryLaunchPrefillTma<TmaKernelImpl<T, 256, 80, 2, true, 1, 2, 2, 128, 64>>(params, stream, launched);
  }
}

template <typename T, int kDim>
Status TryLaunchPrefillSm90(const PagedAttentionParams& params, Stream stream, bool* launched) {
  if (Status status = TryLaunchPrefillPages<T, kDim>(params, stream, launched); !status.ok() || *launched) {
    return status;
  }
  constexpr int kKeys = kDim == 256 ? 64 : 128;
  using Slots = CpAsyncKernelImpl<T, kDim, kKeys, kDim == 64 ? 3 : 2, kDim == 64 ? 4 : 3>;
  return TryLaunchPrefillCpAsync<Slots>(params, stream, launched);
}

template <typename T>
Status TryLaunchPrefillSm90(const PagedAttentionParams& params, Stream stream, bool* launched) {
  *launched = false;
  if (IsFloat8(params.cache_dtype)) return Status::Ok();
  if (params.head_dim <= 64) return TryLaunchPrefillSm90<T, 64>(params, stream, launched);
  if (params.head_dim <= 128) return TryLaunchPrefillSm90<T, 128>(params, stream, launched);
  return TryLaunchPrefillSm90<T, 256>(params, stream, launched);
}

// Tiles by head_dim. At most 99 KiB of shared memory, the limit of a block on sm_86 and sm_89; two blocks on an SM of
// sm_80 and sm_90.
template <typename T>
Status LaunchPrefill16Bit(const PagedAttentionParams& params, Stream stream) {
  bool launched = false;
  if (Status status = TryLaunchPrefillSm90<T>(params, stream, &launched); !status.ok() || launched) return status;
  if (IsFloat8(params.cache_dtype)) {
    if (params.head_dim <= 64) return LaunchPrefillMma<MmaKernelImpl<T, 64, 32, 64, 1, true>>(params, stream);
    if (params.head_dim <= 128) return LaunchPrefillMma<MmaKernelImpl<T, 128, 32, 64, 1, true>>(params, stream);
    return LaunchPrefillMma<MmaKernelImpl<T, 256, 16, 32, 1, true>>(params, stream);
  }
  if (params.head_dim <= 64) return LaunchPrefillMma<MmaKernelImpl<T, 64, 32, 64, 2, false>>(params, stream);
  if (params.head_dim <= 128) return LaunchPrefillMma<MmaKernelImpl<T, 128, 32, 64, 2, false>>(params, stream);
  return LaunchPrefillMma<MmaKernelImpl<T, 256, 16, 64, 1, false>>(params, stream);
}

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_LAUNCH_CUH_
