// The decode kernel: resident blocks that walk over their share of the work (paged_attention_decode_work.cuh) with K
// and V streaming through a ring of tiles per warp. Warps meet only when a group of keys is done.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_KERNEL_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_KERNEL_CUH_

#include <cstdint>

#include "ffi/device/cluster.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_fetch.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_warp.cuh"

namespace xla_gpu::decode {

inline constexpr int kPassRows = 4;  // rows that a block merges at a time

// Shared memory behind the ring.
template <typename S>
struct Shared {
  static constexpr int kQuads = S::kDim / 4;  // fours of columns of a row

  float4 strands[S::kWarps][kPassRows * kQuads];  // some rows of the warps' results
  // This block's part of some rows of the output, from each block of its cluster; two of them take turns.
  float4 parts[2][kPassRows * kQuads];
  Softmax strand_softmax[S::kWarps][kRows];
  Softmax part_softmax[2][kGroups][kPassRows];
  typename Fetcher<S>::Looks looks[S::kWarps];
  uint4 query[S::kQueryInRegisters ? 1 : S::kSteps * 32];
  Entry order[kWindow];
  uint64_t given[2];  // barrier: `parts` and `part_softmax` are complete
  uint64_t taken[2];  // barrier: all blocks of the cluster have read theirs

  // Where columns 4 * quad to 4 * quad + 3 of row `row` of a pass lie: four lanes of each of four rows that store pairs
  // of columns meet no bank twice.
  __device__ static int At(int row, int quad) { return row * kQuads + (quad ^ (row << 1)); }
};

// Some rows of a unit that the cluster's blocks have given to one another and not merged yet.
struct Given {
  int givers;     // blocks that gave something
  int rows;       // 1 to kPassRows
  int first_row;  // of the unit
  int head;       // kv head
  int q_begin;    // of the sequence
};

// Merges partial results from warps to blocks to units. A thread has to do with four columns of one row of each pass,
// or with a few times four.
template <typename S>
class Merger {
 public:
  static constexpr int kPasses = kRows / kPassRows;
  static constexpr int kEach = (kPassRows * Shared<S>::kQuads + S::kThreads - 1) / S::kThreads;
  static constexpr int kLevels = 4;  // of the tree of groups
  static_assert(1 << kLevels == kGroups);
  // The block's groups of a unit so far: by level, a left half of a subtree that waits for its right half.
  struct Sums {
    Part parts[kPasses][kEach][kLevels];
  };

