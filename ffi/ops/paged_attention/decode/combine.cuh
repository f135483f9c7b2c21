// The second kernel of the decode path: merges the partial results of the units that several teams computed.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_COMBINE_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_COMBINE_CUH_

#include <cstdint>

#include "ffi/device/dependent_launch.cuh"
#include "ffi/ops/paged_attention/decode/attention_state.cuh"
#include "ffi/ops/paged_attention/decode/tile_scheduler.cuh"
#include "ffi/ops/paged_attention/padding_rows.cuh"

namespace xla_gpu::decode {

inline constexpr int kCombineWarps = 4;
inline constexpr int kCombineThreads = 32 * kCombineWarps;
inline constexpr int kMaxTeams = kMaxSms * kDecodeBlocksPerSm;
inline constexpr int kCombineParts = MergeChain::kParts;  // partial results that a warp has in flight

template <int kBlockKeys, int kRows>
struct CombineShared {
  uint16_t jobs[kMaxTeams];
  int jobs_of_warp[kCombineWarps];
  int rows_of_warp[kCombineWarps];
  // Where the partial results of a warp's row are in the scratch, in order. The highest bit: a group begins.
  uint32_t parts[kCombineWarps][kMaxChunks];
  RowStore store[kCombineWarps];  // of a warp's row; for want of registers
  typename Plan<kBlockKeys, kRows>::Shared plan[kCombineWarps];
};

// Sums over partial results in order: of a group one after the other, then the groups.
struct PartSums {
  Partial group;
  Partial unit;
  bool any_group = false;
  bool any_unit = false;

  __device__ void Add(const Partial& part, bool begins_group) {
    if (!begins_group) return group.Add(part);
    CloseGroup();
    group = part;
    any_group = true;
  }
  __device__ void CloseGroup() {
    if (!any_group) return;
    if (any_unit) {
      unit.Add(group);
    } else {
      unit = group;
    }
    any_unit = true;
  }
};

// What is left to blocks without work: one of them waits, so that when this kernel has ended, so has the one before.
// The others make room.
__device__ inline void StandIn() {
  if (blockIdx.x == 0) WaitForPreviousKernel();
}

// A merging block, each warp of which merges row after row. A job is a unit that several teams have, known by the
// second of them, for all heads of its set.
template <int kDim, int kBlockKeys, int kRows>
class Merger {
 public:
  using WarpPlan = Plan<kBlockKeys, kRows>;
  using Shared = CombineShared<kBlockKeys, kRows>;

  __device__ Merger(const DecodeArgs& args, Shared& shared) : args_(args), shared_(shared) {}

  __device__ void Run() {
    const typename WarpPlan::Start start(args_);
    WarpPlan plan(args_, shared_.plan[Warp()], start);
    int jobs, rows;
    ListJobs(plan, &jobs, &rows);
    const unsigned of_row = static_cast<unsigned>(jobs * args_.heads);
    const unsigned tasks = of_row * static_cast<unsigned>(rows);
    // Memory is busy with K and V, and instructions come through it too: what is to run when the kernel before has
    // ended is gone through while it still runs, with nothing read or written.
    bool rehearsal = true;
    for (unsigned i = Warp() * gridDim.x + blockIdx.x; i < tasks; i += gridDim.x * kCombineWarps) {
      const unsigned row = i / of_row;
      const unsigned rest = i - row * of_row;
      const unsigned job = rest / static_cast<unsigned>(args_.heads);
      const int parts =
          Prepare(plan, shared_.jobs[job], static_cast<int>(rest - job * args_.heads), static_cast<int>(row));
      if (parts == 0) continue;
      const Batch first(shared_.parts[Warp()], 0, parts);
#pragma unroll 1
      while (true) {
        MergeRow(first, parts, rehearsal);
        if (!rehearsal) break;
        WaitForPreviousKernel();
        rehearsal = false;
      }
    }
    if (rehearsal) StandIn();
  }

 private:
  __device__ static int Warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ static int Lane() { return static_cast<int>(threadIdx.x % 32); }

