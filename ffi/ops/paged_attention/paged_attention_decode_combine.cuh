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
inline constexpr int kCombineBlocks = 2;  // on an SM, beside the first kernel's
inline constexpr int kCombineParts = 4;   // partial results that a lane has in flight
inline constexpr int kCombineRounds = 2;  // tasks that a warp prepares at a time

// The sizes that the split kernel's shape has.
template <int kBlockKeys, int kRows>
using CombinePlan = Plan<kCombineThreads, kBlockKeys, kRows>;

// Rows of a unit whose partial results a warp is to merge: where these stand, and where the rows.
struct CombineTask {
  unsigned lanes[2];           // a bit for each chunk with which a partial result begins
  unsigned slots[kMaxChunks];  // of those
  int first_row;               // of the slots; from it on every job_warps-th
  int rows;                    // that the slots have
  int unit_row;                // of the slots' first row
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

  __device__ MergeJob Find(unsigned index) {
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
  __device__ MergeJob OfUnit(unsigned index) const {
    const UnitOfIndex place(args_, index);
    int found = -1;
    // Each lane looks at some of the sequences.
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int first = 0; first < kCombineThreads; first += 32) {
      const PlanEntry& entry = plan_.At(first + lane);
      const bool mine = entry.chunks > 0 && place.RowTile(args_, entry.q_begin, entry.units) >= 0;
      const unsigned lanes = __ballot_sync(0xffffffffu, mine);
      if (lanes != 0) found = first + __ffs(lanes) - 1;
    }
    if (found < 0) return {};
    const PlanEntry& entry = plan_.At(found);
    return plan_.Job(entry, place.kv_head * entry.units + place.RowTile(args_, entry.q_begin, entry.units));
  }

  __device__ MergeJob OfWorker(unsigned index) const {
    if (index == 0 || index >= static_cast<unsigned>(args_.workers)) return {};
    const uint64_t begin = plan_.WorkerBegin(index);
    if (begin < plan_.At(0).begin || begin >= plan_.WindowEnd()) return {};
    const PlanEntry& entry = plan_.At(plan_.Search(begin));
    const unsigned unit = entry.UnitAt(begin - entry.begin);
    const uint64_t unit_begin = UnitPlace::Of(entry, unit).begin;
    if (unit_begin == begin || unit_begin < plan_.WorkerBegin(index - 1)) return {};
    return plan_.Job(entry, unit);
  }

  const DecodeArgs& args_;
  P plan_;
};

// A warp's sums over parts in order: of a group the parts one after the other, then the groups. Four columns for a
// lane.
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

// By a warp: what is to be done for a job's rows from `first_row` on.
template <int kRows>
__device__ inline void Prepare(const DecodeArgs& args, const MergeJob& job, int first_row, CombineTask& task) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __syncwarp();  // what stood there is no longer read
  const Owners owners = {job};
  const int rows = min(job.q_len * args.group - job.row_tile * kRows, kRows);
  const bool exists = job.chunks > 0 && first_row < rows;
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
    task.first_row = first_row;
    task.rows = rows;
    task.unit_row = job.row_tile * kRows;
    task.q_begin = job.q_begin;
    task.kv_head = job.kv_head;
  }
}

// By a warp: merges its rows' partial results and writes them. In rehearsal nothing is read or written.
__device__ inline void MergeRows(const DecodeArgs& args, const CombineTask& task, bool rehearsal) {
  const int head_dim = static_cast<int>(args.params.head_dim);
  __syncwarp();  // lanes prepare tasks for one another
  if (task.lanes[0] == 0) return;
#pragma unroll 1
  for (int row = task.first_row; row < task.rows; row += args.job_warps) {
#pragma unroll 1
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
            parts[j] = LoadPart(Scratch::Of(args, slot, row), Scratch::Out(args, slot, row) + column, !rehearsal);
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
      StoreRow(args, RowPlace::Of(args, task.q_begin, task.kv_head, task.unit_row + row), column, sums.unit,
               !rehearsal);
    }
    if (rehearsal) return;
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

// Merges what the workers have left behind. Few blocks, so that they find room beside those of the kernel before, and
// know what to do when it ends.
template <int kRows, int kBlockKeys>
__global__ void __launch_bounds__(kCombineThreads, 5) DecodeCombineKernel(const __grid_constant__ DecodeArgs args) {
  extern __shared__ __align__(16) char dynamic_shared[];
  auto& shared = *reinterpret_cast<CombineShared<kRows, kBlockKeys>*>(dynamic_shared);
  FillRowsOfNoSequence(args);
  if (!MayHaveDecodeRows(args)) return WaitForPreviousKernel();
  Jobs<CombinePlan<kBlockKeys, kRows>> jobs(args, shared.plan);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t stride = int64_t{gridDim.x} * kCombineWarps;
  // Memory is busy with K and V, and instructions come through it too: what is to run when the kernel before has ended
  // is gone through while it still runs, with nothing read or written.
  bool rehearsal = true;
  const int64_t tasks = int64_t{args.jobs} * args.job_warps;
  for (int64_t begin = int64_t{blockIdx.x} * kCombineWarps; begin < tasks; begin += kCombineRounds * stride) {
    int rounds = 0;
    for (; rounds < kCombineRounds && begin + rounds * stride < tasks; ++rounds) {
      const unsigned task = static_cast<unsigned>(begin + rounds * stride) + warp;
      const unsigned index = task / static_cast<unsigned>(args.job_warps);
      const MergeJob job = jobs.Find(index);
      Prepare<kRows>(args, task < tasks ? job : MergeJob{},
                     static_cast<int>(task - index * static_cast<unsigned>(args.job_warps)),
                     shared.tasks[rounds][warp]);
    }
#pragma unroll 1
    for (int round = rehearsal ? -1 : 0; round < rounds; ++round) {
      MergeRows(args, shared.tasks[max(round, 0)][warp], rehearsal);
      if (!rehearsal) continue;
      // All blocks wait: when this kernel has ended, so has the one before.
      WaitForPreviousKernel();
      rehearsal = false;
    }
  }
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_COMBINE_CUH_
