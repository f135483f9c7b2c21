// Who computes what in the decode path, worked out by every block for itself from the metadata.
//
// The keys that a sequence's queries see are cut into tiles, the tiles into strands of equal length (at most 16 times
// the warps of a block), and the strands into groups of as many as a block has warps. A warp computes a strand, a block
// a group; the strands of a group are merged from left to right, then the groups. The cuts are a function of the
// sequence's length alone, so its bits do not depend on which block computed which group.
//
// A unit is a sequence and a kv head. A team of 16 consecutive blocks (a cluster, where the device has them) computes
// long units, the longest first, block i the group i of each. Where there are enough short units for all blocks, each
// is computed by a single block ("solo"), group after group: a team's meeting would cost more than it saves.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_WORK_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_WORK_CUH_

#include <cstdint>

#include "ffi/ops/paged_attention/paged_attention_decode_args.h"
#include "ffi/ops/paged_attention/paged_attention_decode_shape.cuh"
#include "ffi/ops/paged_attention/paged_attention_metadata.cuh"

namespace xla_gpu::decode {

inline constexpr int kSoloKeys = 4096;  // sequences that see no more may be computed solo

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

  __device__ int Groups() const { return ((tiles < S::kStrands ? tiles : S::kStrands) + S::kWarps - 1) / S::kWarps; }
  // The first tile of strand i; that of strand i + 1 is its end.
  __device__ int StrandBegin(int i) const {
    const int at = tiles > S::kStrands ? static_cast<int>(int64_t{i} * tiles / S::kStrands) : (i < tiles ? i : tiles);
    return first_tile + at;
  }
};

// The sequences of a window that the decode path owns, the longest first.
struct Plan {
  int begin;     // first sequence of the window
  int live;      // sequences of the call; -1: num_seqs is wrong
  int num_team;  // sequences computed by teams; they come first
  int num_all;
  bool in_order;  // of query_start_loc
};

// What is kept of a sequence in shared memory, by its place in the plan's order.
struct Entry {
  int context_len;
  int packed;  // place in the window | q_len << 8 | valid << 16
};

// Plans the window [begin, begin + kWindow). `keys` and `order` [kWindow] are in shared memory, `keys` on 16 bytes; it
// may be reused afterwards. NOTE: lengths are loaded before num_seqs is known, to save one trip to memory; what lies
// past num_seqs is not used.
template <typename S>
__device__ inline Plan MakePlan(const DecodeArgs& args, int begin, int* keys, Entry* order) {
  static_assert(S::kThreads == kWindow);
  const PagedAttentionParams& params = args.params;
  const int size = min(kWindow, args.seq_end - begin);
  // Up to 32 sequences are put in order by every warp for itself, all with the same result: no barriers.
  const bool by_warp = size <= 32;
  const int mine = by_warp ? threadIdx.x % 32 : threadIdx.x;
  SequenceInfo sequence = {};
  if (mine < size) sequence = LoadSequence(params, begin + mine, /*in_order=*/true);
  Plan plan = {begin, LiveSequences(params), 0, 0, true};
  const bool is_live = mine < min(size, plan.live - begin);
  if (size != params.max_seqs) {
    plan.in_order = QueryStartsInOrder(params, plan.live);
  } else if (by_warp) {
    plan.in_order = __all_sync(0xffffffffu, sequence.owned || !is_live);
  } else {
    plan.in_order = __syncthreads_and(sequence.owned || !is_live);
  }
  if (is_live && !plan.in_order) sequence = LoadSequence(params, begin + mine, /*in_order=*/false);
  int key = -1;
  bool is_short = false;
  if (is_live && sequence.q_len >= 1 && sequence.q_len <= kMaxDecodeRows) {
    const int tiles = Cut<S>::Of(params, sequence).tiles;
    key = min(tiles, (1 << 23) - 1) << 7 | (kWindow - 1 - mine);  // unique, and larger for more tiles
    is_short = tiles <= kSoloKeys / S::kTile;
  }
  int rank = 0;
  int num_short;
  if (by_warp) {
    for (int i = 0; i < size; ++i) rank += __shfl_sync(0xffffffffu, key, i) > key;
    plan.num_all = __popc(__ballot_sync(0xffffffffu, key >= 0));
    num_short = __popc(__ballot_sync(0xffffffffu, is_short));
  } else {
    keys[mine] = key;
    plan.num_all = __syncthreads_count(key >= 0);
    for (int i = 0; i < size; i += 4) {
      const int4 four = *reinterpret_cast<const int4*>(keys + i);
      rank += (four.x > key) + (four.y > key) + (four.z > key) + (four.w > key);
    }
    num_short = __syncthreads_count(is_short);
  }
  if (key >= 0) order[rank] = {sequence.context_len, mine | sequence.q_len << 8 | sequence.valid << 16};
  if (by_warp) {
    __syncwarp();
  } else {
    __syncthreads();
  }
  // As many short units are computed solo as give every block the same number of them.
  const int heads = static_cast<int>(params.num_kv_heads);
  const int blocks = args.num_teams * kTeam;
  plan.num_team = plan.num_all;
  if (num_short * heads >= blocks) plan.num_team -= num_short * heads / blocks * blocks / heads;
  return plan;
}

// A walk over the work of one block: units, their tiles of rows, and their groups.
template <typename S>
struct Walk {
  bool active;  // false: the walk is over
  bool solo;
  int round;     // of units
  int head;      // kv head
  int row_tile;  // rows [kRows * row_tile, …) of the unit's q_len * group rows
  int group;
  int seq;
  SequenceInfo sequence;
  Cut<S> cut;

  __device__ void Start(const DecodeArgs& args, const Plan& plan, const Entry* order) {
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
  __device__ void Next(const DecodeArgs& args, const Plan& plan, const Entry* order) {
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

  __device__ void NextUnit(const DecodeArgs& args, const Plan& plan, const Entry* order) {
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
    const Entry entry = order[rank];
    seq = plan.begin + (entry.packed & 0xff);
    sequence = {__ldg(args.params.query_start_loc + seq), entry.packed >> 8 & 0xff, entry.context_len,
                (entry.packed >> 16) != 0, true};
    cut = Cut<S>::Of(args.params, sequence);
  }
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_WORK_CUH_
