// The split kernel of the decode path: each block is a worker and computes the chunks of keys that it owns.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_SPLIT_KV_KERNEL_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_SPLIT_KV_KERNEL_CUH_

#include <cstdint>

#include "ffi/device/dependent_launch.cuh"
#include "ffi/ops/paged_attention/decode/attention_state.cuh"
#include "ffi/ops/paged_attention/decode/mainloop.cuh"
#include "ffi/ops/paged_attention/decode/tile_scheduler.cuh"

namespace xla_gpu::decode {

template <typename S>
using DecodePlan = Plan<S::kBlockKeys, S::kRows>;

// What a worker computes of a unit: chunks [begin, end), which are the keys [begin_key, end_key).
struct Share {
  PlanEntry entry;
  int index;  // of the entry in the plan's window
  int unit;   // of the entry
  UnitPlace place;
  int sequence;
  int begin;
  int end;
  int begin_key;
  int end_key;
};

template <typename S>
struct SplitShared {
  alignas(1024) char keys[S::kRing][S::kWarps][S::kTileBytes];
  alignas(1024) char values[S::kRing][S::kWarps][S::kTileBytes];
  Published<S> published[2];  // of a step and the one before it, in turns
  typename DecodePlan<S>::Shared plan[S::kWarps];
  Share share[S::kWarps];   // all warps know the same; here for want of registers
  uint32_t end[S::kWarps];  // of the team's part of the line
};

// Brings the page table into L2 while nobody knows yet who needs which part of it. Not a large one, of which little is
// read.
__device__ inline void PrefetchPages(const DecodeArgs& args) {
  constexpr unsigned kLine = 32;  // page numbers
  const unsigned line = (threadIdx.x * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  if (line * kLine < args.prefetch_pages) PrefetchToL2(args.params.block_tables + line * kLine);
}

// A worker's walk over the line.
template <typename S>
class Worker {
 public:
  __device__ Worker(const DecodeArgs& args, SplitShared<S>& shared)
      : args_(args), shared_(shared), plan_(args, shared.plan[threadIdx.x / 32], Begin(args)) {}

  __device__ void Run() {
    const uint32_t begin = plan_.TeamBegin(static_cast<int>(blockIdx.y));
    const uint32_t end = min(begin + plan_.PerTeam(), plan_.Total());
    if (begin >= end) return;
    shared_.end[threadIdx.x / 32] = end;
    Share& share = shared_.share[threadIdx.x / 32];
    const int index = plan_.Find(begin);
    const PlanEntry& entry = plan_.At(index);
    const uint32_t into = begin - entry.begin;
    const int unit = into < entry.length ? 0 : static_cast<int>(into / entry.length);
    // A chunk that began before belongs to another team.
    bool more = SetShare(index, unit, entry.ChunkFrom(args_, into - static_cast<unsigned>(unit) * entry.length));
    while (more) {
      if (share.begin < share.end) RunShare(share);
      more = Next(share);
      if (more) __syncthreads();  // what the next unit overwrites is no longer read
    }
  }

 private:
  static constexpr int kAhead = S::kRing == 1 ? 1 : S::kRing - 1;  // steps that are copied ahead

  // All that can be asked of memory before anything is known.
  __device__ static typename DecodePlan<S>::Start Begin(const DecodeArgs& args) {
    const typename DecodePlan<S>::Start start(args);
    PrefetchPages(args);
    return start;
  }

  // Sets the share that begins with a unit's chunk `begin`, of which there may be none. False if that is another
  // worker's.
  __device__ bool SetShare(int index, int unit, int begin) {
    const PlanEntry entry = plan_.At(index);
    const uint32_t line_end = shared_.end[threadIdx.x / 32];
    const UnitPlace place = UnitPlace::Of(args_, entry, unit, static_cast<int>(blockIdx.x));
    if (place.begin + entry.Place(args_, begin) >= line_end) return false;
    const int end = entry.ChunkFrom(args_, line_end - place.begin);
    const int chunk_keys = entry.blocks * S::kBlockKeys;
    shared_.share[threadIdx.x / 32] = {entry,
                                       index,
                                       unit,
                                       place,
                                       plan_.SequenceOf(index),
                                       begin,
                                       end,
                                       entry.first_key + begin * chunk_keys,
                                       end == entry.chunks ? entry.end_key : entry.first_key + end * chunk_keys};
    return true;
  }
  // Sets that of the next unit. False if it is another worker's, or there is none.
  __device__ bool Next(const Share& share) {
    int index = share.index;
    int unit = share.unit + 1;
    if (unit == share.entry.Units(args_)) {
      if (share.entry.End(args_) >= shared_.end[threadIdx.x / 32]) return false;
      index = plan_.Next(index);
      unit = 0;
    }
    return SetShare(index, unit, 0);
  }

  // Of the warp's tile of the share's first step, the keys from its first one on; may be negative.
  __device__ static int Left(const Share& share) {
    return share.end_key - share.begin_key - static_cast<int>(threadIdx.x / 32) * S::kTileKeys;
  }
  __device__ const int32_t* PagesOf(const Share& share) const {
    return args_.params.block_tables + static_cast<uint64_t>(share.sequence) * args_.pages_per_seq;
  }

  __device__ void RunShare(const Share& share) {
    const PagedAttentionParams& params = args_.params;
    const PlanEntry& entry = share.entry;
    if (entry.end_key == entry.first_key) return StoreConstant(entry, share.place);
    // Each warp has a tile of every block of keys. Past the last key it fetches that key again, and takes its scores
    // away. Its pages are looked up first: all else waits for them.
    int left = Left(share);
    UnitView unit;
    unit.pages = PagesOf(share);
    unit.end_key = share.end_key;
    Lookup first[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      first[i].Start(args_, unit.pages, unit.end_key, left - i * S::kBlockKeys, S::kTileKeys);
    }
    const Thread thread = Thread::Hidden();
    constexpr uint32_t kStep = S::kWarps * S::kTileBytes;
    Query<S> query;
    query.Load(args_, entry, share.place, thread);
    const LaneCopy<S> copy(args_, thread);
    const int64_t head = share.place.kv_head * params.head_stride * S::kElementBytes + copy.column;
    unit.keys = static_cast<const char*>(params.k_cache) + head;
    unit.values = static_cast<const char*>(params.v_cache) + head;
    unit.entry = &entry;
    unit.row_tile = share.place.row_tile;
    unit.hidden_by_end = min(0, entry.end_key - unit.end_key - int{entry.q_len} + 1);
    // The compiler would rather add the parameters' addresses again for each tile.
    asm("" : "+l"(unit.keys), "+l"(unit.values), "+l"(unit.pages));
    int blocks = (share.end_key - share.begin_key - 1) / S::kBlockKeys + 1;
    bool bad = false;
    const uint32_t my_keys = SharedAddress(shared_.keys[0][thread.warp]);
    // Copies the tile of a step `ahead` steps from now, if there is one, to stage `stage`, given in bytes.
    const auto fetch = [&](const Lookup& lookup, int ahead, uint32_t stage) {
      const uint32_t slot = lookup.Slot(args_, &bad);
      if (ahead < blocks) copy.Start(args_, unit, slot, my_keys + stage, sizeof(shared_.keys));
      CommitAsync();
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) fetch(first[i], i, i * kStep);
    AllowDependentLaunch();  // see DecodeSplitKernel
    Lookup lookup;
    lookup.Start(args_, unit.pages, unit.end_key, left - kAhead * S::kBlockKeys, S::kTileKeys);
    Running<S> running, group, whole;
    running.Clear();
    const uint32_t key_offset = KeyOffset<S>(thread.lane);
    const typename Running<S>::ValueOffsets value_offsets(thread);
    const uint32_t all_values = SharedAddress(shared_.values[0][0]);
    uint32_t stage = 0;
    uint32_t stage_before = (S::kRing - 1) * kStep;
    int parity = 0;
    int chunk = share.begin;
    int of_chunk = entry.blocks;
    while (true) {
      Scores<S> scores;
      WaitAsync<kAhead - 1>();
      __syncwarp();
      MultiplyKeys<S>(my_keys + stage + key_offset, query, scores);
      PublishScores<S>(args_, unit, query, thread, left, __any_sync(0xffffffffu, bad), scores,
                       shared_.published[parity]);
      // Behind it all scores and values of this step are there, and those of the last one are no longer read.
      __syncthreads();
      const auto fetch_next = [&] {
        fetch(lookup, kAhead, stage_before);
        lookup.Start(args_, unit.pages, unit.end_key, left - (kAhead + 1) * S::kBlockKeys, S::kTileKeys);
      };
      if (S::kRing > 1) fetch_next();
      running.AddStep(shared_.published[parity], all_values + stage, value_offsets, thread);
      if (S::kRing == 1) {
        __syncthreads();
        fetch_next();
      }
      parity = 1 - parity;
      stage_before = stage;
      stage = stage == (S::kRing - 1) * kStep ? 0 : stage + kStep;
      left -= S::kBlockKeys;
      --blocks;
      if (--of_chunk > 0 && blocks > 0) continue;
      running.Close();
      Collect(share, thread, chunk, running, group, whole);
      if (blocks == 0) break;
      running.Clear();
      of_chunk = unit.entry->blocks;
      ++chunk;
    }
  }

  // The rows of a sequence without keys: 0, or NaN if it is not valid.
  __device__ void StoreConstant(const PlanEntry& entry, const UnitPlace& place) {
    const int rows = min(entry.q_len * args_.group - place.row_tile * S::kRows, S::kRows);
    const int columns = static_cast<int>(args_.params.head_dim) / 4;
    const Partial nothing = {{-INFINITY, entry.valid ? 0.0f : NAN}, {0.0f, 0.0f, 0.0f, 0.0f}};
    for (int i = static_cast<int>(threadIdx.x); i < rows * columns; i += S::kThreads) {
      const int row = place.row_tile * S::kRows + i / columns;
      const RowPlace of = RowPlace::Of(args_, entry.q_begin, place.kv_head, row);
      StoreRow(args_, RowStore::Of(args_, of), i % columns * 4, nothing);
    }
  }

  // Merges a chunk's sums with those of the chunks before it: `group` over the chunks of a group so far, `whole` over
  // the groups of a unit so far. What nobody else here will merge is left behind, or written if it is all.
  __device__ void Collect(const Share& share, const Thread& thread, int chunk, const Running<S>& running,
                          Running<S>& group, Running<S>& whole) {
    const PlanEntry& entry = share.entry;
    const UnitPlace& place = share.place;
    const int index = entry.GroupOf(chunk);
    const int first = index * entry.group_chunks;
    const bool share_ends = chunk == share.end - 1;
    const bool has_group_begin = share.begin <= first;
    const bool has_unit_begin = share.begin == 0;
    const bool few = args_.few && entry.chunks > 1;
    const int rows = min(entry.q_len * args_.group - place.row_tile * S::kRows, S::kRows);
    Running<S> left = running;  // behind, from chunk `from` on
    int from = chunk;
    bool and_whole = false;
    if (has_group_begin && !few) {
      if (chunk == first) {
        group = running;
      } else {
        group.Add(running);
      }
      left = group;
      from = first;
      if (chunk != min(first + entry.group_chunks, int{entry.chunks}) - 1) {
        if (!share_ends) return;
        and_whole = has_unit_begin && first > 0;
      } else if (has_unit_begin) {
        if (first == 0) {
          whole = group;
        } else {
          whole.Add(group);
        }
        if (chunk == entry.chunks - 1) return Finish(entry, place, thread, rows, whole);
        if (!share_ends) return;
        left = whole;
        from = 0;
      }
    }
#pragma unroll 1
    while (true) {
      const unsigned slot = few ? SlotOfFew(UnitIndex(args_, entry.q_begin, place), chunk)
                                : SlotOf(blockIdx.y * gridDim.x + blockIdx.x, from == 0, has_unit_begin,
                                         has_group_begin, index, chunk - first);
      Leave(slot, thread, rows, left);
      if (!and_whole) return;
      and_whole = false;
      left = whole;
      from = 0;
    }
  }

  // Leaves partial sums in a slot of the scratch.
  __device__ void Leave(unsigned slot, const Thread& thread, int rows, const Running<S>& sums) {
    const int head_dim = static_cast<int>(args_.params.head_dim);
    const uint32_t place = Scratch::Place(args_, slot, 0);
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
      const int softmax_row = 8 * n + thread.lane / 4;
      if (thread.warp == 0 && thread.lane % 4 == 0 && softmax_row < rows) {
        *Scratch::SoftmaxOf(args_, place + static_cast<unsigned>(softmax_row) * args_.slot_row) = sums.softmax[n];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 8 * n + thread.lane % 4 * 2 + i;
        if (row >= rows) continue;
        float* const out = Scratch::Out(args_, place + static_cast<unsigned>(row) * args_.slot_row);
#pragma unroll
        for (int tile = 0; tile < S::kOwnTiles; ++tile) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int column = Running<S>::Column(thread, tile, half);
            if (column < head_dim) out[column] = sums.out[tile][n][i + 2 * half];
          }
        }
      }
    }
  }

  // Writes the unit's rows.
  __device__ void Finish(const PlanEntry& entry, const UnitPlace& place, const Thread& thread, int rows,
                         const Running<S>& sums) {
    const PagedAttentionParams& params = args_.params;
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
      // Rows past the unit's take the last one's head.
      const int softmax_row = 8 * n + thread.lane / 4;
      const int known = place.row_tile * S::kRows + min(softmax_row, rows - 1);
      const RowPlace of = RowPlace::Of(args_, entry.q_begin, place.kv_head, known);
      float lse;
      const float of_row = FinishRow(args_, sums.softmax[n], RowEnd::Of(args_, of.head), &lse);
      const bool writes_lse = params.lse != nullptr && thread.warp == 0 && thread.lane % 4 == 0;
      if (writes_lse && softmax_row < rows) params.lse[of.at] = lse;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float factor = OfRow(of_row, i);
        const int row = 8 * n + thread.lane % 4 * 2 + i;
        if (row >= rows) continue;
        const int64_t at =
            RowPlace::Of(args_, entry.q_begin, place.kv_head, place.row_tile * S::kRows + row).at * params.head_dim;
        uint16_t* const out = static_cast<uint16_t*>(params.out) + at;
#pragma unroll
        for (int tile = 0; tile < S::kOwnTiles; ++tile) {
          const float low = sums.out[tile][n][i] * factor;
          const float high = sums.out[tile][n][i + 2] * factor;
          const uint32_t two = params.dtype == DType::kBF16 ? Pack<__nv_bfloat16>(low, high) : Pack<__half>(low, high);
          const int column = Running<S>::Column(thread, tile, 0);
          const int other = Running<S>::Column(thread, tile, 1);
          if (column < params.head_dim) out[column] = static_cast<uint16_t>(two);
          if (other < params.head_dim) out[other] = static_cast<uint16_t>(two >> 16);
        }
      }
    }
  }

  const DecodeArgs& args_;
  SplitShared<S>& shared_;
  DecodePlan<S> plan_;
};

