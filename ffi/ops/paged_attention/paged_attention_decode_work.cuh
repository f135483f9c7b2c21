// Who computes what in the decode path, worked out by every block for itself from the metadata.
//
// The keys that a sequence's queries see are cut into tiles, the tiles into up to 64 strands of equal length, and four
// consecutive strands form a group. A warp computes a strand, the four warps of a block a group. Results are merged in
// a fixed tree: the strands of a group from left to right, then the up to 16 groups in pairs, pairs of pairs and so on.
// The cuts are a function of the sequence's length alone, so its bits do not depend on who computed what.
//
// A unit is a sequence and a kv head. A team of 4, 8 or 16 consecutive blocks (a cluster, where the device has them)
// shares a unit, each block an equal run of its groups. With many units, teams are of 4, units that are long beside
// what there is to do for a block are shared by a team, and most others go to single blocks, so that there are few
// meetings. There are then more teams than fit on the device: as one leaves, the next comes, which keeps the load even
// although blocks differ in speed.
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

  __device__ int Groups() const { return ((tiles < S::kStrands ? tiles : S::kStrands) + S::kWarps - 1) / S::kWarps; }
  // The first tile of strand i; that of strand i + 1 is its end.
  __device__ int StrandBegin(int i) const {
    const int at = tiles > S::kStrands ? static_cast<int>(int64_t{i} * tiles / S::kStrands) : (i < tiles ? i : tiles);
    return first_tile + at;
  }
};

// The sequences of a window that the decode path owns, the longest first.
struct Plan {
  int begin;    // first sequence of the window
  int live;     // sequences of the call; -1: num_seqs is wrong
  int num_all;  // of them
  // In the order: long ones and the last few of the middle ones are shared by teams, the others go to single blocks.
  int long_end;
  int middle_end;  // of the middle ones for single blocks
  int few_end;     // of the last few
  bool in_order;   // of query_start_loc

  __device__ bool IsShared(int place) const { return place < long_end || (place >= middle_end && place < few_end); }
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
  Plan plan = {begin, LiveSequences(params), 0, 0, 0, 0, true};
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
  if (is_live && sequence.q_len >= 1 && sequence.q_len <= kMaxDecodeRows) {
    const int length = Cut<S>::Of(params, sequence).tiles;
    key = min(length, (1 << 23) - 1) << 7 | (kWindow - 1 - mine);  // unique, and larger for more tiles
  }
  int rank = 0;
  int tiles = 0;  // of all sequences
  if (by_warp) {
    for (int i = 0; i < size; ++i) {
      const int other = __shfl_sync(0xffffffffu, key, i);
      rank += other > key;
      tiles += max(other, 0) >> 7;
    }
    plan.num_all = __popc(__ballot_sync(0xffffffffu, key >= 0));
  } else {
    keys[mine] = key;
    plan.num_all = __syncthreads_count(key >= 0);
    for (int i = 0; i < size; i += 4) {
      const int4 four = *reinterpret_cast<const int4*>(keys + i);
      rank += (four.x > key) + (four.y > key) + (four.z > key) + (four.w > key);
      tiles += (max(four.x, 0) >> 7) + (max(four.y, 0) >> 7) + (max(four.z, 0) >> 7) + (max(four.w, 0) >> 7);
    }
  }
  if (key >= 0) order[rank] = {sequence.context_len, mine | sequence.q_len << 8 | sequence.valid << 16};
  if (args.mixed) {
    // By what there is to do for every block that fits on the device: units of more than that are long, of up to a 16th
    // short. Of those between, single blocks get as many as make whole waves. The last few are shared, so that nobody
    // waits long for the end.
    const int heads = static_cast<int>(params.num_kv_heads);
    const int64_t share = int64_t{tiles} * heads;
    const int64_t mine_by_all = int64_t{max(key, 0) >> 7} * args.block_slots;
    const bool is_long = key >= 0 && mine_by_all > share;
    const bool is_short = key >= 0 && 16 * mine_by_all <= share;
    int num_long, num_short;
    if (by_warp) {
      num_long = __popc(__ballot_sync(0xffffffffu, is_long));
      num_short = __popc(__ballot_sync(0xffffffffu, is_short));
    } else {
      num_long = __syncthreads_count(is_long);
      num_short = __syncthreads_count(is_short);
    }
    const int num_middle = plan.num_all - num_long - num_short;
    plan.long_end = num_long;
    plan.middle_end = num_long + num_middle * heads / args.block_slots * args.block_slots / heads;
    plan.few_end = num_long + num_middle;
  } else {
    plan.long_end = plan.middle_end = plan.few_end = plan.num_all;
  }
  if (by_warp) {
    __syncwarp();
  } else {
    __syncthreads();
  }
  return plan;
}

