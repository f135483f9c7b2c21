// Launches of the prefill kernels.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_LAUNCH_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_LAUNCH_CUH_

#include <cuda_bf16.h>

#include <cstdint>
#include <numeric>
#include <type_traits>

#include "ffi/base/cuda_status.h"
#include "ffi/ops/paged_attention/decode/decode.h"
#include "ffi/ops/paged_attention/prefill/combine.cuh"
#include "ffi/ops/paged_attention/prefill/heuristics.h"
#include "ffi/ops/paged_attention/prefill/launch_config.cuh"
#include "ffi/ops/paged_attention/prefill/prefill.h"
#include "ffi/ops/paged_attention/prefill/sm80_mma.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_cp_async.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma_one_warpgroup.cuh"
#include "ffi/ops/paged_attention/prefill/split_kv.h"

namespace xla_gpu::prefill {

// ---- Single-tile kernels
// `Computation`: what a CTA of `kernel` runs, such as MmaWorkTile.
template <typename Computation>
Status LaunchSingleTile(void (*kernel)(PagedAttentionParams), const PagedAttentionParams& params, Stream stream) {
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Computation::kSharedBytes));
  cudaFuncAttributes code;
  XLA_GPU_RETURN_IF_CUDA(cudaFuncGetAttributes(&code, kernel));
  const dim3 grid(static_cast<unsigned>(SingleTileCtas(params, Computation::kRows)));
  const bool programmatic = DecodeComesFirst(params) && code.ptxVersion >= 90;
  return Launch({grid, Computation::kThreads, Computation::kSharedBytes, programmatic}, stream, kernel, params);
}

template <typename T, int kDim>
Status LaunchMma(const PagedAttentionParams& params, Stream stream) {
  if (IsFloat8(params.cache_dtype)) {
    using Traits = MmaTraits<T, kDim, /*kFloat8Cache=*/true>;
    return LaunchSingleTile<MmaWorkTile<Traits>>(PrefillMmaKernel<Traits>, params, stream);
  }
  using Traits = MmaTraits<T, kDim, /*kFloat8Cache=*/false>;
  return LaunchSingleTile<MmaWorkTile<Traits>>(PrefillMmaKernel<Traits>, params, stream);
}

template <typename T, int kDim>
Status LaunchCpAsync(const PagedAttentionParams& params, Stream stream) {
  using Traits = CpAsyncTraits<T, kDim>;
  return LaunchSingleTile<CpAsyncWorkTile<Traits>>(PrefillCpAsyncKernel<Traits>, params, stream);
}

// ---- The sm_90a kernels
// Whether the current device runs code for sm_90a: kernels that need it are empty, of one warp, in code for other
// targets. All kernels are compiled for the same targets, so one stands for all.
template <typename T, int kDim>
Status SupportsSm90a(bool* supported) {
  using Traits = CpAsyncTraits<T, kDim>;
  cudaFuncAttributes code;
  XLA_GPU_RETURN_IF_CUDA(cudaFuncGetAttributes(&code, PrefillCpAsyncKernel<Traits>));
  *supported = code.maxThreadsPerBlock >= CpAsyncWorkTile<Traits>::kThreads;
  return Status::Ok();
}

// Whether there is a TMA kernel. Only pages that SuitsTma are loaded by TMA.
inline bool SupportsTma(const PagedAttentionParams& shapes) {
  return (shapes.head_dim == 64 || shapes.head_dim == 128 || shapes.head_dim == 256) && shapes.head_stride % 64 == 0 &&
         shapes.page_size >> 31 == 0 && (SuitsTma(shapes.page_size) || !IsFloat8(shapes.cache_dtype));
}

