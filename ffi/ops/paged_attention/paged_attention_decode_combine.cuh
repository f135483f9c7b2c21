// The second kernel of the decode path: merges the partial results of the units that several workers computed.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_COMBINE_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_COMBINE_CUH_

#include <cstdint>

#include "ffi/device/dependent_launch.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_merge.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_plan.cuh"
#include "ffi/ops/paged_attention/paged_attention_unowned.cuh"

namespace xla_gpu::decode {

inline constexpr int kCombineWarps = 4;
inline constexpr int kCombineThreads = 32 * kCombineWarps;
inline constexpr int kCombineParts = 8;   // partial results that a lane has in flight
inline constexpr int kCombineRounds = 4;  // tasks that a warp prepares at a time

// The sizes that the split kernel's shape has.
template <int kBlockKeys, int kRows>
using CombinePlan = Plan<kCombineThreads, kBlockKeys, kRows>;

// A row whose partial results a warp is to merge: where these stand, and where the row.
struct CombineTask {
  unsigned lanes[2];          // a bit for each chunk with which a partial result begins
  unsigned slots[kMaxChunks];  // of those
  int slot_row;
  int unit_row;
  int q_begin;
  int kv_head;
};
static_assert(kMaxChunks <= 64, "two words of bits");

template <int kRows, int kBlockKeys>
struct CombineShared {
  CombineTask tasks[kCombineRounds][kCombineWarps];
  typename CombinePlan<kBlockKeys, kRows>::Shared plan;
};

// Who owns the chunks of a job's unit.
struct Owners {
  const MergeJob& job;

  __device__ unsigned Of(int chunk) const {
    const uint64_t position = job.begin + static_cast<unsigned>(chunk * job.blocks);
    if ((position | job.per_worker) >> 32) return static_cast<unsigned>(position / job.per_worker);
    return static_cast<uint32_t>(position) / static_cast<uint32_t>(job.per_worker);
  }
  // The first chunk after those of `worker`, who has some.
  __device__ int End(unsigned worker) const {
    const uint64_t length = (worker + uint64_t{1}) * job.per_worker - job.begin;
    if (length >= static_cast<unsigned>(job.chunks * job.blocks)) return job.chunks;
    const unsigned blocks = static_cast<unsigned>(job.blocks);
    return static_cast<int>((static_cast<unsigned>(length) + blocks - 1) / blocks);
  }
};

// The jobs, by number: each unit, or the unit in which the worker of that number begins, if it is the second that has
// chunks of it. By all threads of a block together; each may ask for another job.
template <typename P>
class Jobs {
 public:
  __device__ Jobs(const DecodeArgs& args, typename P::Shared& shared) : args_(args), plan_(args, shared) {}

  __device__ MergeJob Find(int64_t index) {
    MergeJob job = {};
    if (plan_.Window() > 0) plan_.FirstWindow();
    while (true) {
      if (job.chunks == 0) job = args_.jobs_by_unit ? OfUnit(index) : OfWorker(index);
      if (plan_.LastWindow()) return job;
      plan_.NextWindow();
    }
  }

 private:
  // Of those in the window.
  __device__ MergeJob OfUnit(int64_t index) const {
    const unsigned per_head = static_cast<unsigned>(args_.units_per_head);
    const unsigned per_sequence = per_head * static_cast<unsigned>(args_.params.num_kv_heads);
    const int entry = static_cast<int>(static_cast<unsigned>(index) / per_sequence) - plan_.Window();
    if (entry < 0 || entry >= kCombineThreads || plan_.At(entry).chunks == 0) return {};
    const unsigned unit = static_cast<unsigned>(index) % per_sequence;
    const unsigned units = static_cast<unsigned>(plan_.At(entry).units);
    if (unit % per_head >= units) return {};
    return plan_.Job(plan_.At(entry), plan_.SequenceOf(entry), unit / per_head * units + unit % per_head);
  }

  __device__ MergeJob OfWorker(int64_t index) const {
    if (index == 0 || index >= args_.workers) return {};
    const uint64_t begin = plan_.WorkerBegin(static_cast<unsigned>(index));
    if (begin < plan_.At(0).begin || begin >= plan_.WindowEnd()) return {};
    const int found = plan_.Search(begin);
    const PlanEntry& entry = plan_.At(found);
    const unsigned unit = entry.UnitAt(begin - entry.begin);
    const uint64_t unit_begin = UnitPlace::Of(entry, unit).begin;
    if (unit_begin == begin || unit_begin < plan_.WorkerBegin(static_cast<unsigned>(index) - 1)) return {};
    return plan_.Job(entry, plan_.SequenceOf(found), unit);
  }

  const DecodeArgs& args_;
  P plan_;
};

// A warp's sums over parts in order: of a group the parts one after the other, then the groups. Four columns for a lane.
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
    any_group = false;
  }
};

