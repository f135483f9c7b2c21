// The second kernel of the decode path: merges the partial results of the units that several teams computed.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_COMBINE_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_COMBINE_CUH_

#include <cstdint>

#include "ffi/device/dependent_launch.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_merge.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_plan.cuh"
#include "ffi/ops/paged_attention/paged_attention_unowned.cuh"

namespace xla_gpu::decode {

inline constexpr int kCombineWarps = kMaxGroups;  // a warp for each group of a row's chunks
inline constexpr int kCombineThreads = 32 * kCombineWarps;
inline constexpr int kMaxTeams = kMaxSms * kDecodeBlocksPerSm;

template <int kDim, int kBlockKeys, int kRows>
struct CombineShared {
  // Of each warp's group, merged:
  float4 out[kCombineWarps][kDim / 4];
  Softmax softmax[kCombineWarps];
  uint16_t jobs[kMaxTeams];
  int jobs_of_warp[kCombineWarps];
  int rounds_of_warp[kCombineWarps];
  typename Plan<kBlockKeys, kRows>::Shared plan[kCombineWarps];
};

// What a warp has to do: the partial results of a row in a group of chunks.
struct MergeTask {
  int count;       // of partial results
  uint32_t part;   // lane i: where the i-th is in the scratch
  int groups;      // that the row has partial results of, if this warp has its first one, else 0
  int next_group;  // of those: the second one's warp, counted from this one; the others follow
  RowPlace place;  // of the row
  RowEnd end;
};

// A block that merges rows. It turns to one unit and kv head at a time, and there to as many rows at once as it has
// warps for: a round.
template <int kDim, int kBlockKeys, int kRows>
class Merger {
 public:
  using WarpPlan = Plan<kBlockKeys, kRows>;
  using Shared = CombineShared<kDim, kBlockKeys, kRows>;

  __device__ Merger(const DecodeArgs& args, Shared& shared) : args_(args), shared_(shared) {}

  // Whatever the teams have left behind.
  __device__ void Run() {
    const typename WarpPlan::Start start(args_);
    WarpPlan plan(args_, shared_.plan[Warp()], start);
    int jobs, rounds;
    ListJobs(plan, &jobs, &rounds);
    const unsigned of_round = static_cast<unsigned>(jobs * args_.heads);
    const unsigned tasks = of_round * static_cast<unsigned>(rounds);
    for (unsigned i = blockIdx.x; i < tasks; i += gridDim.x) {
      const unsigned round = i / of_round;
      const unsigned rest = i - round * of_round;
      const unsigned job = rest / static_cast<unsigned>(args_.heads);
      Merge(PrepareJob(plan, shared_.jobs[job], static_cast<int>(rest - job * args_.heads), static_cast<int>(round)));
    }
    Wait();
  }

  // Where there are few units: every chunk has left its result, unless it is the only one.
  __device__ void RunFew() {
    const typename WarpPlan::Start start(args_);
    const unsigned units = static_cast<unsigned>(args_.few_units);
    for (unsigned i = blockIdx.x; i < units * static_cast<unsigned>(args_.slot_rows); i += gridDim.x) {
      const unsigned round = i / units;
      MergeTask task = {};
      if (FindUnit(start, i - round * units)) task = PrepareFew(i - round * units, static_cast<int>(round));
      // A block has no more to do behind a unit's last row.
      if (__syncthreads_or(task.count != 0)) Merge(task);
    }
    Wait();
  }

 private:
  __device__ static int Warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ static int Lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ static int Groups(const PlanEntry& entry) { return (entry.chunks + kGroupChunks - 1) / kGroupChunks; }
  // A power of two, so that no row's warps are in two blocks.
  __device__ static int WarpsOfRow(const PlanEntry& entry) { return 1 << (32 - __clz(Groups(entry) - 1)); }

  // A job is a unit that several teams have, known by the second of them, for all heads of its set. Each thread looks
  // at the beginnings of some teams' parts of the line. `rounds`: of the longest job.
  __device__ void ListJobs(WarpPlan& plan, int* jobs, int* rounds) {
    *jobs = 0;
    *rounds = 0;
    for (int first = 1; first < args_.teams; first += kCombineThreads) {
      const int team = first + static_cast<int>(threadIdx.x);
      const uint32_t begin = plan.TeamBegin(team);
      int mine = 0;
      plan.FirstWindow();
      while (true) {
        if (team < args_.teams && plan.Holds(begin)) mine = RoundsOf(plan, team, begin);
        if (plan.LastWindow()) break;
        plan.NextWindow();
      }
      const unsigned found = __ballot_sync(0xffffffffu, mine > 0);
      const int longest = __reduce_max_sync(0xffffffffu, mine);
      if (first > 1) __syncthreads();  // what stood there is no longer read
      if (Lane() == 0) {
        shared_.jobs_of_warp[Warp()] = __popc(found);
        shared_.rounds_of_warp[Warp()] = longest;
      }
      __syncthreads();
      int place = *jobs + __popc(found & ((1u << Lane()) - 1));
#pragma unroll
      for (int warp = 0; warp < kCombineWarps; ++warp) {
        if (warp < Warp()) place += shared_.jobs_of_warp[warp];
        *jobs += shared_.jobs_of_warp[warp];
        *rounds = max(*rounds, shared_.rounds_of_warp[warp]);
      }
      if (mine > 0) shared_.jobs[place] = static_cast<uint16_t>(team);
    }
    __syncthreads();
  }

