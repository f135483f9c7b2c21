// The split kernel of the decode path: each block is a worker and computes the chunks of keys that it owns.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_KERNEL_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_KERNEL_CUH_

#include <cstdint>

#include "ffi/device/dependent_launch.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_merge.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_plan.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_tile.cuh"

namespace xla_gpu::decode {

template <typename S>
using DecodePlan = Plan<S::kBlockKeys, S::kRows>;

// The chunks of a unit that are a worker's.
struct Share {
  int begin;
  int end;
};

template <typename S>
struct SplitShared {
  alignas(1024) char keys[S::kRing][S::kWarps][S::kTileBytes];
  alignas(1024) char values[S::kRing][S::kWarps][S::kTileBytes];
  Published<S> published[2];  // of a step and the one before it, in turns
  typename DecodePlan<S>::Shared plan[S::kWarps];
  uint32_t end[S::kWarps];  // of the team's part of the line
};

// Brings the page table into L2 while nobody knows yet who needs which part of it. Not a large one, of which little is
// read.
__device__ inline void PrefetchPages(const DecodeArgs& args) {
  constexpr unsigned kLine = 32;  // page numbers
  constexpr unsigned kMostLines = 4096;
  const uint64_t pages = static_cast<uint64_t>(args.max_seqs) * args.pages_per_seq;
  const unsigned line = (threadIdx.x * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  if (pages > kMostLines * kLine || line * kLine >= pages) return;
  PrefetchToL2(args.params.block_tables + line * kLine);
}

// A worker's walk over the line.
template <typename S>
class Worker {
 public:
  __device__ Worker(const DecodeArgs& args, SplitShared<S>& shared) : args_(args), shared_(shared) {}

  __device__ void Run() {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const typename DecodePlan<S>::Start start(args_);
    PrefetchPages(args_);
    DecodePlan<S> plan(args_, shared_.plan[warp], start);
    const uint32_t begin = plan.TeamBegin(static_cast<int>(blockIdx.y));
    const uint32_t end = min(begin + plan.PerTeam(), plan.Total());
    if (begin >= end) return;
    shared_.end[warp] = end;
    const PlanEntry* entry = plan.Find(begin);
    const uint32_t into = begin - entry->begin;
    int unit = into < entry->length ? 0 : static_cast<int>(into / entry->length);
    // A chunk that began before belongs to another team.
    int chunk = entry->ChunkFrom(args_, into - static_cast<unsigned>(unit) * entry->length);
    while (true) {
      const UnitPlace place = UnitPlace::Of(args_, *entry, unit, static_cast<int>(blockIdx.x));
      if (place.begin + entry->Place(args_, chunk) >= end) return;
      if (chunk < entry->chunks) RunUnit(*entry, place, plan.SequenceOf(entry), chunk);
      chunk = 0;
      if (++unit == entry->Units(args_)) {
        if (entry->End(args_) >= end) return;
        entry = plan.Next(entry);
        unit = 0;
      }
    }
  }

 private:
  // Computes the unit's chunks from `chunk` on, as far as they are this worker's.
  __device__ void RunUnit(const PlanEntry& entry, const UnitPlace& place, int sequence, int chunk) {
    const PagedAttentionParams& params = args_.params;
    if (entry.end_key == entry.first_key) return StoreConstant(entry, place);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int end = entry.ChunkFrom(args_, shared_.end[warp] - place.begin);
    const Share share = {chunk, end};
    const int begin_key = entry.first_key + chunk * entry.blocks * S::kBlockKeys;
    const int end_key = end == entry.chunks ? entry.end_key : entry.first_key + end * entry.blocks * S::kBlockKeys;

    // Each warp has a tile of every block of keys. Past the last key it fetches that key again, and takes its scores
    // away. Its pages are looked up first: all else waits for them.
    constexpr int kAhead = S::kRing == 1 ? 1 : S::kRing - 1;  // steps
    constexpr uint32_t kStep = S::kWarps * S::kTileBytes;
    int left = end_key - begin_key - warp * S::kTileKeys;  // keys from the tile's first one on; may be negative
    UnitView unit;
    unit.pages = params.block_tables + static_cast<uint64_t>(sequence) * args_.pages_per_seq;
    unit.end_key = end_key;
    Lookup first[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) first[i].Start(args_, unit, left - i * S::kBlockKeys, S::kTileKeys);

    const LaneCopy<S> copy(args_);
    const int64_t head = place.kv_head * params.head_stride * S::kElementBytes + copy.column;
    unit.keys = static_cast<const char*>(params.k_cache) + head;
    unit.values = static_cast<const char*>(params.v_cache) + head;
    unit.entry = &entry;
    unit.row_tile = place.row_tile;
    unit.hidden_by_end = min(0, entry.end_key - end_key - int{entry.q_len} + 1);
    // The compiler would rather add the parameters' addresses again for each tile.
    asm("" : "+l"(unit.keys), "+l"(unit.values), "+l"(unit.pages));
    int blocks = (end_key - begin_key - 1) / S::kBlockKeys + 1;
    bool bad = false;
    const uint32_t my_keys = SharedAddress(shared_.keys[0][warp]);
    // Copies the tile of a step `ahead` steps from now, if there is one, to stage `stage`, given in bytes.
    const auto fetch = [&](const Lookup& lookup, int ahead, uint32_t stage) {
      const uint32_t slot = lookup.Slot(args_, &bad);
      if (ahead < blocks) copy.Start(args_, unit, slot, my_keys + stage, sizeof(shared_.keys));
      CommitAsync();
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) fetch(first[i], i, i * kStep);
    Lookup lookup;
    lookup.Start(args_, unit, left - kAhead * S::kBlockKeys, S::kTileKeys);
    Query<S> query;
    query.Load(args_, entry, place);

    Running<S> running, group, whole;
    running.Clear();
    const uint32_t key_offset = KeyOffset<S>();
    const typename Running<S>::ValueOffsets value_offsets;
    const uint32_t all_values = SharedAddress(shared_.values[0][0]);
    uint32_t stage = 0;
    uint32_t stage_before = (S::kRing - 1) * kStep;
    int parity = 0;
    int of_chunk = entry.blocks;
    while (true) {
      Scores<S> scores;
      WaitAsync<kAhead - 1>();
      __syncwarp();
      MultiplyKeys<S>(my_keys + stage + key_offset, query, scores);
      PublishScores<S>(args_, unit, query, left, __any_sync(0xffffffffu, bad), scores, shared_.published[parity]);
      // Behind it all scores and values of this step are there, and those of the last one are no longer read.
      __syncthreads();
      if constexpr (S::kRing > 1) {
        fetch(lookup, kAhead, stage_before);
        lookup.Start(args_, unit, left - (kAhead + 1) * S::kBlockKeys, S::kTileKeys);
      }
      running.AddStep(shared_.published[parity], all_values + stage, value_offsets);
      if constexpr (S::kRing == 1) {
        __syncthreads();
        fetch(lookup, kAhead, stage_before);
        lookup.Start(args_, unit, left - (kAhead + 1) * S::kBlockKeys, S::kTileKeys);
      }
      parity = 1 - parity;
      stage_before = stage;
      stage = stage == (S::kRing - 1) * kStep ? 0 : stage + kStep;
      left -= S::kBlockKeys;
      --blocks;
      if (--of_chunk > 0 && blocks > 0) continue;
      running.Close();
      Collect(*unit.entry, place, share, chunk, running, group, whole);
      if (blocks == 0) break;
      running.Clear();
      of_chunk = unit.entry->blocks;
      ++chunk;
    }
    __syncthreads();  // what the next unit overwrites is no longer read
  }

  // The rows of a sequence without keys: 0, or NaN if it is not valid.
  __device__ void StoreConstant(const PlanEntry& entry, const UnitPlace& place) {
    const int rows = min(entry.q_len * args_.group - place.row_tile * S::kRows, S::kRows);
    const int columns = static_cast<int>(args_.params.head_dim) / 4;
    const Partial nothing = {{-INFINITY, entry.valid ? 0.0f : NAN}, {0.0f, 0.0f, 0.0f, 0.0f}};
    for (int i = static_cast<int>(threadIdx.x); i < rows * columns; i += S::kThreads) {
      const int row = place.row_tile * S::kRows + i / columns;
      StoreRow(args_, RowPlace::Of(args_, entry.q_begin, place.kv_head, row), i % columns * 4, nothing);
    }
  }

  // Merges a chunk's sums with those of the chunks before it: `group` over the chunks of a group so far, `whole` over
  // the groups of a unit so far.
  __device__ void Collect(const PlanEntry& entry, const UnitPlace& place, const Share& share, int chunk,
                          const Running<S>& running, Running<S>& group, Running<S>& whole) {
    const int first = chunk / kGroupChunks * kGroupChunks;
    const bool share_ends = chunk == share.end - 1;
    const bool has_group_begin = share.begin <= first;
    const bool has_unit_begin = share.begin == 0;
    const int rows = min(entry.q_len * args_.group - place.row_tile * S::kRows, S::kRows);
    if (args_.few && entry.chunks > 1) {
      return Leave(SlotOfFew(UnitIndex(args_, entry.q_begin, place), chunk), rows, running);
    }
    const auto leave = [&](int from, const Running<S>& sums) {
      Leave(SlotOf(from, blockIdx.y * gridDim.x + blockIdx.x, has_unit_begin, has_group_begin), rows, sums);
    };
    if (!has_group_begin) return leave(chunk, running);
    if (chunk == first) {
      group = running;
    } else {
      group.Add(running);
    }
    if (chunk != min(first + kGroupChunks, entry.chunks) - 1) {
      if (!share_ends) return;
      leave(first, group);
      if (has_unit_begin && first > 0) leave(0, whole);
      return;
    }
    if (!has_unit_begin) return leave(first, group);
    if (first == 0) {
      whole = group;
    } else {
      whole.Add(group);
    }
    if (chunk == entry.chunks - 1) {
      Finish(entry, place, rows, whole);
    } else if (share_ends) {
      leave(0, whole);
    }
  }

  // Leaves partial sums in a slot of the scratch.
  __device__ void Leave(unsigned slot, int rows, const Running<S>& sums) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int head_dim = static_cast<int>(args_.params.head_dim);
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
      const int softmax_row = 8 * n + lane / 4;
      if (threadIdx.x < 32 && lane % 4 == 0 && softmax_row < rows) {
        *Scratch::Of(args_, slot, softmax_row) = sums.softmax[n];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 8 * n + lane % 4 * 2 + i;
        if (row >= rows) continue;
        float* const out = Scratch::Out(args_, slot, row);
#pragma unroll
        for (int tile = 0; tile < S::kOwnTiles; ++tile) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int column = Running<S>::Column(tile, half);
            if (column < head_dim) out[column] = sums.out[tile][n][i + 2 * half];
          }
        }
      }
    }
  }

  // Writes the unit's rows.
  __device__ void Finish(const PlanEntry& entry, const UnitPlace& place, int rows, const Running<S>& sums) {
    const PagedAttentionParams& params = args_.params;
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
      // Rows past the unit's take the last one's head.
      const int softmax_row = 8 * n + lane / 4;
      const int known = place.row_tile * S::kRows + min(softmax_row, rows - 1);
      const RowPlace of = RowPlace::Of(args_, entry.q_begin, place.kv_head, known);
      float lse;
      const float of_row = FinishRow(args_, sums.softmax[n], of.head, &lse);
      if (params.lse != nullptr && threadIdx.x < 32 && lane % 4 == 0 && softmax_row < rows) params.lse[of.at] = lse;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float factor = OfRow(of_row, i);
        const int row = 8 * n + lane % 4 * 2 + i;
        if (row >= rows) continue;
        const int64_t at =
            RowPlace::Of(args_, entry.q_begin, place.kv_head, place.row_tile * S::kRows + row).at * params.head_dim;
        uint16_t* const out = static_cast<uint16_t*>(params.out) + at;
#pragma unroll
        for (int tile = 0; tile < S::kOwnTiles; ++tile) {
          const float low = sums.out[tile][n][i] * factor;
          const float high = sums.out[tile][n][i + 2] * factor;
          const uint32_t two = params.dtype == DType::kBF16 ? Pack<__nv_bfloat16>(low, high) : Pack<__half>(low, high);
          const int column = Running<S>::Column(tile, 0);
          const int other = Running<S>::Column(tile, 1);
          if (column < params.head_dim) out[column] = static_cast<uint16_t>(two);
          if (other < params.head_dim) out[other] = static_cast<uint16_t>(two >> 16);
        }
      }
    }
  }

  const DecodeArgs& args_;
  SplitShared<S>& shared_;
};

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kRegisterBlocks)
    DecodeSplitKernel(const __grid_constant__ DecodeArgs args) {
#ifdef __CUDA_ARCH__
  // Code that is never launched is not to be compiled.
  if constexpr (CodeIsDeep(__CUDA_ARCH__) == S::kDeep) {
    extern __shared__ __align__(16) char dynamic_shared[];
    AllowDependentLaunch();
    if (MayHaveDecodeRows(args)) {
      Worker<S>(args, *reinterpret_cast<SplitShared<S>*>(dynamic_shared)).Run();
    }
    // One block waits: when this kernel has ended, so has the one before, of which it needs nothing.
    if (blockIdx.x == 0 && blockIdx.y == 0) WaitForPreviousKernel();
  }
#endif
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_KERNEL_CUH_
