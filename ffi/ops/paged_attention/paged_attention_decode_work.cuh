// Who computes what in the decode path, worked out by every block for itself from the metadata.
//
// The keys that a sequence's queries see are cut into tiles, the tiles into strands of equal length (at most 16 times the
// warps of a block), and the strands into groups of as many as a block has warps. A warp computes a strand, a block a
// group; the strands of a group are merged from left to right, then the groups. The cuts are a function of the sequence's
// length alone, so its bits do not depend on which block computed which group.
//
// A unit is a sequence and a kv head. A team of 16 consecutive blocks (a cluster, where the device has them) computes
// long units, the longest first, block i the group i of each. Units that are short beside what there is to do for every
// block are computed by single blocks ("solo"), group after group, since a team's meeting would cost more than it saves.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_WORK_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_WORK_CUH_

#include <cstdint>

#include "ffi/ops/paged_attention/paged_attention_decode_args.h"
#include "ffi/ops/paged_attention/paged_attention_decode_shape.cuh"
#include "ffi/ops/paged_attention/paged_attention_metadata.cuh"

namespace xla_gpu::decode {

// The keys of a sequence, in tiles.
template <typename S>
struct Cut {
  int first_tile;  // keys before it are hidden from all of the sequence's queries
  int tiles;

  __device__ static Cut Of(const PagedAttentionParams& params, const SequenceInfo& sequence) {
    int begin = 0;
    if (params.sliding_window > 0) {
      const int64_t hidden = int64_t{sequence.context_len} - sequence.q_len - params.sliding_window + 1;
      begin = hidden > 0 ? static_cast<int>(hidden) : 0;
    }
    const int first = begin / S::kTile;
    return {first, (sequence.context_len + S::kTile - 1) / S::kTile - first};
  }