// Everything that the TMA kernel takes. False where the driver has no tensor maps for these tensors.
inline bool MakeTmaParams(const PagedAttentionCall& params, const SplitAccumulatorLayout& layout, TmaParams* tma) {
  const auto unsign = [](int64_t x) { return static_cast<uint64_t>(x); };
  const int tile_keys = SplitKvPolicy::TileKeys(params.head_dim);
  const auto group = static_cast<uint32_t>(params.num_heads / params.num_kv_heads);
  tma->attention = params;
  tma->group = FastDivisor::Make(group);
  tma->kv_heads = FastDivisor::Make(params.num_kv_heads);
  tma->page = FastDivisor::Make(params.page_size);
  tma->box_slots = static_cast<int>(std::gcd(params.page_size, int64_t{tile_keys}));
  tma->head_columns = static_cast<int>(params.head_stride / 64);

  // ---- Tensor maps
  const bool any_pages = !SuitsTma(params.page_size);
  PagedTensor cache;
  cache.columns = unsign((params.num_kv_heads - 1) * params.head_stride + params.head_dim);
  cache.page_rows = unsign(params.page_size);
  cache.pages = unsign(params.num_pages);
  cache.row_stride = unsign(params.slot_stride);
  cache.page_stride = unsign(params.page_stride);
  cache.box_rows = static_cast<uint32_t>(tma->box_slots);
  cache.box_columns = static_cast<uint32_t>(params.head_dim);
  cache.bfloat16 = params.cache_dtype == DType::kBF16;
  const auto encode = IsFloat8(params.cache_dtype) ? EncodePagedBytes : EncodePagedTensor;
  cache.start = params.k_cache;
  if (!any_pages && !encode(cache, &tma->k_map)) return false;
  cache.start = params.v_cache;
  if (!any_pages && !encode(cache, &tma->v_map)) return false;
  tma->query_by_tma =
      64 % group == 0 &&
      EncodeQueryTensor(params.query, unsign(params.num_tokens), unsign(params.num_heads), unsign(params.head_dim),
                        64 / group, group, params.dtype == DType::kBF16, &tma->q_map);

  // ---- Split-KV
  tma->split_kv = SplitKvPolicy::Make(params);
  tma->tree_mask = params.tree_mask;
  tma->tree_words = params.tree_mask != nullptr ? static_cast<int>(params.tree_words) : 0;
  tma->behind_decode = params.tree_mask == nullptr && DecodeComesFirst(params);
  tma->waits_for_inputs = params.order == LaunchOrder::kDependent;
  // Of a larger table the call reads little. Behind the decode path, that has done it.
  constexpr int64_t kMaxPrefetchPages = 1 << 17;
  const int64_t table_entries = params.max_seqs * params.pages_per_seq;
  tma->prefetch_pages =
      tma->behind_decode || table_entries > kMaxPrefetchPages ? 0 : static_cast<unsigned>(table_entries);
  char* const scratch = static_cast<char*>(params.scratch) + layout.begin_bytes;
  tma->accumulators.o_accum = reinterpret_cast<float*>(scratch);
  tma->accumulators.max_sum_accum =
      reinterpret_cast<float2*>(tma->accumulators.o_accum + layout.total_rows * params.head_dim);
  tma->accumulators.part_rows = layout.part_rows;
  return true;
}

// The arguments of the decode path's code in the kernel, where that takes its sequences by whole work tiles.
template <typename Traits>
decode::DecodeArgs RareDecodeRowsArgs(const SplitAccumulatorLayout& layout, TmaParams* tma) {
  const bool takes = Traits::kTakesOneSequence ? tma->attention.max_seqs == 1 : Traits::kTakesWholeTiles;
  if (!takes || layout.rare_decode_rows == nullptr) return {};
  layout.rare_decode_rows->taken = true;
  tma->takes_whole_tiles = true;
  decode::DecodeArgs args = layout.rare_decode_rows->args;
  args.kv_l2_policy = kEvictFirst;
  return args;
}

// The kernel that also does the decode path's split-KV work, if that is wanted and it can.
template <typename Traits>
Status LaunchTmaAndDecode(const TmaParams& tma, const SplitAccumulatorLayout& layout, dim3 grid, Stream stream,
                          bool* launched) {
  decode::SharedCall* const decode = layout.decode_work;
  const bool suits = grid.y == 1 && SuitsDecodeRows(tma.attention, tma.split_kv, grid.x);
  *launched = decode != nullptr && decode->suits_prefill && suits;
  if (!*launched) return Status::Ok();
  const int ctas = decode->args.cta_group_size * decode->args.num_cta_groups;
  grid.x = std::max(grid.x, static_cast<unsigned>((ctas + kDecodeCtas - 1) / kDecodeCtas));
  decode->prefill_ctas = grid.x;
  const auto kernel = PrefillAndDecodeTmaKernel<Traits>;
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytesWithDecode<Traits>));
  decode->launched = true;
  return Launch({grid, Traits::kThreads, kSharedBytesWithDecode<Traits>, /*programmatic=*/true}, stream, kernel, tma,
                decode->args);
}