// By a warp: what is to be done for row `slot_row` of a job's row tile, which is row `unit_row` of the unit.
__device__ inline void Prepare(const DecodeArgs& args, const MergeJob& job, int slot_row, int unit_row,
                               CombineTask& task) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Owners owners = {job};
  const bool exists = job.chunks > 0 && unit_row < job.q_len * args.group;
  const unsigned unit_owner = exists ? owners.Of(0) : 0;
  const int owned = exists ? owners.End(unit_owner) : 0;
  // Whoever has all of a unit's chunks has written its rows.
  const int chunks = exists && owned < job.chunks ? job.chunks : 0;
  // The first chunk that does not stand merged with those before it, group by group, in the place of the unit's first.
  const int merged = owned / kGroupChunks * kGroupChunks;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const int chunk = 32 * i + lane;
    bool begins = false;
    if (chunk < chunks) {
      const int first = chunk / kGroupChunks * kGroupChunks;
      const unsigned owner = owners.Of(chunk);
      const bool has_begin = owner == owners.Of(first);
      task.slots[chunk] = SlotOf(chunk, owner, owner == unit_owner, has_begin);
      // A part begins with each chunk, but for those whose owner has them merged with the group's first one.
      begins = chunk < merged ? chunk == 0 : chunk == first || !has_begin;
    }
    const unsigned lanes = __ballot_sync(0xffffffffu, begins);
    if (lane == 0) task.lanes[i] = lanes;
  }
  if (lane == 0) {
    task.slot_row = slot_row;
    task.unit_row = unit_row;
    task.q_begin = job.q_begin;
    task.kv_head = job.kv_head;
  }
  __syncwarp();
}

// By a warp: merges a row's partial results and writes it, unless in rehearsal.
__device__ inline void MergeRow(const DecodeArgs& args, const CombineTask& task, bool rehearsal) {
  const int head_dim = static_cast<int>(args.params.head_dim);
  if (task.lanes[0] == 0) return;
  for (int column = static_cast<int>(threadIdx.x) % 32 * 4; column < head_dim; column += 128) {
    PartSums sums;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      unsigned left = task.lanes[i];
      while (left != 0) {
        Partial parts[kCombineParts];
        unsigned after = left;
#pragma unroll
        for (int j = 0; j < kCombineParts; ++j) {
          if (after == 0) break;
          const unsigned slot = task.slots[32 * i + __ffs(after) - 1];
          parts[j] = LoadPart(Scratch::Of(args, slot, task.slot_row),
                              Scratch::Out(args, slot, task.slot_row) + column, !rehearsal);
          after &= after - 1;
        }
#pragma unroll
        for (int j = 0; j < kCombineParts; ++j) {
          if (left == 0) break;
          sums.Add(parts[j], (__ffs(left) - 1) % kGroupChunks == 0);
          left &= left - 1;
        }
      }
    }
    sums.CloseGroup();
    StoreRow(args, RowPlace::Of(args, task.q_begin, task.kv_head, task.unit_row), column, sums.unit, !rehearsal);
  }
}

// Writes the rows that no sequence owns, where that is the decode path's business.
__device__ inline void FillRowsOfNoSequence(const DecodeArgs& args) {
  if (!args.fill_unowned || blockIdx.x != 0) return;
  if (args.params.dtype == DType::kBF16) {
    FillUnownedRows<__nv_bfloat16>(args.params, 0, 1);
  } else {
    FillUnownedRows<__half>(args.params, 0, 1);
  }
}

// Merges what the workers have left behind, a row with each warp. Few blocks, so that they find room beside those of the
// kernel before, and know what to do when it ends.
template <int kRows, int kBlockKeys>
__global__ void __launch_bounds__(kCombineThreads, 4) DecodeCombineKernel(const __grid_constant__ DecodeArgs args) {
  extern __shared__ __align__(16) char dynamic_shared[];
  auto& shared = *reinterpret_cast<CombineShared<kRows, kBlockKeys>*>(dynamic_shared);
  FillRowsOfNoSequence(args);
  Jobs<CombinePlan<kBlockKeys, kRows>> jobs(args, shared.plan);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t stride = int64_t{gridDim.x} * kCombineWarps;
  // Memory is busy with K and V, and instructions come through it too: what is to run when the kernel before has ended
  // is gone through while it still runs, with nothing read or written.
  bool rehearsal = true;
  for (int64_t begin = int64_t{blockIdx.x} * kCombineWarps; begin < args.tasks; begin += kCombineRounds * stride) {
    int rounds = 0;
    for (; rounds < kCombineRounds && begin + rounds * stride < args.tasks; ++rounds) {
      const unsigned task = static_cast<unsigned>(begin + rounds * stride) + warp;
      const unsigned index = task / static_cast<unsigned>(args.slot_rows);
      const MergeJob job = jobs.Find(index);
      const int row = static_cast<int>(task - index * static_cast<unsigned>(args.slot_rows));
      Prepare(args, task < args.tasks ? job : MergeJob{}, row, job.row_tile * kRows + row, shared.tasks[rounds][warp]);
    }
#pragma unroll 1
    for (int round = rehearsal ? -1 : 0; round < rounds; ++round) {
      MergeRow(args, shared.tasks[max(round, 0)][warp], rehearsal);
      if (!rehearsal) continue;
      // All blocks wait: when this kernel has ended, so has the one before.
      WaitForPreviousKernel();
      rehearsal = false;
    }
  }
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_COMBINE_CUH_