  // Of the job of `team`, whose part of the line begins in the window; 0 if it is not the second team of a unit.
  __device__ int RoundsOf(const WarpPlan& plan, int team, uint32_t begin) const {
    const PlanEntry& entry = plan.Search(begin);
    const uint32_t unit_begin = begin - (begin - entry.begin) % entry.length;
    const bool is_second = unit_begin != begin && unit_begin >= plan.TeamBegin(team - 1);
    if (!is_second || entry.ChunkFrom(args_, begin - unit_begin) == entry.chunks) return 0;
    const int rows_at_once = kCombineWarps / WarpsOfRow(entry);
    return (min(entry.q_len * args_.group, kRows) + rows_at_once - 1) / rows_at_once;
  }

  __device__ MergeTask PrepareJob(WarpPlan& plan, int second_team, int head, int round) {
    const uint32_t begin = plan.TeamBegin(second_team);
    const PlanEntry& entry = *plan.Find(begin);
    const UnitPlace place =
        UnitPlace::Of(args_, entry, static_cast<int>((begin - entry.begin) / entry.length), head);
    MergeTask task;
    int first, row;
    Prepare(entry, place, round, &task, &first, &row);
    const int chunk = first + Lane() % kGroupChunks;
    const auto owner_of = [&](int of) {
      return static_cast<int>((place.begin + entry.Place(args_, of)) / plan.PerTeam());
    };
    const int owner = owner_of(chunk);
    const bool has_group_begin = owner == owner_of(first);
    // The chunks whose groups stand merged in the place of the unit's first one.
    const int merged = entry.ChunkFrom(args_, begin - place.begin) / kGroupChunks * kGroupChunks;
    // A part begins with each chunk, but for those whose owner has them merged with the group's first one.
    const bool begins = chunk < merged ? chunk == 0 : chunk == first || !has_group_begin;
    const unsigned slot = SlotOf(chunk, static_cast<unsigned>(owner * args_.heads + head), owner == second_team - 1,
                                 has_group_begin);
    unsigned left = __ballot_sync(0xffffffffu, Lane() < task.count && begins);
    task.count = __popc(left);
    int from = 0;  // whose slot this lane wants
#pragma unroll
    for (int i = 0; i < kGroupChunks; ++i) {
      if (i == Lane()) from = __ffs(static_cast<int>(left)) - 1;
      left &= left - 1;
    }
    task.part = Scratch::Place(args_, __shfl_sync(0xffffffffu, slot, max(from, 0)), row);
    const int together = max(merged / kGroupChunks, 1);
    if (task.groups > 0) task.groups -= together - 1;
    task.next_group = together;
    return task;
  }

  // Looks for the sequence of a unit, which has several chunks, by its index, and leaves its entry in shared memory.
  __device__ bool FindUnit(const typename WarpPlan::Start& start, unsigned unit) {
    const int live = start.num_seqs <= args_.max_seqs ? start.num_seqs : 0;
    bool ok = true;
    for (int s = Lane(); s < live; s += 32) {
      ok = ok && (s < 32 ? start.metadata : Metadata::Load(args_, s)).InOrder(args_);
    }
    const bool in_order = __all_sync(0xffffffffu, ok);
    const int tile = static_cast<int>(unit / static_cast<unsigned>(args_.params.num_kv_heads));
    bool found = false;
    for (int first = 0; first < live; first += 32) {
      const int s = first + Lane();
      const Metadata metadata = first == 0 ? start.metadata : Metadata::Load(args_, s);
      bool owned = s < live;
      if (!in_order) owned = owned && LoadSequence(args_.params, s, false).owned;
      const PlanEntry entry = MakePlanEntry<kBlockKeys, kRows>(args_, owned, metadata);
      const int row_tile = tile - entry.q_begin * args_.tiles_per_token;
      const bool mine = entry.chunks > 1 && 0 <= row_tile && row_tile < entry.tiles;
      if (mine) shared_.plan[Warp()].entries[0] = entry;
      found = found || __any_sync(0xffffffffu, mine);
    }
    __syncwarp();
    return found;
  }

  __device__ MergeTask PrepareFew(unsigned unit, int round) {
    const PlanEntry& entry = shared_.plan[Warp()].entries[0];
    const int tile = static_cast<int>(unit / static_cast<unsigned>(args_.params.num_kv_heads));
    const UnitPlace place = {static_cast<int>(unit - tile * static_cast<unsigned>(args_.params.num_kv_heads)),
                             tile - entry.q_begin * args_.tiles_per_token, 0};
    MergeTask task;
    int first, row;
    Prepare(entry, place, round, &task, &first, &row);
    task.part = Scratch::Place(args_, SlotOfFew(unit, first + Lane() % kGroupChunks), row);
    return task;
  }

