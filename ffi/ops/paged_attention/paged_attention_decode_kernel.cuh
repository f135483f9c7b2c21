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
  static constexpr int kPairs = S::kDim / 2;  // of a row
  static_assert(kPairs % 16 == 0);

  float2 strands[S::kWarps][kPassRows * kPairs];  // some rows of the warps' results
  // This block's part of some rows of the output, from each block of its cluster; two of them take turns.
  float2 groups[2][kTeam][kPassRows * kPairs / kTeam];
  Softmax strand_softmax[S::kWarps][kRows];
  Softmax group_softmax[2][kTeam][kPassRows];
  typename Fetcher<S>::Looks looks[S::kWarps];
  uint4 query[S::kQueryInRegisters ? 1 : S::kSteps * 32];
  Entry order[kWindow];
  uint64_t given[2];  // barrier: `groups` and `group_softmax` are complete
  uint64_t taken[2];  // barrier: all blocks of the cluster have read theirs

  // Where pair `pair` of row `row` of a pass lies: four lanes of each of four rows meet no bank twice.
  __device__ static int At(int row, int pair) { return row * kPairs + (pair ^ (row << 2)); }
};

// Some rows of a unit that the cluster's blocks have given to one another and not merged yet.
struct Given {
  int groups;     // blocks that gave something
  int rows;       // 1 to kPassRows
  int first_row;  // of the unit
  int head;       // kv head
  int q_begin;    // of the sequence
};

// Merges partial results from warps to blocks to units. A thread has to do with one pair of columns of one row of each
// pass, or kDim / 64 of them.
template <typename S>
class Merger {
 public:
  static constexpr int kPasses = kRows / kPassRows;
  static constexpr int kEach = (kPassRows * Shared<S>::kPairs + S::kThreads - 1) / S::kThreads;
  // A unit's groups so far, where the block computes all of them.
  struct Solo {
    float2 out[kPasses][kEach];
    Softmax softmax[kPasses][kEach];
  };

  __device__ Merger(const DecodeArgs& args, Shared<S>& shared) : steps_(0) {
    if (!args.cluster) return;
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) {
        InitBarrier(&shared.given[i], 1);
        InitBarrier(&shared.taken[i], kTeam);
      }
    }
    __syncwarp();
    ClusterStartArrive();
  }

  // Merges the warps' strands into a group and passes it on: adds it to the unit's groups and writes the output after
  // the last one (solo), gives it to the blocks of the cluster, or puts it into the scratch. All threads call it, in
  // clusters those of all blocks; `in_group`: false in a block whose group has no keys, and which has nothing to give.
  __device__ void Merge(const DecodeArgs& args, const Walk<S>& walk, Strand<S>& strand, Shared<S>& shared, Solo& so_far,
                        int rows, bool in_group, int warp, int lane) {
    const int pairs = static_cast<int>(args.params.head_dim / 2);
    const bool give = !walk.solo && args.cluster;
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
          shared.strands[warp][Shared<S>::At(lane / 4 % 4, strand.PairAt(i, lane))] = {
              pass < 2 ? strand.PairElement(i, 0, 0) : strand.PairElement(i, 1, 0),
              pass < 2 ? strand.PairElement(i, 0, 1) : strand.PairElement(i, 1, 1)};
        }
      }
      __syncthreads();
      const int turn = steps_ & 1;
      const int part = (pass_rows * pairs + kTeam - 1) / kTeam;
      if (give) {
        if (steps_ == 0) ClusterStartWait();
        if (threadIdx.x == 0) ArriveExpecting(&shared.given[turn], BytesGiven(walk.cut.Groups(), pass_rows, pairs));
        if (steps_ >= 2) WaitBarrier(&shared.taken[turn], Parity(steps_ - 2));
      }
