// The split-KV kernel of the decode path: each CTA computes the KV splits of its interval of the KV-block space, and
// merges those that it may.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_SPLIT_KV_KERNEL_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_SPLIT_KV_KERNEL_CUH_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/fetch_parameters.cuh"
#include "ffi/ops/paged_attention/decode/epilogue.cuh"
#include "ffi/ops/paged_attention/decode/mainloop.cuh"
#include "ffi/ops/paged_attention/decode/prompts.cuh"
#include "ffi/ops/paged_attention/decode/tile_scheduler.cuh"
#include "ffi/ops/paged_attention/decode/wide_mainloop.cuh"
#include "ffi/ops/paged_attention/decode/work_range.cuh"

namespace xla_gpu::decode {

template <typename Traits>
struct SplitKvSharedStorage {
  alignas(1024) char k[Traits::kStages][Traits::kWarps][Traits::kTileBytes];
  alignas(1024) char v[Traits::kStages][Traits::kWarps][Traits::kTileBytes];
  SharedScores<Traits> scores[2];  // of this iteration and the one before, in turns
  typename SplitKvTileScheduler<Traits>::SharedStorage scheduler[Traits::kWarps];
  typename SplitKvTileScheduler<Traits>::BatchStorage batch;
  // All warps know the same. These stand here because registers are short.
  WorkRange range[Traits::kWarps];
  uint32_t interval_end[Traits::kWarps];  // of the CTA group's interval of the KV-block space
};

// Brings the page table into L2 before it is known who needs which part of it.
__device__ inline void PrefetchPageTable(const DecodeArgs& args) {
  constexpr unsigned kLine = 32;  // page numbers of a cache line
  const unsigned line = (threadIdx.x * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  if (line * kLine < args.prefetch_pages) PrefetchToL2(args.params.block_tables + line * kLine);
}

// A CTA of the split-KV kernel.
template <typename Traits, typename Shared = SplitKvSharedStorage<Traits>,
          typename Scheduler = SplitKvTileScheduler<Traits>>
class SplitKvCta {
 public:
  using Cta = typename Traits::Cta;

  // cta_groups: where Cta::kGroupsVary.
  __device__ SplitKvCta(const DecodeArgs& args, Shared& shared, const Cta& cta, int cta_groups)
      : args_(args),
        shared_(shared),
        cta_(cta),
        scheduler_(args, shared.scheduler[Warp()], shared.batch, StartLoads(args), cta_groups) {}
  // For ComputeNarrowRange alone.
  __device__ SplitKvCta(const DecodeArgs& args, Shared& shared, const Cta& cta, const Scheduler& scheduler)
      : args_(args), shared_(shared), cta_(cta), scheduler_(scheduler) {}

  __device__ void Run() {
    const uint32_t begin = scheduler_.IntervalBegin(static_cast<int>(cta_.Group()));
    const uint32_t end = min(scheduler_.IntervalBegin(static_cast<int>(cta_.Group()) + 1), scheduler_.Total());
    if (begin >= end) return;
    shared_.interval_end[Warp()] = end;
    WorkRange& range = shared_.range[Warp()];
    const int index = scheduler_.Find(begin);
    const SequencePlan& plan = scheduler_.At(index);
    const uint32_t offset = begin - plan.begin;
    const int tile = offset < plan.length ? 0 : static_cast<int>(offset / plan.length);
    // A split that began before the interval belongs to another CTA group.
    bool more = SetRange(index, tile, FirstSplitFrom(plan, offset - static_cast<unsigned>(tile) * plan.length));
    while (more) {
      if (range.split_begin < range.split_end) ComputeRange(range);
      more = NextRange(range);
      if (more) Cta::Sync();  // shared memory that the next range overwrites is no longer read
    }
  }

 private:
  // Stages that are loaded ahead of the one that is computed.
  static constexpr int kAhead = Traits::kStages == 1 ? 1 : Traits::kStages - 1;
  static constexpr uint32_t kStageStride = Traits::kWarps * Traits::kTileBytes;

  __device__ static int Warp() { return Cta::Warp(); }

  // Every load that depends on no other.
  __device__ static typename Scheduler::FirstLoads StartLoads(const DecodeArgs& args) {
    const typename Scheduler::FirstLoads loads(args);
    if constexpr (std::is_same_v<Cta, WholeCta>) PrefetchPageTable(args);
    return loads;
  }

  // ---- Work ranges
  // -----------------------------------------------------------------------------------------------------

  __device__ int FirstSplitFrom(const SequencePlan& plan, uint32_t offset) const {
    return plan.template FirstSplitFrom<typename Scheduler::Shape>(args_, offset);
  }
  // Sets the range that begins with split `split_begin` of a work tile. It may be empty. False if the split belongs to
  // another CTA group.
  __device__ bool SetRange(int index, int tile, int split_begin) {
    const SequencePlan plan = scheduler_.At(index);
    const uint32_t interval_end = shared_.interval_end[Warp()];
    const WorkTile work_tile = WorkTile::Of(args_, plan, tile, static_cast<int>(cta_.Number()));
    if (work_tile.begin + plan.SplitOffset(args_, split_begin) >= interval_end) return false;
    const int split_end = FirstSplitFrom(plan, interval_end - work_tile.begin);
    const int split_keys = plan.split_blocks * Traits::kBlockKeys;
    shared_.range[Warp()] = {plan,
                             index,
                             tile,
                             work_tile,
                             scheduler_.SequenceOf(index),
                             split_begin,
                             split_end,
                             plan.first_key + split_begin * split_keys,
                             split_end == plan.splits ? plan.end_key : plan.first_key + split_end * split_keys};
    return true;
  }
  // Sets the range of the next work tile. False if that belongs to another CTA group, or there is none.
  __device__ bool NextRange(const WorkRange& range) {
    int index = range.index;
    int tile = range.tile + 1;
    if (tile == range.plan.WorkTiles(args_)) {
      if (range.plan.End(args_) >= shared_.interval_end[Warp()]) return false;
      index = scheduler_.Next(index);
      tile = 0;
    }
    return SetRange(index, tile, 0);
  }

  // ---- The computation of a work range
  // ---------------------------------------------------------------------------------

  __device__ void ComputeRange(const WorkRange& range) {
    const SequencePlan& plan = range.plan;
    if (plan.end_key == plan.first_key) {
      if constexpr (Traits::kDependent) WaitForPreviousKernel();
      return StoreEmptyRows<Traits>(args_, plan, range.work_tile);
    }
    if constexpr (Traits::kWide) {
      return WideMainloop<Traits>(args_, shared_).Run(range);
    } else {
      ComputeNarrowRange(range);
    }
  }

 public:
  __device__ void ComputeNarrowRange(const WorkRange& range) {
    const PagedAttentionParams& params = args_.params;
    const SequencePlan& plan = range.plan;
    // Page look-ups of the first stages. They come first because all else waits for them. Each warp has one KV tile of
    // every KV block. keys_left: keys from the warp's tile to the end of the range; negative past the end.
    int keys_left = range.key_end - range.key_begin - Warp() * Traits::kTileKeys;
    KvView kv;
    kv.page_table = params.block_tables + static_cast<uint64_t>(range.sequence) * args_.pages_per_seq;
    kv.end_key = range.key_end;
    PageLookup first[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      first[i].Start(args_, kv.page_table, kv.end_key, keys_left - i * Traits::kBlockKeys, Traits::kTileKeys);
    }

    // The kernel before writes the query and new tokens' keys and values.
    if constexpr (Traits::kDependent) {
      if (args_.store_every_split) PrefetchTiles(range, first, keys_left);  // in longer calls it costs 1 to 2 us
      WaitForPreviousKernel();
    }

    // Q to registers, and the addresses of K and V.
    const Thread thread = Thread::Opaque(Cta::Thread());
    QueryFragment<Traits> query;
    query.Load(args_, plan, range.work_tile, thread);
    const TileCopy<Traits> copy(args_, thread);
    const int64_t head_offset = range.work_tile.kv_head * params.head_stride * Traits::kElementBytes + copy.column;
    kv.k = static_cast<const char*>(params.k_cache) + head_offset;
    kv.v = static_cast<const char*>(params.v_cache) + head_offset;
    kv.plan = &plan;
    kv.row_tile = range.work_tile.row_tile;
    kv.causal_tail = min(0, plan.end_key - kv.end_key - int{plan.q_len} + 1);
    // Keeps the compiler from adding the parameters' addresses again for each tile.
    asm("" : "+l"(kv.k), "+l"(kv.v), "+l"(kv.page_table));

    // Prologue: the first stages' copies.
    int blocks = (range.key_end - range.key_begin - 1) / Traits::kBlockKeys + 1;
    bool bad = false;
    const uint32_t my_k = SharedAddress(shared_.k[0][thread.warp]);
    // Copies the tile of the KV block `ahead` iterations from now, if there is one, to the stage at `stage` bytes.
    const auto load_stage = [&](const PageLookup& lookup, int ahead, uint32_t stage) {
      const uint32_t slot = lookup.Slot(args_, &bad);
      if (ahead < blocks) copy.Start(args_, kv, slot, my_k + stage, sizeof(shared_.k));
      CommitAsync();
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load_stage(first[i], i, i * kStageStride);
    AllowDependentLaunch();  // see DecodeSplitKvKernel
    PageLookup lookup;
    lookup.Start(args_, kv.page_table, kv.end_key, keys_left - kAhead * Traits::kBlockKeys, Traits::kTileKeys);

    // Mainloop. accumulator: of a split; segment: of a segment's splits so far; tile: of the work tile's segments so
    // far.
    Accumulator<Traits> accumulator, segment, tile;
    accumulator.Clear();
    const uint32_t k_offset = KOffset<Traits>(thread.lane);
    const typename Accumulator<Traits>::VOffsets v_offsets(thread);
    const uint32_t all_v = SharedAddress(shared_.v[0][0]);
    uint32_t stage = 0;
    uint32_t stage_before = (Traits::kStages - 1) * kStageStride;
    int buffer = 0;  // of the scores
    int split = range.split_begin;
    int split_blocks_left = plan.split_blocks;
    while (true) {
      ScoreFragment<Traits> scores;
      WaitAsync<kAhead - 1>();
      __syncwarp();
      ComputeScores<Traits>(my_k + stage + k_offset, query, scores);
      StoreScores<Traits>(args_, kv, query, thread, keys_left, __any_sync(0xffffffffu, bad), scores,
                          shared_.scores[buffer]);
      // Behind it all warps' scores and V tiles of this iteration are there, and those of the last are no longer read.
      Cta::Sync();
      const auto load_next = [&] {
        load_stage(lookup, kAhead, stage_before);
        lookup.Start(args_, kv.page_table, kv.end_key, keys_left - (kAhead + 1) * Traits::kBlockKeys,
                     Traits::kTileKeys);
      };
      if (Traits::kStages > 1) load_next();
      accumulator.Update(shared_.scores[buffer], all_v + stage, v_offsets, thread);
      if (Traits::kStages == 1) {
        Cta::Sync();
        load_next();
      }
      buffer = 1 - buffer;
      stage_before = stage;
      stage = stage == (Traits::kStages - 1) * kStageStride ? 0 : stage + kStageStride;
      keys_left -= Traits::kBlockKeys;
      --blocks;
      if (--split_blocks_left > 0 && blocks > 0) continue;

      // The end of a split.
      accumulator.ReduceSums();
      AccumulateSplit<Traits>(args_, cta_, range, range.work_tile, 0, thread, split, accumulator, segment, tile);
      if (blocks == 0) break;
      accumulator.Clear();
      split_blocks_left = kv.plan->split_blocks;
      ++split;
    }
  }

 private:
  // Brings the warp's first KV tiles into L2. What the kernel before writes of them it writes there too.
  __device__ void PrefetchTiles(const WorkRange& range, const PageLookup (&lookups)[kAhead], int keys_left) const {
    static_assert(!Traits::kDependent || Traits::kTileKeys == 16);
    const PagedAttentionParams& params = args_.params;
    const int64_t head_offset = range.work_tile.kv_head * params.head_stride * Traits::kElementBytes;
    const bool is_value = threadIdx.x % 32 >= Traits::kTileKeys;
    const char* const rows = static_cast<const char*>(is_value ? params.v_cache : params.k_cache) + head_offset;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      bool bad = false;
      const uint64_t slot = lookups[i].Slot(args_, &bad);
      if (keys_left > i * Traits::kBlockKeys && !bad) {
        PrefetchRowToL2(rows + slot * args_.slot_stride_bytes,
                        static_cast<uint32_t>(params.head_dim) * Traits::kElementBytes, args_.kv_l2_policy);
      }
    }
  }

  const DecodeArgs& args_;
  Shared& shared_;
  const Cta cta_;
  Scheduler scheduler_;
};

template <typename Traits>
__global__ void __maxnreg__(Traits::kHeadDim <= 128 && Traits::kRowTiles == 1 ? kSplitKvRegisters : 255)
    DecodeSplitKvKernel(const __grid_constant__ DecodeArgs args) {
#ifdef __CUDA_ARCH__
  // Each architecture launches one of the two variants: no code for the other.
  if constexpr (HasLargeSharedMemory(__CUDA_ARCH__) == Traits::kLargeSharedMemory) {
    using Shared = SplitKvSharedStorage<Traits>;
    static_assert(offsetof(Shared, batch) == offsetof(Shared, scheduler) + sizeof(Shared::scheduler),
                  "as TileScheduler::HasWholeTiles expects");
    extern __shared__ __align__(16) char dynamic_shared[];
    // Behind the prefill path, which has waited for the metadata, the rows are looked for first.
    if (args.wait_at_start && !args.behind_prefill) {
      FetchParameters(args);
      if constexpr (!Traits::kDependent) WaitForPreviousKernel();
    }
    // The combine kernel may start now if the call is short, or if there may be nothing to do because the prefill path
    // ran first. Else it may start when the first copies are under way, so that its CTAs do not delay this kernel's.
    if (args.store_every_split || args.behind_prefill) AllowDependentLaunch();
    if ((Traits::kWide && args.tree_mask != nullptr) || MayHaveDecodeRows(args)) {
      // Prompts that are split use the scratch.
      if (args.wait_at_start && args.behind_prefill && PromptsMayBeSplit(args)) WaitForPreviousKernel();
      SplitKvCta<Traits>(args, *reinterpret_cast<Shared*>(dynamic_shared), WholeCta{}, 0).Run();
    }
    // Programmatic-launch wait: one CTA waits, so that the kernel before has ended when this one has.
    if (blockIdx.x == 0 && blockIdx.y == 0) WaitForPreviousKernel();
  }
#endif
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_SPLIT_KV_KERNEL_CUH_