// The kernel that merges splits, of so many CTAs: launch_combine.cuh, which one source file for each kLongestFirst
// includes. `decode`: the decode path's part of the call, or null. `shares_last_round`: see
// SplitKvPolicy.
template <bool kLongestFirst>
Status LaunchCombine(const TmaParams& tma, decode::SharedCall* decode, bool shares_last_round, unsigned ctas,
                     Stream stream);

template <typename Traits>
Status LaunchTma(const TmaParams& call, const SplitAccumulatorLayout& layout, int64_t sms, Stream stream) {
  using Layout = SplitAccumulatorLayout;
  static_assert(Traits::kTileKeys == SplitKvPolicy::TileKeys(Traits::kHeadDim));
  static_assert(Traits::kRows <= Layout::MaxTileRows(Traits::kHeadDim) &&
                Traits::kMaxSequences == Layout::SequencesPerGridRow(Traits::kHeadDim));
  const PagedAttentionParams& params = call.attention;
  void (*kernel)(TmaParams, decode::DecodeArgs);
  if constexpr (Traits::kConsumerWarpgroups == 1) {
    kernel = PrefillSmallTmaKernel<Traits>;
  } else {
    kernel = PrefillTmaKernel<Traits>;
  }
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSharedBytes));
  const dim3 grid(static_cast<unsigned>(PersistentCtas(params, layout, Traits::kRows, sms)),
                  static_cast<unsigned>(PersistentGridRows(params)));
  TmaParams tma = call;
  tma.ctas = FastDivisor::Make(grid.x);
  tma.split_kv.tile_rows = Traits::kRows;
  const bool fill = Traits::kTakesFirstSplits && params.max_seqs <= Traits::WarpScheduler::kSequences &&
                    layout.pool_rows > 0 && layout.part_rows >= Layout::kMaxCtas * Traits::kRows;
  tma.split_kv.ctas = fill || Traits::kLongestFirst ? grid.x : 0;
  tma.split_kv.takes_first_splits = Traits::kTakesSomeSplits;
  tma.split_kv.asks_first_splits = fill;
  tma.split_kv.shares_small_tiles = Traits::kSharedAccumulators;
  const bool shares_last_round = Traits::kTakesSomeSplits && params.max_seqs > Traits::WarpScheduler::kSequences &&
                                 layout.pool_rows > 0 && grid.y == 1;
  tma.split_kv.last_round_ctas = shares_last_round ? grid.x : 0;
  if (layout.kernels != PrefillKernels::kCombine) {
    bool launched = false;
    if constexpr (Traits::kSharesDecodeRows) {
      if (Status status = LaunchTmaAndDecode<Traits>(tma, layout, grid, stream, &launched); !status.ok()) return status;
    }
    if (!launched) {
      const decode::DecodeArgs decode_args = RareDecodeRowsArgs<Traits>(layout, &tma);
      const LaunchConfig config{grid, Traits::kThreads, Traits::kSharedBytes, /*programmatic=*/true};
      if (Status status = Launch(config, stream, kernel, tma, decode_args); !status.ok()) return status;
    }
  }
  if (layout.pool_rows == 0 || layout.kernels == PrefillKernels::kAllButCombine) return Status::Ok();

  const int ctas_per_sm = Traits::kRows == 64 && tma.behind_decode ? kIdleCombineCtasPerSm : 8;
  const auto ctas = static_cast<unsigned>(CombineCtas(params, kCombineThreads / 32, ctas_per_sm, sms));
  // With a float8 cache the decode path's splits have a kernel of their own.
  decode::SharedCall* const decode = Traits::kFloat8Cache ? nullptr : layout.decode_work;
  return LaunchCombine<Traits::kLongestFirst>(tma, decode, shares_last_round, ctas, stream);
}

