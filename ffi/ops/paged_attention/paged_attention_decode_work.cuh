// Who computes what in the decode path, worked out by every block for itself from the metadata.
//
// The keys that a sequence's queries see are cut into tiles, the tiles into up to 64 strands of equal length, and four
// consecutive strands form a group. One warp computes a strand, one block (four warps) a group, and the results are
// merged in a fixed tree: (0 + 1) + (2 + 3) inside a group, then the groups from left to right. The cuts are a function
// of the sequence's length alone, so its bits do not depend on which block computed which group.
//
// A team of 16 consecutive blocks (a cluster, where the device has them) walks over the (sequence, kv head) units, the
// longest first, and computes a unit at a time: block i its group i. Where there are units for all blocks, those of short
// sequences are instead given to single blocks, each of which computes all groups of its unit ("solo").
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_WORK_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_WORK_CUH_

#include <cstdint>

#include "ffi/ops/paged_attention/paged_attention_decode_args.h"
#include "ffi/ops/paged_attention/paged_attention_metadata.cuh"

namespace xla_gpu::decode {

// The keys of a sequence, in tiles of kTile.
template <int kTile>
struct Cut {
  int first_tile;  // keys before it are hidden from all of the sequence's queries
  int tiles;

  __device__ static Cut Of(const PagedAttentionParams& params, const SequenceInfo& sequence) {
    int begin = 0;
    if (params.sliding_window > 0) {
      const int64_t hidden = int64_t{sequence.context_len} - sequence.q_len - params.sliding_window + 1;
      begin = hidden > 0 ? static_cast<int>(hidden) : 0;
    }
    const int first = begin / kTile;
    return {first, (sequence.context_len + kTile - 1) / kTile - first};
  }

  __device__ int Strands() const { return tiles < kStrands ? tiles : kStrands; }
  __device__ int Groups() const { return (Strands() + kWarps - 1) / kWarps; }
  // The first tile of strand i; that of strand i + 1 is its end.
  __device__ int StrandBegin(int i) const {
    const int at = tiles > kStrands ? static_cast<int>(int64_t{i} * tiles / kStrands) : (i < tiles ? i : tiles);
    return first_tile + at;
  }
  __device__ bool Solo(const DecodeArgs& args, int live) const {
    return tiles * int64_t{kTile} <= kSoloKeys && live * args.params.num_kv_heads >= args.solo_units;
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

// Plans the window [begin, begin + kWindow). `keys` [kWindow] may be reused once the next block-wide barrier is passed.
// NOTE: lengths are loaded before num_seqs is known, to save one trip to memory; what lies past num_seqs is not used.
template <int kTile>
__device__ inline Plan MakePlan(const DecodeArgs& args, int begin, int* keys, uint8_t* order) {
  const PagedAttentionParams& params = args.params;
  const int end = min(begin + kWindow, args.seq_end);
  Plan plan = {begin, LiveSequences(params), 0, 0, true};
  bool ordered = true;
  SequenceInfo mine[kWindow / kThreads];
#pragma unroll
  for (int i = 0; i < kWindow / kThreads; ++i) {
    const int s = begin + i * kThreads + threadIdx.x;
    mine[i] = {};
    if (s < end) mine[i] = LoadSequence(params, s, /*in_order=*/true);
    ordered = ordered && (mine[i].owned || s >= min(end, plan.live));
  }
  if (begin == 0 && end == params.max_seqs) {
    plan.in_order = __syncthreads_and(ordered);
  } else {
    plan.in_order = QueryStartsInOrder(params, plan.live);
  }
  int key[kWindow / kThreads];
  bool solo[kWindow / kThreads];
#pragma unroll
  for (int i = 0; i < kWindow / kThreads; ++i) {
    const int at = i * kThreads + threadIdx.x;
    const int s = begin + at;
    key[i] = -1;
    solo[i] = false;
    if (s < end && s < plan.live) {
      if (!plan.in_order) mine[i] = LoadSequence(params, s, /*in_order=*/false);
      if (mine[i].q_len >= 1 && mine[i].q_len <= kMaxDecodeRows) {
        const Cut<kTile> cut = Cut<kTile>::Of(params, mine[i]);
        // Unique, and larger for more tiles.
        key[i] = min(cut.tiles, (1 << 22) - 1) << 8 | (kWindow - 1 - at);
        solo[i] = cut.Solo(args, plan.live);
      }
    }
    if (at < end - begin) keys[at] = key[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWindow / kThreads; ++i) {
    int rank = 0;
    if (key[i] >= 0) {
      for (int j = 0; j < end - begin; ++j) rank += keys[j] > key[i];
      order[rank] = static_cast<uint8_t>(i * kThreads + threadIdx.x);
    }
    plan.num_all += __syncthreads_count(key[i] >= 0);
    plan.num_team += __syncthreads_count(key[i] >= 0 && !solo[i]);
  }
  return plan;
}

// A walk over the work of one block: units, their matrix tiles of rows, and their groups.
template <int kTile>
struct Walk {
  bool active;   // false: the walk is over
  bool solo;
  int round;     // of units
  int head;      // kv head
  int row_tile;  // rows [kRows * row_tile, …) of the unit's q_len * group rows
  int group;
  int seq;
  SequenceInfo sequence;
  Cut<kTile> cut;

  __device__ void Start(const DecodeArgs& args, const Plan& plan, const uint8_t* order) {
    active = true;
    solo = false;
    round = 0;
    NextUnit(args, plan, order);
  }

  __device__ int NumRows(const DecodeArgs& args) const { return sequence.q_len * args.group; }
  // The first group of its unit and row tile that this block computes.
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
  __device__ void NextUnit(const DecodeArgs& args, const Plan& plan, const uint8_t* order) {
    const int heads = static_cast<int>(args.params.num_kv_heads);
    int rank;
    while (true) {
      if (!solo) {
        // Back and forth over the teams, so that none gets the longer unit each time.
        const int team = blockIdx.x / kTeam;
        const int at = round * args.num_teams + (round % 2 == 0 ? team : args.num_teams - 1 - team);
        if (at < plan.num_team * heads) {
          rank = at / heads;
          head = at % heads;
          ++round;
          break;
        }
        if (++round * args.num_teams < plan.num_team * heads) continue;
        solo = true;
        round = 0;
      }
      const int at = round * gridDim.x + blockIdx.x;
      if (at >= (plan.num_all - plan.num_team) * heads) {
        active = false;
        return;
      }
      rank = plan.num_team + at / heads;
      head = at % heads;
      ++round;
      break;
    }
    row_tile = 0;
    group = solo ? 0 : blockIdx.x % kTeam;
    seq = plan.begin + order[rank];
    sequence = LoadSequence(args.params, seq, plan.in_order);
    cut = Cut<kTile>::Of(args.params, sequence);
  }
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_WORK_CUH_