#pragma unroll 1
      for (int each = 0; each < kEach; ++each) {
        const int index = each * S::kThreads + threadIdx.x;
        const int pass_row = index / Shared<S>::kPairs;
        const int pair = index % Shared<S>::kPairs;
        const int row = pass * kPassRows + pass_row;
        if (!in_group || pass_row >= pass_rows || pair >= pairs) continue;
        Softmax total;
        float2 sum;
        MergeAll<S::kWarps>([&](int i) { return shared.strand_softmax[i][row]; },
                            [&](int i) { return shared.strands[i][Shared<S>::At(pass_row, pair)]; }, &total, &sum);
        if (walk.solo) {
          if (!walk.IsFirstGroup()) {
            const float2 out = so_far.out[pass][each];
            Softmax softmax = so_far.softmax[pass][each];
            const MergeFactors factors = MergeInto(softmax, total);
            total = softmax;
            sum = {decode::Merge(out.x, sum.x, factors), decode::Merge(out.y, sum.y, factors)};
          }
          so_far.softmax[pass][each] = total;
          so_far.out[pass][each] = sum;
          if (walk.IsLastGroup()) {
            const RowPlace place = RowPlace::Of(args, walk.sequence.q_begin, walk.head, walk.row_tile * kRows + row);
            StoreResult(args, place, pair, total, sum);
          }
        } else if (give) {
          const int element = pass_row * pairs + pair;
          const int rank = element / part;
          const int at = element - rank * part;
          const uint32_t barrier = RemoteAddress(&shared.given[turn], rank);
          SendRemote(RemoteAddress(&shared.groups[turn][walk.group][at], rank), barrier, sum);
          if (at == 0 || pair == 0) {
            SendRemote(RemoteAddress(&shared.group_softmax[turn][walk.group][pass_row], rank), barrier,
                       {total.max, total.sum});
          }
        } else {
          const RowPlace place = RowPlace::Of(args, walk.sequence.q_begin, walk.head, walk.row_tile * kRows + row);
          const ScratchPlace to = ScratchPlace::Of(args, walk.seq, walk.sequence, place, walk.group);
          reinterpret_cast<float2*>(to.out)[pair] = sum;
          if (pair == 0) *to.softmax = total;
        }
      }
      __syncthreads();  // the strands have been read
      if (give) {
        if (steps_ > 0 && warp == steps_ % S::kWarps) {
          Receive(args, shared, lane);
          if (lane < kTeam) ArriveRemote(RemoteAddress(&shared.taken[(steps_ - 1) & 1], lane));
        }
        ++steps_;
        given_ = {walk.cut.Groups(), pass_rows, walk.row_tile * kRows + pass * kPassRows, walk.head,
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

  // Bytes that this block is given: its part of `rows` rows, and the Softmax of each row that it has a part of.
  __device__ static uint32_t BytesGiven(int groups, int rows, int pairs) {
    const int part = (rows * pairs + kTeam - 1) / kTeam;
    const int begin = blockIdx.x % kTeam * part;
    const int end = min(begin + part, rows * pairs);
    if (begin >= end) return 0;
    return groups * (end - begin + (end - 1) / pairs - begin / pairs + 1) * static_cast<uint32_t>(sizeof(float2));
  }

  // One warp merges what was given in step steps_ - 1 and writes this block's part of the output. A step's work lies
  // between the giving and this, so that nobody waits long.
  __device__ void Receive(const DecodeArgs& args, Shared<S>& shared, int lane) {
    const int turn = (steps_ - 1) & 1;
    WaitBarrier(&shared.given[turn], Parity(steps_ - 1));
    const int pairs = static_cast<int>(args.params.head_dim / 2);
    const int part = (given_.rows * pairs + kTeam - 1) / kTeam;
    const int element = blockIdx.x % kTeam * part + lane;
    static_assert(kPassRows * Shared<S>::kPairs / kTeam <= 32);
    if (lane < part && element < given_.rows * pairs) {
      const int row = element / pairs;
      const int pair = element - row * pairs;
      const Softmax none = {-INFINITY, 0.0f};
      Softmax total;
      float2 sum;
      MergeAll<kTeam>([&](int i) { return i < given_.groups ? shared.group_softmax[turn][i][row] : none; },
                      [&](int i) { return i < given_.groups ? shared.groups[turn][i][lane] : float2{0.0f, 0.0f}; },
                      &total, &sum);
      const RowPlace place = RowPlace::Of(args, given_.q_begin, given_.head, given_.first_row + row);
      StoreResult(args, place, pair, total, sum);
    }
    __syncwarp();
  }

  __device__ static void StoreResult(const DecodeArgs& args, const RowPlace& place, int pair, const Softmax& total,
                                     float2 sum) {
    float lse;
    const float factor = decode::Finish(args, total, place.head, &lse);
    StorePair(args, place.at * args.params.head_dim + 2 * pair, {sum.x * factor, sum.y * factor});
    if (args.params.lse != nullptr && pair == 0) args.params.lse[place.at] = lse;
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
    for (int64_t i = 2 * threadIdx.x; i < width; i += 2 * blockDim.x) StorePair(args, row * width + i, {value, value});
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

// Grid: num_teams * kTeam blocks, in clusters of kTeam where args.cluster. Dynamic shared memory: args.stages *
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
  typename Merger<S>::Solo solo;
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

    fetcher.Start(args, maps, plan, order, walk);

    Strand<S> strand;
    while (walk.active) {
      const int rows = min(kRows, walk.NumRows(args) - walk.row_tile * kRows);
      const int groups = walk.cut.Groups();
      const bool in_group = walk.group < groups;
      if (in_group) {
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
      if (groups > 0) {
        merger.Merge(args, walk, strand, shared, solo, rows, in_group, warp, lane);
      } else if (walk.solo || walk.group == 0) {
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
  if (rank >= plan.num_team) return;
  const int seq = begin + (order[rank].packed & 0xff);
  const SequenceInfo sequence = LoadSequence(params, seq, plan.in_order);
  const int groups = Cut<S>::Of(params, sequence).Groups();
  if (groups == 0) return;
  const int pairs = static_cast<int>(params.head_dim / 2);
  for (int i = threadIdx.x; i < sequence.q_len * args.group * pairs; i += S::kThreads) {
    const int row = i / pairs;
    const int pair = i - row * pairs;
    const RowPlace place = RowPlace::Of(args, sequence.q_begin, blockIdx.y, row);
    Softmax total;
    float2 sum;
    for (int group = 0; group < groups; ++group) {
      const ScratchPlace from = ScratchPlace::Of(args, seq, sequence, place, group);
      const Softmax softmax = *from.softmax;
      const float2 out = reinterpret_cast<const float2*>(from.out)[pair];
      if (group == 0) {
        total = softmax;
        sum = out;
      } else {
        const MergeFactors factors = MergeInto(total, softmax);
        sum = {Merge(sum.x, out.x, factors), Merge(sum.y, out.y, factors)};
      }
    }
    float lse;
    const float factor = Finish(args, total, place.head, &lse);
    StorePair(args, place.at * params.head_dim + 2 * pair, {sum.x * factor, sum.y * factor});
    if (params.lse != nullptr && pair == 0) params.lse[place.at] = lse;
  }
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_KERNEL_CUH_