  // Each thread looks at the beginnings of some teams' parts of the line. `rows`: most rows of a job.
  __device__ void ListJobs(WarpPlan& plan, int* jobs, int* rows) {
    *jobs = 0;
    *rows = 0;
    for (int first = 1; first < args_.teams; first += kCombineThreads) {
      const int team = first + static_cast<int>(threadIdx.x);
      const uint32_t begin = plan.TeamBegin(team);
      int mine = 0;
      plan.FirstWindow();
      while (true) {
        if (team < args_.teams && plan.Holds(begin)) mine = RowsOf(plan, team, begin);
        if (plan.LastWindow()) break;
        plan.NextWindow();
      }
      const unsigned found = __ballot_sync(0xffffffffu, mine > 0);
      const int most = __reduce_max_sync(0xffffffffu, mine);
      if (first > 1) __syncthreads();  // what stood there is no longer read
      if (Lane() == 0) {
        shared_.jobs_of_warp[Warp()] = __popc(found);
        shared_.rows_of_warp[Warp()] = most;
      }
      __syncthreads();
      int place = *jobs + __popc(found & ((1u << Lane()) - 1));
#pragma unroll
      for (int warp = 0; warp < kCombineWarps; ++warp) {
        if (warp < Warp()) place += shared_.jobs_of_warp[warp];
        *jobs += shared_.jobs_of_warp[warp];
        *rows = max(*rows, shared_.rows_of_warp[warp]);
      }
      if (mine > 0) shared_.jobs[place] = static_cast<uint16_t>(team);
    }
    __syncthreads();
  }

  // Of the job of `team`, whose part of the line begins in the window; 0 if it is not the second team of a unit.
  __device__ int RowsOf(const WarpPlan& plan, int team, uint32_t begin) const {
    const PlanEntry& entry = plan.Search(begin);
    const uint32_t unit_begin = begin - (begin - entry.begin) % entry.length;
    const bool is_second = unit_begin != begin && unit_begin >= plan.TeamBegin(team - 1);
    if (!is_second || entry.ChunkFrom(args_, begin - unit_begin) == entry.chunks) return 0;
    return min(entry.q_len * args_.group, kRows);
  }

  // By a warp: lists the partial results of a job's row, and returns how many there are; 0 if there is no such row.
  __device__ int Prepare(WarpPlan& plan, int second_team, int head, int row) {
    const uint32_t begin = plan.TeamBegin(second_team);
    const PlanEntry& entry = plan.At(plan.Find(begin));
    const UnitPlace place = UnitPlace::Of(args_, entry, static_cast<int>((begin - entry.begin) / entry.length), head);
    const int unit_row = place.row_tile * kRows + row;
    if (unit_row >= entry.q_len * args_.group) return 0;
    const auto owner_of = [&](int chunk) { return (place.begin + entry.Place(args_, chunk)) / plan.PerTeam(); };
    // The chunks whose groups stand merged in the place of the unit's first one.
    const int owned = entry.ChunkFrom(args_, begin - place.begin);
    const int merged = owned == 0 ? 0 : entry.GroupOf(owned) * entry.group_chunks;
    int parts = 0;
    __syncwarp();  // what stood there is no longer read
    shared_.store[Warp()] = RowStore::Of(args_, RowPlace::Of(args_, entry.q_begin, place.kv_head, unit_row));
#pragma unroll 1
    for (int base = 0; base < entry.chunks; base += 32) {
      const int chunk = base + Lane();
      const int group = entry.GroupOf(chunk);
      const int first = group * entry.group_chunks;
      const unsigned owner = owner_of(chunk);
      const bool has_group_begin = owner == owner_of(first);
      // A part begins with each chunk, but for those whose owner has them merged with the group's first one.
      const bool begins = chunk < entry.chunks && (chunk < merged ? chunk == 0 : chunk == first || !has_group_begin);
      const unsigned slot = SlotOf(owner * static_cast<unsigned>(args_.heads) + static_cast<unsigned>(head), chunk == 0,
                                   static_cast<int>(owner) == second_team - 1, has_group_begin, group, chunk - first);
      const unsigned found = __ballot_sync(0xffffffffu, begins);
      if (begins) {
        shared_.parts[Warp()][parts + __popc(found & ((1u << Lane()) - 1))] =
            Scratch::Place(args_, slot, row) | (chunk == first ? 1u << 31 : 0);
      }
      parts += __popc(found);
    }
    __syncwarp();
    return parts;
  }