// A walk over the work of one block: units, their tiles of rows, and their groups.
template <typename S>
struct Walk {
  bool active;       // false: the walk is over
  int round;         // of items: units for teams, or as many units as a team has blocks
  int head;          // kv head
  int row_tile;      // rows [kRows * row_tile, …) of the unit's q_len * group rows
  int block_groups;  // that each block computes of the unit
  int first_group;   // of this block; past the unit's groups if it has none
  int group;
  int seq;
  SequenceInfo sequence;
  Cut<S> cut;

  __device__ void Start(const DecodeArgs& args, const Plan& plan, const Entry* order) {
    round = 0;
    NextUnit(args, plan, order);
  }

  __device__ int NumRows(const DecodeArgs& args) const { return sequence.q_len * args.group; }
  // Whether this block has a group of the unit at all, and is at its first or last one.
  __device__ bool HasGroup() const { return group < cut.Groups(); }
  __device__ bool IsFirstGroup() const { return group == first_group; }
  __device__ bool IsLastGroup() const { return group + 1 >= min(first_group + block_groups, cut.Groups()); }
  // A unit of so few groups that one block computes it all.
  __device__ bool IsAlone() const { return cut.Groups() <= block_groups; }
  // Blocks of the team that have a group of the unit.
  __device__ int NumGivers() const { return (cut.Groups() + block_groups - 1) / block_groups; }

  // To the next group, row tile or unit.
  __device__ void Next(const DecodeArgs& args, const Plan& plan, const Entry* order) {
    if (!IsLastGroup()) {
      ++group;
      return;
    }
    group = first_group;
    if ((++row_tile) * kRows < NumRows(args)) return;
    NextUnit(args, plan, order);
  }

 private:
  __device__ void NextUnit(const DecodeArgs& args, const Plan& plan, const Entry* order) {
    const int heads = static_cast<int>(args.params.num_kv_heads);
    const int team = args.team;
    const int rank = blockIdx.x % team;
    // Items: a shared unit each, or as many others as a team has blocks.
    const int middle_items = ((plan.middle_end - plan.long_end) * heads + team - 1) / team;
    const int few = plan.long_end * heads + middle_items;  // the item where the last few start
    const int shorts = few + (plan.few_end - plan.middle_end) * heads;
    const int items = shorts + ((plan.num_all - plan.few_end) * heads + team - 1) / team;
    int at;   // of the unit in the order
    int end;  // of the units that the item is one of
    do {
      int item = blockIdx.x / team + round * args.num_teams;
      active = item < items;
      if (!active) return;
      bool solo = false;
      int begin = 0;
      end = plan.long_end;
      if (item >= shorts) {
        item -= shorts;
        begin = plan.few_end;
        end = plan.num_all;
        solo = true;
      } else if (item >= few) {
        item -= few;
        begin = plan.middle_end;
        end = plan.few_end;
      } else if (item >= plan.long_end * heads) {
        item -= plan.long_end * heads;
        begin = plan.long_end;
        end = plan.middle_end;
        solo = true;
      }
      at = begin * heads + (solo ? item * team + rank : item);
      block_groups = solo ? kGroups : kGroups / team;
      // Blocks take turns with the runs of groups, for short units do not have all of them.
      first_group = solo ? 0 : (rank + round) % team * block_groups;
      ++round;
    } while (at >= end * heads);  // none for this block
    const int place = at / heads;
    head = at - place * heads;
    row_tile = 0;
    group = first_group;
    const Entry entry = order[place];
    seq = plan.begin + (entry.packed & 0xff);
    sequence = {__ldg(args.params.query_start_loc + seq), entry.packed >> 8 & 0xff, entry.context_len,
                (entry.packed >> 16) != 0, true};
    cut = Cut<S>::Of(args.params, sequence);
  }
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_WORK_CUH_