  __device__ Merger(const DecodeArgs& args, Shared<S>& shared) : steps_(0) {
    if (!args.cluster) return;
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) {
        InitBarrier(&shared.given[i], 1);
        InitBarrier(&shared.taken[i], args.team);
      }
    }
    __syncwarp();
    ClusterStartArrive();
  }

  // Merges the warps' strands into a group and puts it into the tree of the block's groups of the unit. After the last
  // of them, passes the sum on: writes the output if no other block has a group, else gives it to the blocks of the
  // cluster, or puts it into the scratch. All threads of a team call it; where the block has no group, only to be given
  // something.
  __device__ void Merge(const DecodeArgs& args, const Walk<S>& walk, Strand<S>& strand, Shared<S>& shared, Sums& so_far,
                        int rows, int warp, int lane) {
    const int quads = static_cast<int>(args.params.head_dim / 4);
    const bool in_group = walk.HasGroup();
    const bool is_last = walk.IsLastGroup();
    const bool is_alone = walk.IsAlone();
    const bool give = is_last && !is_alone && args.cluster;
    if (lane % 4 == 0) {
      shared.strand_softmax[warp][lane / 4] = strand.softmax[0];
      shared.strand_softmax[warp][lane / 4 + 8] = strand.softmax[1];
    }
    // NOTE: loops are kept as loops, here and below: code that is run once waits for its instructions.
#pragma unroll 1
    for (int pass = 0; pass * kPassRows < rows; ++pass) {
      const int pass_rows = min(kPassRows, rows - pass * kPassRows);
      if (in_group && lane / 16 == pass % 2) {  // lanes of rows [4 * pass, 4 * pass + 4)
#pragma unroll
        for (int i = 0; i < Strand<S>::kPairs; ++i) {
          const int pair = strand.PairAt(i, lane);
          float2* const to = reinterpret_cast<float2*>(&shared.strands[warp][Shared<S>::At(lane / 4 % 4, pair / 2)]);
          to[pair % 2] = {pass < 2 ? strand.PairElement(i, 0, 0) : strand.PairElement(i, 1, 0),
                          pass < 2 ? strand.PairElement(i, 0, 1) : strand.PairElement(i, 1, 1)};
        }
      }
      __syncthreads();
      const int turn = steps_ & 1;
      if (give) {
        if (steps_ == 0) ClusterStartWait();
        if (threadIdx.x == 0) ArriveExpecting(&shared.given[turn], BytesGiven(args, walk.NumGivers(), pass_rows));
        if (steps_ >= 2) WaitBarrier(&shared.taken[turn], Parity(steps_ - 2));
      }
#pragma unroll 1
      for (int each = 0; each < kEach; ++each) {
        const int index = each * S::kThreads + threadIdx.x;
        const int pass_row = index / Shared<S>::kQuads;
        const int quad = index % Shared<S>::kQuads;
        const int row = pass * kPassRows + pass_row;
        if (!in_group || pass_row >= pass_rows || quad >= quads) continue;
        Part sum;
        MergeAll<S::kWarps>([&](int i) { return shared.strand_softmax[i][row]; },
                            [&](int i) { return shared.strands[i][Shared<S>::At(pass_row, quad)]; }, &sum.softmax,
                            &sum.out);
        const int index_in_block = walk.group - walk.first_group;
        int level = 0;
#pragma unroll 1
        for (; 1 << level < walk.block_groups; ++level) {
          if (index_in_block >> level & 1) {
            sum = MergeParts(so_far.parts[pass][each][level], sum);
          } else if (!is_last) {  // else there is no right half
            break;
          }
        }
        const int part = walk.first_group / walk.block_groups;
        if (!is_last) {
          so_far.parts[pass][each][level] = sum;
        } else if (give) {
          const int rank = args.PartOf(quad);
          const int at = quad - rank * args.part_quads;
          const uint32_t barrier = RemoteAddress(&shared.given[turn], rank);
          SendRemote(RemoteAddress(&shared.parts[turn][PartAt(args, part, pass_row) + at], rank), barrier, sum.out);
          if (at == 0) {
            SendRemote(RemoteAddress(&shared.part_softmax[turn][part][pass_row], rank), barrier,
                       float2{sum.softmax.max, sum.softmax.sum});
          }
        } else {
          const RowPlace place = RowPlace::Of(args, walk.sequence.q_begin, walk.head, walk.row_tile * kRows + row);
          if (is_alone) {
            StoreResult(args, place, quad, sum.softmax, sum.out);
          } else {
            const ScratchPlace to = ScratchPlace::Of(args, walk.seq, walk.sequence, place, part);
            reinterpret_cast<float4*>(to.out)[quad] = sum.out;
            if (quad == 0) *to.softmax = sum.softmax;
          }
        }
      }
      __syncthreads();  // the strands have been read
      if (give) {
        if (steps_ > 0 && warp == steps_ % S::kWarps) {
          Receive(args, shared, lane);
          if (lane < args.team) ArriveRemote(RemoteAddress(&shared.taken[(steps_ - 1) & 1], lane));
        }
        ++steps_;
        given_ = {walk.NumGivers(), pass_rows, walk.row_tile * kRows + pass * kPassRows, walk.head,
                  walk.sequence.q_begin};
      }
    }
  }

  // Merges what was given last, and leaves when nobody will write to this block any more.
  __device__ void Finish(const DecodeArgs& args, Shared<S>& shared, int warp, int lane) {
    if (!args.cluster) return;
    if (steps_ == 0) {
      ClusterStartWait();
    } else if (warp == 0) {
      Receive(args, shared, lane);
      if (steps_ >= 2) WaitBarrier(&shared.taken[steps_ & 1], Parity(steps_ - 2));
    }
  }

 private:
  // Of step `step`'s phase of the barriers that it uses.
  __device__ static uint32_t Parity(int step) { return step >> 1 & 1; }

  // Bytes that this block is given: its part of `rows` rows, and their Softmax.
  __device__ static uint32_t BytesGiven(const DecodeArgs& args, int givers, int rows) {
    const int rank = blockIdx.x % args.team;
    const int quads = min(args.part_quads, static_cast<int>(args.params.head_dim / 4) - rank * args.part_quads);
    return quads <= 0 ? 0 : givers * rows * (quads * sizeof(float4) + sizeof(Softmax));
  }

  // Where a giver's row starts in `parts`.
  __device__ static int PartAt(const DecodeArgs& args, int giver, int row) {
    return (giver * kPassRows + row) * args.part_quads;
  }

  // One warp merges what was given in step steps_ - 1 and writes this block's part of the output. A step's work lies
  // between the giving and this, so that nobody waits long.
  __device__ void Receive(const DecodeArgs& args, Shared<S>& shared, int lane) {
    const int turn = (steps_ - 1) & 1;
    WaitBarrier(&shared.given[turn], Parity(steps_ - 1));
    const int first_quad = blockIdx.x % args.team * args.part_quads;
#pragma unroll 1
    for (int at = lane; at < given_.rows * args.part_quads; at += 32) {
      const int row = args.PartOf(at);
      const int quad = first_quad + at - row * args.part_quads;
      if (quad >= static_cast<int>(args.params.head_dim / 4)) continue;
      const Part sum = MergeTree<kGroups>([&](int i) {
        Part part = {{-INFINITY, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
        if (i < given_.givers) part = {shared.part_softmax[turn][i][row], shared.parts[turn][PartAt(args, i, 0) + at]};
        return part;
      });
      StoreResult(args, RowPlace::Of(args, given_.q_begin, given_.head, given_.first_row + row), quad, sum.softmax,
                  sum.out);
    }
    __syncwarp();
  }

  Given given_;  // in the last step, if steps_ > 0
  int steps_;    // in which the cluster's blocks gave something to one another
};

// Writes the rows that no sequence owns: see paged_attention_metadata.cuh.
__device__ inline void FillUnownedRows(const DecodeArgs& args, int live, bool in_order) {
  const PagedAttentionParams& params = args.params;
  const int first_pad = live >= 0 ? __ldg(params.query_start_loc + live) : -1;
  const bool has_pad = first_pad >= 0 && first_pad <= params.num_tokens;
  for (int row = 0; row < params.num_tokens; ++row) {
    bool owned = false;
    if (live > 0 && in_order) {
      owned = row >= __ldg(params.query_start_loc) && row < first_pad;
    } else {
      for (int s = 0; s < live && !owned; ++s) {
        const SequenceInfo sequence = LoadSequence(params, s, false);
        owned = row >= sequence.q_begin && row < sequence.q_begin + sequence.q_len;
      }
    }
    if (owned) continue;
    const bool pad = (has_pad && row >= first_pad) || (live >= 0 && in_order);
    const float value = pad ? 0.0f : NAN;
    const int64_t width = params.num_heads * params.head_dim;
    for (int64_t i = 4 * threadIdx.x; i < width; i += 4 * blockDim.x) {
      StoreFour(args, row * width + i, {value, value, value, value});
    }
    if (params.lse == nullptr) continue;
    for (int64_t i = threadIdx.x; i < params.num_heads; i += blockDim.x) {
      params.lse[row * params.num_heads + i] = pad ? -INFINITY : NAN;
    }
  }
}

// Starts bringing into L2 what the first steps wait for, one line a thread: page table and query.
__device__ inline void PrefetchInputs(const DecodeArgs& args) {
  const PagedAttentionParams& params = args.params;
  const int64_t at = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * 128;
  if (at < params.max_seqs * params.pages_per_seq * int64_t{sizeof(int32_t)}) {
    PrefetchToL2(reinterpret_cast<const char*>(params.block_tables) + at);
  }
  if (at < params.num_tokens * params.num_heads * params.head_dim * int64_t{2}) {
    PrefetchToL2(static_cast<const char*>(params.query) + at);
  }
}

// Grid: num_teams * team blocks, in clusters of a team where args.cluster. Dynamic shared memory: args.stages *
// kStageBytes + sizeof(Shared).
template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksPerSm)
    DecodeKernel(const __grid_constant__ DecodeArgs args, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared<S>& shared = *reinterpret_cast<Shared<S>*>(memory + args.stages * S::kStageBytes);
  const Entry* const order = shared.order;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;

  Merger<S> merger(args, shared);
  typename Merger<S>::Sums sums;
  Fetcher<S> fetcher(args, SharedAddress(memory) + warp * S::kWarpStageBytes, &shared.looks[warp], warp, lane);
  if (args.box_keys > 0 && threadIdx.x == 0) {
    PrefetchTensorMap(&maps.k);
    PrefetchTensorMap(&maps.v);
  }
  PrefetchInputs(args);
  if (args.box_keys == 0 && args.params.head_dim < S::kDim) {  // columns past head_dim: no copy ever touches them
    for (int i = threadIdx.x; i < args.stages * S::kStageBytes / 16; i += S::kThreads) {
      reinterpret_cast<uint4*>(memory)[i] = {0, 0, 0, 0};
    }
  }

  int begin = args.seq_begin;
  do {  // once even without a sequence: for the rows that none owns
    static_assert(kWindow * sizeof(int) <= sizeof(shared.strands));
    const Plan plan = MakePlan<S>(args, begin, reinterpret_cast<int*>(shared.strands), shared.order);

    Query<S> query;
    Walk<S> walk;
    walk.Start(args, plan, order);
    const auto load_query = [&] {
      if (walk.active && walk.IsFirstGroup()) query.Load(args, walk, shared.query, warp, lane);
    };
    load_query();

    if (walk.active) fetcher.Start(args, maps, plan, order, walk);

    Strand<S> strand;
    while (walk.active) {
      const int rows = min(kRows, walk.NumRows(args) - walk.row_tile * kRows);
      if (walk.HasGroup()) {
        strand.Clear();
        bool bad = false;
        const int end = walk.cut.StrandBegin(walk.group * S::kWarps + warp + 1);
        for (int tile = walk.cut.StrandBegin(walk.group * S::kWarps + warp); tile < end; ++tile) {
          const uint32_t at = fetcher.Wait(args);
          bad = bad || fetcher.IsBad();
          if (args.box_keys > 0) strand.ClearHidden(args, walk, at, tile * S::kTile, lane);
          strand.Add(args, walk, query, shared.query, at, tile * S::kTile, lane);
          fetcher.Advance(args, maps, plan, order);
        }
        strand.Close(bad);
      }
      if (walk.HasGroup() || !walk.IsAlone()) {
        merger.Merge(args, walk, strand, shared, sums, rows, warp, lane);
      } else if (walk.cut.Groups() == 0 && walk.first_group == 0) {
        StoreConstantRows(args, walk.sequence, walk.head, walk.row_tile * kRows, walk.row_tile * kRows + rows);
      }
      walk.Next(args, plan, order);
      load_query();
    }
    if (args.fill_unowned && begin == args.seq_begin && blockIdx.x == gridDim.x - 1) {
      FillUnownedRows(args, plan.live, plan.in_order);
    }
    begin += kWindow;
    __syncthreads();  // `order` and `strands` are free
  } while (begin < args.seq_end);
  merger.Finish(args, shared, warp, lane);
}

