// Prefill attention in float16 and bfloat16 for sm_90a with TMA, or by cp.async (sm90_tma_any_pages.cuh) in pages that
// are no multiple of 8 slots. Persistent CTAs, as many as the GPU has SMs, take one work tile after the other. In a CTA
// a producer warpgroup loads Q and, page by page, tiles of K and V into rings of stages in shared memory, and consumer
// warpgroups compute, 64 rows each.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_CUH_

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/wgmma.cuh"
#include "ffi/ops/paged_attention/decode/decode.h"
#include "ffi/ops/paged_attention/decode/split_kv_kernel.cuh"
#include "ffi/ops/paged_attention/decode/whole_tiles.cuh"
#include "ffi/ops/paged_attention/padding_rows.cuh"
#include "ffi/ops/paged_attention/prefill/decode_share.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma_any_pages.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma_barriers.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma_consumer.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma_float8.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma_producer.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma_scheduler.cuh"
#include "ffi/ops/paged_attention/prefill/sm90_tma_traits.cuh"

namespace xla_gpu::prefill {

// Brings the metadata into L2 while the kernel before may still run. That one may write them: its writes arrive in L2
// too.
__device__ inline void PrefetchMetadata(const TmaParams& params) {
  constexpr unsigned kLine = 32;  // page numbers of a cache line
  const unsigned line = (threadIdx.x * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  if (line * kLine < params.prefetch_pages) PrefetchToL2(params.attention.block_tables + line * kLine);
  if (threadIdx.x == 0) {
    PrefetchToL2(params.attention.num_seqs);
    PrefetchToL2(params.attention.query_start_loc);
    PrefetchToL2(params.attention.context_lens);
  }
}

template <typename Traits, bool kIsValues>
using KvWarp = std::conditional_t<Traits::kAnyPages, CpAsyncKvWarp<Traits, kIsValues>, TmaKvWarp<Traits, kIsValues>>;

// What the four producer warps do once their work tiles are planned. Arguments as TmaSchedulerWarp::Run's and
// TmaKvWarp::Run's.
template <typename Traits, typename Find>
__device__ void RunProducerWarp(const TmaCta<Traits>& cta, int warp, Find find, bool has_first,
                                const typename TmaSchedulerWarp<Traits>::Planned& first, EarlyPage early) {
  // NOTE: opaque to the compiler, which would make a jump table of this, which has to come from memory first.
  const auto is_next = [&warp] {
    asm("" : "+r"(warp));
    return --warp < 0;
  };
  if (is_next()) {
    TmaSchedulerWarp<Traits>{cta}.Run(find, [] {}, has_first, first);
  } else if (is_next()) {
    KvWarp<Traits, /*kIsValues=*/false>{cta}.Run(early);
  } else if (is_next()) {
    KvWarp<Traits, /*kIsValues=*/true>{cta}.Run(early);
  } else {
    TmaQueryWarp<Traits>{cta}.Run();
  }
}

// Where a call has room for one sequence, and that has so few tokens that it belongs to the decode path: computes it.
// `metadata`: of the sequence, in lane 0 of each warp. All threads of the CTA call this last.
template <typename Traits>
__device__ __forceinline__ void TakeOneSequence(const decode::DecodeArgs& args, const ThreadMetadata& metadata,
                                                char* shared) {
  using Decode = typename Traits::DecodeTraits;
  const auto first = [](int value) { return __shfl_sync(~0u, value, 0); };
  const decode::SequenceMetadata sequence = {first(metadata.q_begin), first(metadata.q_end),
                                             first(metadata.context_len)};
  const bool live = first(metadata.num_seqs) == 1;
  if (threadIdx.x >= Decode::kThreads) return;
  decode::ComputeOneSequence<Decode>(args, *reinterpret_cast<decode::WholeTilesStorage<Decode>*>(shared), live,
                                     sequence, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
}

// What the CTA computes of the sequences of the decode path, behind its own work, where there are probably none. By the
// first warpgroup that does not load; others return.
template <typename Traits>
__device__ __forceinline__ void TakeWholeTiles(const decode::DecodeArgs& args, char* shared) {
  using Decode = typename Traits::DecodeTraits;
  static_assert(Decode::kThreads == Traits::kWarpgroupThreads);
  if (threadIdx.x / Traits::kWarpgroupThreads != Traits::kProducerWarpgroups) return;
  decode::ComputeWholeTiles<Decode>(args, *reinterpret_cast<decode::WholeTilesStorage<Decode>*>(shared),
                                    blockIdx.y * gridDim.x + blockIdx.x, gridDim.y * gridDim.x);
}

// The sequences of the decode path where they may be many.
template <typename Traits>
using DecodeRowsTraits = decode::WarpgroupKernelTraits<Traits::kDecodeFormat, Traits::kHeadDim>;
template <typename Traits>
inline constexpr int kSharedBytesWithDecode =
    std::max<int>(Traits::kSharedBytes, kDecodeCtas * sizeof(decode::SplitKvSharedStorage<DecodeRowsTraits<Traits>>));

// What the CTA computes of them, behind its own work: its first warpgroups stand for CTAs of the split-KV kernel. By
// all threads, behind the launch wait.
template <typename Traits>
__device__ __forceinline__ void RunDecodeRows(const decode::DecodeArgs& args, const SplitKvPolicy& policy,
                                              char* shared) {
  using Storage = decode::SplitKvSharedStorage<DecodeRowsTraits<Traits>>;
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / Traits::kWarpgroupThreads, 0);
  if (warpgroup >= kDecodeCtas) return;
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const auto metadata = ThreadMetadata::Load(args.params, lane, /*early=*/false);
  const auto share = DecodeShare::Of(args, policy, metadata, gridDim.x);
  if (blockIdx.x < share.first_cta) return;
  const unsigned index = warpgroup * (gridDim.x - share.first_cta) + blockIdx.x - share.first_cta;
  const decode::WarpgroupCta cta(args, index);
  decode::SplitKvCta<DecodeRowsTraits<Traits>>(args, reinterpret_cast<Storage*>(shared)[warpgroup], cta,
                                               share.cta_groups)
      .Run();
}

// A CTA of the kernel. kSharesDecodeRows: the CTAs compute the sequences of the decode path too, as RunDecodeRows. Else
// they do where TmaParams::takes_whole_tiles.
template <typename Traits, bool kSharesDecodeRows = false>
__device__ __forceinline__ void RunPrefillTma(const TmaParams& params, const decode::DecodeArgs& decode_args) {
  extern __shared__ __align__(1024) char shared[];
  const TmaCta<Traits> cta(params, shared);
  const PagedAttentionParams& attention = params.attention;

  // ---- Metadata
  // Where there are few sequences, each warp plans by itself. CTAs plan while the kernel before may still run, from
  // metadata that this one may still write, and again behind the wait where they have changed.
  using Scheduler = typename Traits::Scheduler;
  using WarpScheduler = typename Traits::WarpScheduler;
  using Division = typename Traits::Division;
  constexpr bool kPlansManyEarly = Traits::kTakesSomeSplits;  // instances for many sequences of few rows
  const bool behind_decode = params.behind_decode;
  const int64_t early_sequences = kPlansManyEarly ? Scheduler::kEarlySequences : WarpScheduler::kSequences;
  ThreadMetadata metadata;
  // They are under way while barriers are initialised, since all threads meet behind the plan.
  bool meets_late = false;
  if constexpr (Traits::kShortPlan) {
    meets_late = !behind_decode && attention.max_seqs <= early_sequences;
    const bool few = Traits::kLongestFirst || attention.max_seqs <= WarpScheduler::kSequences;
    const int seq = static_cast<int>(few ? threadIdx.x % 32 : threadIdx.x);
    if (meets_late) metadata = ThreadMetadata::Load(attention, seq, /*early=*/true);
  }

  // ---- Barriers
  constexpr bool kPlansFirst = Traits::kPlansFirst;
  // Behind the decode path there is probably no work. What only CTAs with a work tile need comes later then.
  const bool probably_empty = kPlansFirst && behind_decode;
  if (behind_decode) AllowDependentLaunch();  // of the combine kernel
  if (!probably_empty) {
    if (threadIdx.x / 32 == 3) InitBarriers(cta);
    PrefetchMetadata(params);
    if (!meets_late) __syncthreads();  // the barriers are there
  }

  // ---- Dependent launch, and work tiles
  // All CTAs wait, also those without a work tile: then this kernel ends after the one before. Behind the decode path,
  // which has waited for all that came before, one CTA waits before it ends, and others only before they use the
  // scratch, which the decode path may still read: those without a work tile make room for the next kernel.
  using SchedulerWarp = TmaSchedulerWarp<Traits>;
  const bool few = Traits::kLongestFirst || attention.max_seqs <= WarpScheduler::kSequences;
  const bool early = !behind_decode && attention.max_seqs <= early_sequences;
  bool settled = !early;  // nobody writes the metadata any more
  if (settled && !behind_decode) {
    WaitForPreviousKernel();
    AllowDependentLaunch();  // of the combine kernel, or of the decode path
  }
  WarpScheduler warp_scheduler(params.group.divisor, params.kv_heads);
  Division division;
  if constexpr (Traits::kShortPlan) {
    division = {params.ctas};
  } else {
    division = {params.split_kv.tile_rows, params.split_kv.ctas};
  }
  Scheduler scheduler(attention, params.group.divisor, params.kv_heads, params.split_kv, division,
                      cta.Storage().scheduler);
  typename SchedulerWarp::Planned first{};
  EarlyPage early_page;  // of the warps that load K and V
  const bool is_scheduler = threadIdx.x < 32;
  const auto find = [&](unsigned n, WorkTile* tile, int* splits) {
    return few ? warp_scheduler.Find(n, tile, splits) : scheduler.Find(n, tile, splits);
  };
  const auto is_empty = [&] { return few ? warp_scheduler.IsEmpty() : scheduler.IsEmpty(); };
  const int seq = static_cast<int>(few ? threadIdx.x % 32 : threadIdx.x);  // whose metadata this thread reads
  if (!meets_late) metadata = ThreadMetadata::Load(attention, seq, !settled);
#pragma unroll 1
  while (true) {
    bool in_order;
    if (__builtin_expect(few, 1)) {
      in_order = warp_scheduler.Plan(attention, metadata, params.split_kv.max_tokens, settled);
      if (is_scheduler && !warp_scheduler.IsEmpty()) {
        if (params.split_kv.enabled) {
          warp_scheduler.template Split<Traits::kTakesFirstSplits, Traits::kTakesSomeSplits>(
              params.split_kv, params.accumulators.part_rows, division);
        }
        warp_scheduler.Compare();
      }
    } else {
      in_order = scheduler.Plan(metadata, settled);
    }
    if constexpr (kPlansFirst) {
      if (is_scheduler && !is_empty() && (few || kPlansManyEarly)) {
        first = SchedulerWarp{cta}.PlanFirst([&](unsigned n, WorkTile* tile, int* splits) {
          return kPlansManyEarly ? find(n, tile, splits) : warp_scheduler.Find(n, tile, splits);
        });
      }
      if (Traits::kLooksUpEarly && threadIdx.x == 0 && !first.found) cta.Storage().tiles[0].key_tiles = 0;
    }
    if (settled) break;
    settled = true;
    if constexpr (Traits::kShortPlan) __syncthreads();  // all threads meet: the barriers are there
    // NOTE: the scheduler warp may be behind the wait and describe another work tile. Of any mixture of two the entry
    // lies in the block table, and it is compared with the one that is needed.
    if constexpr (Traits::kLooksUpEarly) {
      const typename Traits::TileStage& stage = cta.Storage().tiles[0];
      const auto warp = threadIdx.x / 32;
      if ((warp == 1 || warp == 2) && stage.key_tiles > 0) {
        early_page.entry = TmaKvWarp<Traits, /*kIsValues=*/false>{cta}.Entry({}, max(stage.last_key_tile, 0));
      }
    }
    WaitForPreviousKernel();
    AllowDependentLaunch();
    if constexpr (Traits::kLooksUpEarly) {
      if (early_page.entry != nullptr) early_page.page = LoadBehindWait(early_page.entry);
    }
    const auto now = ThreadMetadata::Load(attention, seq, /*early=*/false);
    const bool unchanged = in_order && now == metadata;
    if (few ? __all_sync(~0u, unchanged) : __syncthreads_and(unchanged)) break;
    metadata = now;
  }

  // Whether there are sequences of the decode path that this kernel takes. With few sequences a lane of each warp has
  // one: all warps find the same. Of probably none in shared memory, since registers are short.
  constexpr bool kTakesWholeTiles = Traits::kTakesWholeTiles && !Traits::kTakesOneSequence;
  constexpr bool kTakesDecodeRows = kSharesDecodeRows || kTakesWholeTiles;
  const auto any_decode_rows = [&] {
    const unsigned tokens = static_cast<unsigned>(metadata.q_end) - static_cast<unsigned>(metadata.q_begin);
    const bool mine = seq < metadata.num_seqs && tokens - 1 < static_cast<unsigned>(params.split_kv.max_decode_tokens);
    return __any_sync(~0u, mine) != 0;
  };
  bool shares_decode_rows = false;
  if constexpr (kSharesDecodeRows) shares_decode_rows = any_decode_rows();  // few: see PathsShareCombine
  if constexpr (kTakesWholeTiles) {
    if (few && params.takes_whole_tiles) cta.Storage().scheduler.has_decode_rows = any_decode_rows();
  }
  const auto has_decode_rows = [&] {
    if constexpr (kTakesWholeTiles) return params.takes_whole_tiles && cta.Storage().scheduler.has_decode_rows;
    return shares_decode_rows;
  };

  // ---- Padding rows
  const bool fill = few ? warp_scheduler.HasPaddingRows() : scheduler.HasPaddingRows();
  if (fill && blockIdx.y == 0) FillPaddingRows<typename Traits::Element>(attention, blockIdx.x, gridDim.x);

  // ---- CTAs without a work tile end here
  if (is_empty()) {
    if (behind_decode && blockIdx.x == 0 && blockIdx.y == 0) WaitForPreviousKernel();
    if constexpr (Traits::kTakesOneSequence && !kSharesDecodeRows) {
      if (params.takes_whole_tiles) TakeOneSequence<Traits>(decode_args, metadata, shared);
    }
    if (!has_decode_rows()) return;
  } else {
    if (probably_empty && threadIdx.x / 32 == 3) InitBarriers(cta);
    if (behind_decode && params.waits_for_inputs) WaitForPreviousKernel();
    if (!few || probably_empty) __syncthreads();

    // By a shuffle, so that the compiler knows it to be uniform in a warp.
    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / Traits::kWarpgroupThreads, 0);
    if (warpgroup < Traits::kProducerWarpgroups) {
      // ---- Producer warps
      DecreaseRegisters<Traits::kProducerRegisters>();
      const int warp = __shfl_sync(~0u, cta.thread / 32, 0);
      const bool has_first = kPlansFirst && (few || kPlansManyEarly);
      if constexpr (Traits::kFloat8Cache) {
        TmaFloat8Warp<Traits>{{cta}, warpgroup * 4 + warp, {}, {}, {}}.Run(find, has_first, first);
      } else {
        RunProducerWarp(cta, warp, find, has_first, first, early_page);
      }
      if (!shares_decode_rows) return;
      if constexpr (kSharesDecodeRows) {
        // Warps of a warpgroup must meet between two changes of registers, too.
        MeetBehindWork<Traits>(/*is_producer=*/true);
        IncreaseRegisters<Traits::kLaunchRegisters>();
      }
    } else {
      // ---- Consumer warpgroups
      IncreaseRegisters<Traits::kConsumerRegisters>();
      TmaConsumer<Traits>(cta, warpgroup - Traits::kProducerWarpgroups).Run();
      if (behind_decode && blockIdx.x == 0 && blockIdx.y == 0) WaitForPreviousKernel();
      if (!has_decode_rows()) return;
      // All consumers have read what is in shared memory.
      if constexpr (kSharesDecodeRows) MeetBehindWork<Traits>(/*is_producer=*/false);
      if constexpr (kTakesWholeTiles) {
        using Consumer = TmaConsumer<Traits>;
        NamedBarrierSync(Consumer::kTurnBarrier + Consumer::kWarpgroups,
                         Consumer::kWarpgroups * Traits::kWarpgroupThreads);
      }
      if constexpr (kTakesDecodeRows) DecreaseRegisters<Traits::kLaunchRegisters>();
    }
  }

  // ---- Sequences of the decode path
  // NOTE: no wait here is for another CTA. All consumer warps of a CTA come here, or none: they have found the same in
  // has_decode_rows, from settled metadata. They come when they have seen the scheduler warp's mark behind the last
  // work tile, and the arrival of all loads, so that nothing is under way to shared memory. With kSharesDecodeRows the
  // producer warps come too, and get the registers that consumers have given back: together what the launch has
  // allocated. Otherwise they end without waiting, and what they still touch lies behind the storage that is used here.
  if constexpr (kSharesDecodeRows) {
    InvalidateBarriers(cta);
    RunDecodeRows<Traits>(decode_args, params.split_kv, shared);
  } else if constexpr (kTakesWholeTiles) {
    TakeWholeTiles<Traits>(decode_args, shared);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(XLA_GPU_HAS_WGMMA ? Traits::kThreads : 32, 1)
    PrefillTmaKernel(const __grid_constant__ TmaParams params, const __grid_constant__ decode::DecodeArgs decode_args) {
#if XLA_GPU_HAS_WGMMA
  RunPrefillTma<Traits>(params, decode_args);
#endif
}

// The same for a small CTA.
template <typename Traits>
__global__ void __maxnreg__(Traits::kLaunchRegisters)
    PrefillSmallTmaKernel(const __grid_constant__ TmaParams params,
                          const __grid_constant__ decode::DecodeArgs decode_args) {
#if XLA_GPU_HAS_WGMMA
  RunPrefillTma<Traits>(params, decode_args);
#endif
}

// The same, which also computes the sequences of the decode path.
template <typename Traits>
__global__ void __maxnreg__(Traits::kLaunchRegisters)
    PrefillAndDecodeTmaKernel(const __grid_constant__ TmaParams params,
                              const __grid_constant__ decode::DecodeArgs decode_args) {
#if XLA_GPU_HAS_WGMMA
  RunPrefillTma<Traits, /*kSharesDecodeRows=*/true>(params, decode_args);
#endif
}

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_CUH_