template <typename Traits>
Status LaunchTmaOneWarpgroup(const TmaParams& call, const SplitAccumulatorLayout& layout, int64_t sms, Stream stream) {
  static_assert((Traits::kSharedBytes + 1024) * kOneWarpgroupCtasPerSm <= 228 * 1024);  // a CTA takes 1 KiB more
  const PagedAttentionParams& params = call.attention;
  const int64_t ctas = std::min(SingleTileCtas(params, Traits::kRows), kOneWarpgroupCtasPerSm * sms);
  constexpr int64_t kSequences = Traits::Scheduler::kSequences;
  const int64_t grid_rows = std::max<int64_t>(1, (params.max_seqs + kSequences - 1) / kSequences);
  const dim3 grid(static_cast<unsigned>(ctas), static_cast<unsigned>(grid_rows));
  const LaunchConfig config{grid, Traits::kThreads, Traits::kSharedBytes, /*programmatic=*/true};
  TmaParams tma = call;
  const decode::DecodeArgs decode_args = RareDecodeRowsArgs<Traits>(layout, &tma);
  if (tma.takes_whole_tiles) {
    const auto kernel = PrefillAndDecodeOneWarpgroupKernel<Traits>;
    XLA_GPU_RETURN_IF_CUDA(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSharedBytes));
    return Launch(config, stream, kernel, tma, decode_args);
  }
  const auto kernel = PrefillTmaOneWarpgroupKernel<Traits>;
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSharedBytes));
  return Launch(config, stream, kernel, tma);
}

// At head_dim 128, by the kernel that the shapes suggest. Instance<Config>: the traits of a configuration.
template <template <typename Config> class Instance>
Status LaunchTmaDim128(const TmaParams& tma, const SplitAccumulatorLayout& layout, int64_t sms, Stream stream) {
  constexpr bool kFloat8 = Instance<TmaConfigDim128Rows64>::kFloat8Cache;
  if (tma.tree_mask != nullptr) return LaunchTma<Instance<TmaConfigDim128Rows64>>(tma, layout, sms, stream);
  constexpr bool kOneWarpgroup =
      !kFloat8 && !Instance<TmaConfigDim128Rows64>::kAnyPages && !Instance<TmaConfigDim128Rows64>::kLongestFirst;
  const bool one_warpgroup = kOneWarpgroup && !tma.split_kv.enabled;
  switch (TmaInstanceDim128(tma.attention, tma.split_kv, one_warpgroup, sms)) {
    case TmaInstance::kOneWarpgroup:  // has no combine kernel
      if (layout.kernels == PrefillKernels::kCombine) return Status::Ok();
      if constexpr (kOneWarpgroup) {
        return LaunchTmaOneWarpgroup<Instance<TmaConfigDim128OneWarpgroup>>(tma, layout, sms, stream);
      }
      break;
    case TmaInstance::kRows64:
      return LaunchTma<Instance<TmaConfigDim128Rows64>>(tma, layout, sms, stream);
    case TmaInstance::kRows64Alternating:
      if constexpr (!kFloat8) {
        return LaunchTma<Instance<TmaConfigDim128Rows64Alternating>>(tma, layout, sms, stream);
      }
      break;
    case TmaInstance::kRows128Alternating:
      if constexpr (!kFloat8) {
        return LaunchTma<Instance<TmaConfigDim128Rows128Alternating>>(tma, layout, sms, stream);
      }
      break;
    case TmaInstance::kRows128:
      return LaunchTma<Instance<TmaConfigDim128Rows128>>(tma, layout, sms, stream);
    case TmaInstance::kRows192:
      break;
  }
  return LaunchTma<Instance<TmaConfigDim128Rows192>>(tma, layout, sms, stream);
}

template <typename T>
struct TmaInstances {
  template <typename Config>
  using Of = TmaKernelTraits<T, Config>;
  template <typename Config>
  using OfAnyPages = TmaKernelTraits<T, TmaConfigAnyPages<Config>>;
  template <typename Config>
  using OfFloat8 = TmaKernelTraits<T, TmaConfigFloat8<Config>>;
  template <typename Config>
  using OfLongestFirst = TmaKernelTraits<T, TmaConfigLongestFirst<Config>>;
  template <typename Config>
  using OfFloat8LongestFirst = TmaKernelTraits<T, TmaConfigLongestFirst<TmaConfigFloat8<Config>>>;
};

// By head_dim. Instance<Config>: as LaunchTmaDim128's.
template <template <typename Config> class Instance, int kDim>
Status LaunchTma(const TmaParams& tma, const SplitAccumulatorLayout& layout, Stream stream) {
  int64_t sms = 0;
  if (Status status = CountSms(&sms); !status.ok()) return status;
  if constexpr (kDim == 64) {
    if (TmaInstanceDim64(tma.attention, sms) == TmaInstance::kRows64Alternating) {
      return LaunchTma<Instance<TmaConfigDim64Rows64Alternating>>(tma, layout, sms, stream);
    }
    return LaunchTma<Instance<TmaConfigDim64>>(tma, layout, sms, stream);
  } else if constexpr (kDim == 256) {
    return LaunchTma<Instance<TmaConfigDim256>>(tma, layout, sms, stream);
  } else {
    return LaunchTmaDim128<Instance>(tma, layout, sms, stream);
  }
}