// Merges the groups that lie in the scratch, where teams are no clusters. Grid: (sequences of the launch, kv heads); it
// plans as the blocks of the decode kernel did.
template <typename S>
__global__ void __launch_bounds__(S::kThreads) MergeScratchKernel(const __grid_constant__ DecodeArgs args) {
  __shared__ __align__(16) int keys[kWindow];
  __shared__ Entry order[kWindow];
  const PagedAttentionParams& params = args.params;
  const int begin = args.seq_begin + blockIdx.x / kWindow * kWindow;
  const Plan plan = MakePlan<S>(args, begin, keys, order);
  __syncthreads();
  const int rank = blockIdx.x % kWindow;
  if (rank >= plan.num_all) return;
  const int seq = begin + (order[rank].packed & 0xff);
  const SequenceInfo sequence = LoadSequence(params, seq, plan.in_order);
  const int groups = Cut<S>::Of(params, sequence).Groups();
  const int block_groups = kGroups / args.team;
  const int givers = (groups + block_groups - 1) / block_groups;
  if (!plan.IsShared(rank) || givers <= 1) return;  // written by the block that computed it
  const int quads = static_cast<int>(params.head_dim / 4);
  for (int i = threadIdx.x; i < sequence.q_len * args.group * quads; i += S::kThreads) {
    const int row = i / quads;
    const int quad = i - row * quads;
    const RowPlace place = RowPlace::Of(args, sequence.q_begin, blockIdx.y, row);
    const Part sum = MergeTree<kGroups>([&](int giver) {
      Part part = {{-INFINITY, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
      if (giver < givers) {
        const ScratchPlace from = ScratchPlace::Of(args, seq, sequence, place, giver);
        part = {*from.softmax, reinterpret_cast<const float4*>(from.out)[quad]};
      }
      return part;
    });
    StoreResult(args, place, quad, sum.softmax, sum.out);
  }
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_KERNEL_CUH_