  // Partial results that are fetched at once.
  struct Batch {
    uint32_t place;                  // lane i: of the i-th
    uint32_t column[kCombineParts];  // of this lane's first columns of each
    unsigned groups;                 // a bit for each that begins a group
    bool flat;                       // these are all, and all do

    // Those of the warp's list from `begin` on. Past its end the last one again.
    __device__ Batch(const uint32_t* list, int begin, int parts) {
      const uint32_t mine = list[min(begin + Lane() % kCombineParts, parts - 1)];
      place = mine & ~(1u << 31);
#pragma unroll
      for (int i = 0; i < kCombineParts; ++i) {
        column[i] = __shfl_sync(0xffffffffu, place, i) + static_cast<unsigned>(Lane());
      }
      groups = __ballot_sync(0xffffffffu, mine >> 31 != 0);
      flat = groups == 0xffffffffu && parts <= kCombineParts;
    }
  };

  // By a warp: merges a row's partial results, of which `batch` are the first ones, and writes it. In rehearsal nothing
  // is read or written.
  __device__ void MergeRow(Batch batch, int parts, bool rehearsal) const {
    const int head_dim = static_cast<int>(args_.params.head_dim);
    const uint32_t* const list = shared_.parts[Warp()];
#pragma unroll 1
    for (int base = 0; base < kDim; base += 128) {
      const int column = base + Lane() * 4;
      const bool read = column < head_dim && !rehearsal;
      if (base > 0) batch = Batch(list, 0, parts);
      PartSums sums;
#pragma unroll 1
      for (int left = parts;;) {
        const Softmax softmax = LoadSoftmax(Scratch::SoftmaxOf(args_, batch.place), !rehearsal);
        float4 outs[kCombineParts];
#pragma unroll
        for (int i = 0; i < kCombineParts; ++i) {
          outs[i] = LoadColumns(Scratch::Out(args_, batch.column[i] + static_cast<unsigned>(base / 4)), read);
        }
        if (batch.flat) {
          sums.unit = MergeChain(softmax).Merge(outs, parts);
          break;
        }
#pragma unroll
        for (int i = 0; i < kCombineParts; ++i) {
          const Partial part = {{__shfl_sync(0xffffffffu, softmax.max, i), __shfl_sync(0xffffffffu, softmax.sum, i)},
                                outs[i]};
          if (i < left) sums.Add(part, (batch.groups >> i & 1) != 0);
        }
        left -= kCombineParts;
        if (left <= 0 || rehearsal) break;
        batch = Batch(list, parts - left, parts);
      }
      sums.CloseGroup();
      if (column < head_dim) StoreRow(args_, shared_.store[Warp()], column, sums.unit, !rehearsal);
    }
  }

  const DecodeArgs& args_;
  Shared& shared_;
};

// Writes the rows that no sequence owns, where that is the decode path's business.
__device__ inline void FillRowsOfNoSequence(const DecodeArgs& args) {
  if (!args.fill_unowned || blockIdx.x != 0) return;
  if (args.params.dtype == DType::kBF16) {
    FillUnownedRows<__nv_bfloat16>(args.params, 0, 1);
  } else {
    FillUnownedRows<__half>(args.params, 0, 1);
  }
}

// Merges what the workers have left behind. One or two blocks for each SM, which find room beside those of the kernel
// before, and know what to do when it ends.
template <int kDim, int kBlockKeys, int kRows>
__global__ void __maxnreg__(kCombineRegisters) DecodeCombineKernel(const __grid_constant__ DecodeArgs args) {
  extern __shared__ __align__(16) char dynamic_shared[];
  AllowDependentLaunch();  // of the prefill path
  FillRowsOfNoSequence(args);
  if (!MayHaveDecodeRows(args)) return StandIn();
  using M = Merger<kDim, kBlockKeys, kRows>;
  M(args, *reinterpret_cast<typename M::Shared*>(dynamic_shared)).Run();
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_COMBINE_CUH_