template <typename T>
Status SplitsKeys(const PagedAttentionParams& shapes, bool* splits) {
  *splits = false;
  if (IsFloat8(shapes.cache_dtype) || !SupportsTma(shapes)) return Status::Ok();
  if (shapes.head_dim == 64) return SupportsSm90a<T, 64>(splits);
  return shapes.head_dim == 128 ? SupportsSm90a<T, 128>(splits) : SupportsSm90a<T, 256>(splits);
}

// ---- The choice of a kernel
// At head_dim 64 and 128, bfloat16 with a float8 cache: in a source file of its own.
Status LaunchFloat8(const TmaParams& tma, const SplitAccumulatorLayout& layout, Stream stream);

// At head_dim 64, 128 and 256, pages that TMA does not load: likewise.
template <typename T>
Status LaunchAnyPages(const TmaParams& tma, const SplitAccumulatorLayout& layout, Stream stream);
template <>
Status LaunchAnyPages<__half>(const TmaParams& tma, const SplitAccumulatorLayout& layout, Stream stream);
template <>
Status LaunchAnyPages<__nv_bfloat16>(const TmaParams& tma, const SplitAccumulatorLayout& layout, Stream stream);

// Where SplitAccumulatorLayout::longest_first: likewise.
template <typename T>
Status LaunchLongestFirst(const TmaParams& tma, const SplitAccumulatorLayout& layout, Stream stream);
template <>
Status LaunchLongestFirst<__half>(const TmaParams& tma, const SplitAccumulatorLayout& layout, Stream stream);
template <>
Status LaunchLongestFirst<__nv_bfloat16>(const TmaParams& tma, const SplitAccumulatorLayout& layout, Stream stream);
Status LaunchFloat8LongestFirst(const TmaParams& tma, const SplitAccumulatorLayout& layout, Stream stream);

// kDim: head_dim, rounded up.
template <typename T, int kDim>
Status LaunchDim(const PagedAttentionCall& params, Stream stream) {
  const bool float8 = IsFloat8(params.cache_dtype);
  constexpr bool kTakesFloat8 = kDim <= 128 && std::is_same_v<T, __nv_bfloat16>;
  bool sm90a = false;
  if (!float8 || kTakesFloat8) {
    if (Status status = SupportsSm90a<T, kDim>(&sm90a); !status.ok()) return status;
  }
  const bool combine_alone = params.prefill_kernels == PrefillKernels::kCombine;  // the other kernels have none
  if (!sm90a) return combine_alone ? Status::Ok() : LaunchMma<T, kDim>(params, stream);
  if (SupportsTma(params)) {
    const SplitAccumulatorLayout layout = SplitAccumulatorLayout::Of(params);
    TmaParams tma{};
    if (MakeTmaParams(params, layout, &tma)) {
      if (float8 && layout.longest_first) return LaunchFloat8LongestFirst(tma, layout, stream);
      if (float8) return LaunchFloat8(tma, layout, stream);
      if (layout.longest_first) return LaunchLongestFirst<T>(tma, layout, stream);
      if (!SuitsTma(params.page_size)) {
        if (Status status = CheckSlotCounts(params); !status.ok()) return status;
        return LaunchAnyPages<T>(tma, layout, stream);
      }
      return LaunchTma<TmaInstances<T>::template Of, kDim>(tma, layout, stream);
    }
  }
  if (combine_alone) return Status::Ok();
  if (float8) return LaunchMma<T, kDim>(params, stream);
  if (params.tree_mask != nullptr) {
    return Status::Internal("paged_attention: tree_mask: the driver makes no tensor maps for this kv_cache");
  }
  return LaunchCpAsync<T, kDim>(params, stream);
}

// T: __half or __nv_bfloat16.
template <typename T>
Status Launch16Bit(const PagedAttentionCall& params, Stream stream) {
  if (params.head_dim <= 64) return LaunchDim<T, 64>(params, stream);
  if (params.head_dim <= 128) return LaunchDim<T, 128>(params, stream);
  return LaunchDim<T, 256>(params, stream);
}

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_LAUNCH_CUH_