  __device__ int Groups() const {
    return ((tiles < S::kStrands ? tiles : S::kStrands) + S::kWarps - 1) / S::kWarps;
  }
  // The first tile of strand i; that of strand i + 1 is its end.
  __device__ int StrandBegin(int i) const {
    const int at = tiles > S::kStrands ? static_cast<int>(int64_t{i} * tiles / S::kStrands) : (i < tiles ? i : tiles);
    return first_tile + at;
  }
};

// The sequences of a window that the decode path owns, the longest first.
struct Plan {
  int begin;      // sequence that 0 in `order` stands for
  int live;       // sequences of the call; -1: num_seqs is wrong
  int num_team;   // sequences computed by teams; they come first
  int num_all;
  bool in_order;  // of query_start_loc
};

// Where MakePlan works. `keys` and `first_solo` may be reused once the next block-wide barrier is passed.
struct PlanMemory {
  int* keys;           // [kWindow]
  int* first_solo;     // [1]
  uint8_t* order;      // [kWindow]
};

// Plans the window [begin, begin + kWindow).
// NOTE: lengths are loaded before num_seqs is known, to save one trip to memory; what lies past num_seqs is not used.
template <typename S>
__device__ inline Plan MakePlan(const DecodeArgs& args, int begin, const PlanMemory& memory) {
  const PagedAttentionParams& params = args.params;
  constexpr int kEach = (kWindow + S::kThreads - 1) / S::kThreads;
  const int end = min(begin + kWindow, args.seq_end);
  Plan plan = {begin, LiveSequences(params), 0, 0, true};
  bool ordered = true;
  SequenceInfo mine[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int s = begin + i * S::kThreads + threadIdx.x;
    mine[i] = {};
    if (s < end) mine[i] = LoadSequence(params, s, /*in_order=*/true);
    ordered = ordered && (mine[i].owned || s >= min(end, plan.live));
  }
  if (threadIdx.x == 0) *memory.first_solo = kWindow;
  if (begin == 0 && end == params.max_seqs) {
    plan.in_order = __syncthreads_and(ordered);
  } else {
    plan.in_order = QueryStartsInOrder(params, plan.live);
  }
  int key[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = i * S::kThreads + threadIdx.x;
    const int s = begin + at;
    key[i] = -1;
    if (s < end && s < plan.live) {
      if (!plan.in_order) mine[i] = LoadSequence(params, s, /*in_order=*/false);
      if (mine[i].q_len >= 1 && mine[i].q_len <= kMaxDecodeRows) {
        // Unique, and larger for more tiles.
        key[i] = min(Cut<S>::Of(params, mine[i]).tiles, (1 << 22) - 1) << 8 | (kWindow - 1 - at);
      }
    }
    if (at < end - begin) memory.keys[at] = key[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    int rank = 0;
    int64_t rest = 0;  // tiles of this sequence and all after it
    int num_rest = 0;
    if (key[i] >= 0) {
      for (int j = 0; j < end - begin; ++j) {
        const int other = memory.keys[j];
        const bool before = other > key[i];
        rank += before;
        num_rest += !before && other >= 0;
        rest += before ? 0 : max(other, 0) >> 8;
      }
      memory.order[rank] = static_cast<uint8_t>(i * S::kThreads + threadIdx.x);
      // Solo, blocks wait for each other up to the length of a unit: little if a block has at least two of them. Also if
      // the meetings of teams would cost more; one costs about as much as streaming kMeetingKeys keys.
      constexpr int kMeetingKeys = 128;
      const int64_t heads = params.num_kv_heads;
      const int64_t tiles = key[i] >> 8;
      const int64_t share = tiles * args.num_teams * kTeam;  // if every block had one such unit
      const bool solo = 2 * share <= rest * heads ||
                        (share <= rest * heads && tiles * S::kTile * args.num_teams <= num_rest * heads * kMeetingKeys);
      if (solo) atomicMin(memory.first_solo, rank);
    }
    plan.num_all += __syncthreads_count(key[i] >= 0);
  }
  plan.num_team = min(*memory.first_solo, plan.num_all);
  return plan;
}

// A walk over the work of one block: units, their tiles of rows, and their groups.
template <typename S>
struct Walk {
  bool active;   // false: the walk is over
  bool solo;
  int round;     // of units
  int head;      // kv head
  int row_tile;  // rows [kRows * row_tile, …) of the unit's q_len * group rows
  int group;
  int seq;
  SequenceInfo sequence;
  Cut<S> cut;

  __device__ void Start(const DecodeArgs& args, const Plan& plan, const uint8_t* order) {
    active = true;
    solo = false;
    round = 0;
    NextUnit(args, plan, order);
  }

  __device__ int NumRows(const DecodeArgs& args) const { return sequence.q_len * args.group; }
  // The first and last group of its unit and row tile that this block computes.
  __device__ bool IsFirstGroup() const { return !solo || group == 0; }
  __device__ bool IsLastGroup() const { return !solo || group + 1 >= cut.Groups(); }

  // To the next group, row tile or unit.
  __device__ void Next(const DecodeArgs& args, const Plan& plan, const uint8_t* order) {
    if (!IsLastGroup()) {
      ++group;
      return;
    }
    group = solo ? 0 : blockIdx.x % kTeam;
    if ((++row_tile) * kRows < NumRows(args)) return;
    NextUnit(args, plan, order);
  }

 private:
  // Position in a list that `all` walkers go through back and forth, so that none gets the longer unit each time.
  __device__ static int Snake(int round, int walker, int all) {
    return round * all + (round % 2 == 0 ? walker : all - 1 - walker);
  }

  __device__ void NextUnit(const DecodeArgs& args, const Plan& plan, const uint8_t* order) {
    const int heads = static_cast<int>(args.params.num_kv_heads);
    const int num_team = plan.num_team * heads;
    const int num_solo = plan.num_all * heads - num_team;
    int at = -1;
    while (!solo && at < 0) {
      at = Snake(round, blockIdx.x / kTeam, args.num_teams);
      if (at >= num_team) at = -1;
      if (at < 0 && (round + 1) * args.num_teams >= num_team) {
        solo = true;
        round = 0;
      } else {
        ++round;
      }
    }
    while (at < 0) {
      if (round * static_cast<int>(gridDim.x) >= num_solo) {
        active = false;
        return;
      }
      at = Snake(round++, gridDim.x - 1 - blockIdx.x, gridDim.x);
      at = at < num_solo ? num_team + at : -1;
    }
    const int rank = at / heads;
    head = at - rank * heads;
    row_tile = 0;
    group = solo ? 0 : blockIdx.x % kTeam;
    seq = plan.begin + order[rank];
    sequence = LoadSequence(args.params, seq, plan.in_order);
    cut = Cut<S>::Of(args.params, sequence);
  }
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_WORK_CUH_