  // What this warp has to do in a round where every chunk has left its result, but for where that is: in slots of its
  // group's chunks from `first` on, there in row `row`.
  __device__ void Prepare(const PlanEntry& entry, const UnitPlace& place, int round, MergeTask* task, int* first,
                          int* row) const {
    const int rows = min(entry.q_len * args_.group - place.row_tile * kRows, kRows);
    const int groups = Groups(entry);
    const int warps = WarpsOfRow(entry);
    const int group = Warp() % warps;
    *row = round * (kCombineWarps / warps) + Warp() / warps;
    const bool exists = *row < rows && group < groups;
    *first = group * kGroupChunks;
    task->count = exists ? min(entry.chunks - *first, kGroupChunks) : 0;
    task->groups = exists && group == 0 ? groups : 0;
    task->next_group = 1;
    task->place = RowPlace::Of(args_, entry.q_begin, place.kv_head, place.row_tile * kRows + min(*row, rows - 1));
    task->end = RowEnd::Of(args_, task->place.head);
  }

  // All blocks wait: when this kernel has ended, so has the one before.
  __device__ void Wait() {
    if (!waited_) WaitForPreviousKernel();
    waited_ = true;
  }

  // Memory is busy with K and V, and instructions come through it too: what is to run when the kernel before has ended
  // is gone through while it still runs, with nothing read or written.
  __device__ void Merge(const MergeTask& task) {
#pragma unroll 1
    while (true) {
      const bool rehearsal = !waited_;
      MergeRows(task, rehearsal);
      if (!rehearsal) break;
      Wait();
    }
  }

  // By all threads of the block together: merges and writes rows.
  __device__ void MergeRows(const MergeTask& task, bool rehearsal) {
    const int head_dim = static_cast<int>(args_.params.head_dim);
    const Softmax part = LoadSoftmax(Scratch::SoftmaxOf(args_, task.part), Lane() < task.count && !rehearsal);
#pragma unroll 1
    for (int base = 0; base < kDim; base += 128) {
      const int column = base + Lane() * 4;
      float4 outs[kGroupChunks];
#pragma unroll
      for (int i = 0; i < kGroupChunks; ++i) {
        if (i >= task.count) break;
        const uint32_t place = __shfl_sync(0xffffffffu, task.part, i);
        outs[i] = LoadColumns(Scratch::Out(args_, place + static_cast<unsigned>(column / 4)),
                              column < head_dim && !rehearsal);
      }
      if (task.count == 0) continue;
      const Partial group = MergeChain(part).Merge(outs, task.count);
      if (column < kDim) shared_.out[Warp()][column / 4] = group.out;
      if (column == 0) shared_.softmax[Warp()] = group.softmax;
    }
    __syncthreads();
    if (task.groups > 0) {
      const auto warp_of = [&](int i) { return Warp() + (i == 0 ? 0 : task.next_group + i - 1); };
      Softmax group = {-INFINITY, 0.0f};
      if (Lane() < task.groups) group = shared_.softmax[warp_of(Lane())];
      const MergeChain chain(group);
#pragma unroll 1
      for (int base = 0; base < kDim; base += 128) {
        const int column = base + Lane() * 4;
        float4 outs[kMaxGroups];
#pragma unroll
        for (int i = 0; i < kMaxGroups; ++i) {
          if (i >= task.groups) break;
          outs[i] = shared_.out[warp_of(i)][min(column, kDim - 4) / 4];
        }
        const Partial row = chain.Merge(outs, task.groups);
        if (column < head_dim) StoreRow(args_, task.place, task.end, column, row, !rehearsal);
      }
    }
    __syncthreads();
  }

  const DecodeArgs& args_;
  Shared& shared_;
  bool waited_ = false;
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

// Merges what the workers have left behind. A block for each SM, which finds room beside those of the kernel before,
// and knows what to do when it ends: a bound of 320 threads instead of 256 means 96 registers, which are left there.
template <int kDim, int kBlockKeys, int kRows, bool kFew>
__global__ void __maxnreg__(96) DecodeCombineKernel(const __grid_constant__ DecodeArgs args) {
  extern __shared__ __align__(16) char dynamic_shared[];
  AllowDependentLaunch();  // of the prefill path
  FillRowsOfNoSequence(args);
  using M = Merger<kDim, kBlockKeys, kRows>;
  M merger(args, *reinterpret_cast<typename M::Shared*>(dynamic_shared));
  if constexpr (kFew) {
    merger.RunFew();
  } else {
    if (!MayHaveDecodeRows(args)) return WaitForPreviousKernel();
    merger.Run();
  }
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_COMBINE_CUH_