// Asks for all of a kernel's parameters at once, instead of waiting for one part after the other.
template <typename Params>
__device__ inline void FetchConstants(const Params& params) {
  constexpr int kLine = 64 / sizeof(uint32_t);
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(&params);
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Params) / sizeof(uint32_t)); i += kLine) any |= words[i];
  asm volatile("" ::"r"(any));
}

template <typename S>
__global__ void __maxnreg__(S::kDim <= 128 && S::kRowTiles == 1 ? kSplitRegisters : 255)
    DecodeSplitKernel(const __grid_constant__ DecodeArgs args) {
#ifdef __CUDA_ARCH__
  // Code that is never launched is not to be compiled.
  if constexpr (CodeIsDeep(__CUDA_ARCH__) == S::kDeep) {
    extern __shared__ __align__(16) char dynamic_shared[];
    if (args.wait_first) {
      FetchConstants(args);
      WaitForPreviousKernel();
    }
    // Else when the first keys are on their way: the blocks of the next kernel are not to hold those of this one up.
    // But behind the prefill path there may be nothing to do here.
    if (args.few || !args.wait_first) AllowDependentLaunch();
    if (MayHaveDecodeRows(args)) {
      Worker<S>(args, *reinterpret_cast<SplitShared<S>*>(dynamic_shared)).Run();
    }
    // One block waits: when this kernel has ended, so has the one before, of which it needs nothing.
    if (blockIdx.x == 0 && blockIdx.y == 0) WaitForPreviousKernel();
  }
#endif
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_SPLIT_KV_KERNEL_CUH_
