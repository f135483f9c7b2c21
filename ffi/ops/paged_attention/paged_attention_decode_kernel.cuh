// The decode kernel: one block per SM that walks over its share of the work (paged_attention_decode_work.cuh) with K and V
// streaming through a ring of tiles per warp. Warps meet only when a group of keys is done.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_KERNEL_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_KERNEL_CUH_

#include <cstdint>

#include "ffi/device/cluster.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_warp.cuh"

namespace xla_gpu::decode {

inline constexpr int kPassRows = 4;  // rows that a block merges at a time

// Shared memory behind the ring.
template <typename S>
struct Shared {
  static constexpr int kPairs = S::kDim / 2;  // of a row
  static_assert(kPairs % 16 == 0);

  float2 strands[S::kWarps][kPassRows * kPairs];  // some rows of the warps' results
  float2 groups[kTeam][kRows * kPairs / kTeam];   // this block's part of the output, from each block of its cluster
  Softmax strand_softmax[S::kWarps][kRows];
  Softmax group_softmax[kTeam][kRows];
  typename Fetcher<S>::Looks looks[S::kWarps];
  uint4 query[S::kQueryInRegisters ? 1 : S::kSteps * 32];
  uint8_t order[kWindow];
  int first_solo;

  // Where pair `pair` of row `row` of a pass lies: four lanes of each of four rows meet no bank twice.
  __device__ static int At(int row, int pair) { return row * kPairs + (pair ^ (row << 2)); }
};

// The part of a row tile that a thread merges: one pair of columns of one row of each pass, or kDim / 128 of them.
template <typename S>
struct Merger {
  static constexpr int kPasses = kRows / kPassRows;
  static constexpr int kEach = (kPassRows * Shared<S>::kPairs + S::kThreads - 1) / S::kThreads;

  // The unit's groups so far, where the block computes all of them.
  float2 out[kPasses][kEach];
  Softmax softmax[kPasses][kEach];

  // Merges the warps' strands into a group and passes it on: adds it to the unit's groups and writes the output after the
  // last one (solo), gives it to the blocks of the cluster, or puts it into the scratch. All threads call it.
  __device__ void Merge(const DecodeArgs& args, const Walk<S>& walk, Strand<S>& strand, Shared<S>& shared, int rows,
                        int warp, int lane) {
    const int pairs = static_cast<int>(args.params.head_dim / 2);
    const int part = (rows * pairs + kTeam - 1) / kTeam;
    if (lane % 4 == 0) {
      shared.strand_softmax[warp][lane / 4] = strand.softmax[0];
      shared.strand_softmax[warp][lane / 4 + 8] = strand.softmax[1];
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (pass * kPassRows >= rows) break;
      if (pass > 0) __syncthreads();  // the last pass has been read
      if (lane / 16 == pass % 2) {    // lanes of rows [4 * pass, 4 * pass + 4)
#pragma unroll
        for (int i = 0; i < Strand<S>::kPairs; ++i) {
          shared.strands[warp][Shared<S>::At(lane / 4 % 4, strand.PairAt(i, lane))] = {
              strand.PairElement(i, pass / 2, 0), strand.PairElement(i, pass / 2, 1)};
        }
      }
      __syncthreads();
#pragma unroll
      for (int each = 0; each < kEach; ++each) {
        const int index = each * S::kThreads + threadIdx.x;
        const int pass_row = index / Shared<S>::kPairs;
        const int pair = index % Shared<S>::kPairs;
        const int row = pass * kPassRows + pass_row;
        if (pass_row >= kPassRows || row >= rows || pair >= pairs) continue;
        Softmax total = shared.strand_softmax[0][row];
        float2 sum = shared.strands[0][Shared<S>::At(pass_row, pair)];
#pragma unroll
        for (int i = 1; i < S::kWarps; ++i) {
          const MergeFactors factors = MergeInto(total, shared.strand_softmax[i][row]);
          const float2 other = shared.strands[i][Shared<S>::At(pass_row, pair)];
          sum = {decode::Merge(sum.x, other.x, factors), decode::Merge(sum.y, other.y, factors)};
        }
        if (walk.solo) {
          if (!walk.IsFirstGroup()) {
            const MergeFactors factors = MergeInto(softmax[pass][each], total);
            total = softmax[pass][each];
            sum = {decode::Merge(out[pass][each].x, sum.x, factors), decode::Merge(out[pass][each].y, sum.y, factors)};
          }
          softmax[pass][each] = total;
          out[pass][each] = sum;
          if (walk.IsLastGroup()) StoreResult(args, walk, row, pair, total, sum);
        } else if (args.cluster) {
          const int element = row * pairs + pair;
          const int rank = element / part;
          const int at = element - rank * part;
          const int group = walk.group;
          StoreRemote(SharedAddress(&shared.groups[group][at]), rank, sum);
          if (at == 0 || pair == 0) {
            StoreRemote(SharedAddress(&shared.group_softmax[group][row]), rank, {total.max, total.sum});
          }
        } else {
          const RowPlace place = RowPlace::Of(args, walk.sequence, walk.head, walk.row_tile * kRows + row);
          const ScratchPlace to = ScratchPlace::Of(args, walk.seq, walk.sequence, place, walk.group);
          reinterpret_cast<float2*>(to.out)[pair] = sum;
          if (pair == 0) *to.softmax = total;
        }
      }
    }
  }

  // Merges the groups that the cluster's blocks gave to this one and writes its part of the output.
  __device__ static void MergeGroups(const DecodeArgs& args, const Walk<S>& walk, const Shared<S>& shared, int rows) {
    const int pairs = static_cast<int>(args.params.head_dim / 2);
    const int part = (rows * pairs + kTeam - 1) / kTeam;
    const int begin = blockIdx.x % kTeam * part;
    const int size = min(part, rows * pairs - begin);
    const int groups = walk.cut.Groups();
    for (int at = threadIdx.x; at < size; at += S::kThreads) {
      const int row = (begin + at) / pairs;
      Softmax total = shared.group_softmax[0][row];
      float2 sum = shared.groups[0][at];
#pragma unroll
      for (int group = 1; group < kTeam; ++group) {
        if (group < groups) {
          const MergeFactors factors = MergeInto(total, shared.group_softmax[group][row]);
          const float2 other = shared.groups[group][at];
          sum = {decode::Merge(sum.x, other.x, factors), decode::Merge(sum.y, other.y, factors)};
        }
      }
      StoreResult(args, walk, row, begin + at - row * pairs, total, sum);
    }
  }

  __device__ static void StoreResult(const DecodeArgs& args, const Walk<S>& walk, int row, int pair,
                                     const Softmax& total, float2 sum) {
    const RowPlace place = RowPlace::Of(args, walk.sequence, walk.head, walk.row_tile * kRows + row);
    float lse;
    const float factor = Finish(args, total, place.head, &lse);
    StorePair(args, place.at * args.params.head_dim + 2 * pair, {sum.x * factor, sum.y * factor});
    if (args.params.lse != nullptr && pair == 0) args.params.lse[place.at] = lse;
  }
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
    const bool pad = has_pad && row >= first_pad;
    const float value = pad ? 0.0f : NAN;
    const int64_t width = params.num_heads * params.head_dim;
    for (int64_t i = 2 * threadIdx.x; i < width; i += 2 * blockDim.x) StorePair(args, row * width + i, {value, value});
    if (params.lse == nullptr) continue;
    for (int64_t i = threadIdx.x; i < params.num_heads; i += blockDim.x) {
      params.lse[row * params.num_heads + i] = pad ? -INFINITY : NAN;
    }
  }
}

// Grid: num_teams * kTeam blocks, in clusters of kTeam where args.cluster. Dynamic shared memory: args.stages *
// kStageBytes + sizeof(Shared).
template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1) DecodeKernel(const __grid_constant__ DecodeArgs args) {
  extern __shared__ __align__(128) uint8_t memory[];
  Shared<S>& shared = *reinterpret_cast<Shared<S>*>(memory + args.stages * S::kStageBytes);
  const uint8_t* const order = shared.order;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const uint32_t ring = SharedAddress(memory) + warp * S::kWarpStageBytes;
  const int stages = args.stages;

  // Whether this block has told its cluster that it may be written to, and not yet heard the same from all others.
  bool cluster_pending = args.cluster;
  if (args.cluster) ClusterArrive();
  if (args.params.head_dim < S::kDim) {  // columns past head_dim: no copy ever touches them
    for (int i = threadIdx.x; i < stages * S::kStageBytes / 16; i += S::kThreads) {
      reinterpret_cast<uint4*>(memory)[i] = {0, 0, 0, 0};
    }
  }

  int begin = args.seq_begin;
  do {  // once even without a sequence: for the rows that none owns
    static_assert(kWindow * sizeof(int) <= sizeof(shared.strands));
    const Plan plan = MakePlan<S>(args, begin, {reinterpret_cast<int*>(shared.strands), &shared.first_solo, shared.order});

    Fetcher<S> fetcher;
    fetcher.Start(args, plan, order, ring, &shared.looks[warp], warp, lane);
    for (int stage = 0; stage < stages; ++stage) fetcher.Fetch(args, plan, order, stage);
    int stage = 0;

    Query<S> query;
    Strand<S> strand;
    Merger<S> merger;
    Walk<S> walk;
    for (walk.Start(args, plan, order); walk.active; walk.Next(args, plan, order)) {
      const int rows = min(kRows, walk.NumRows(args) - walk.row_tile * kRows);
      const int groups = walk.cut.Groups();
      if (groups == 0) {
        if (walk.solo || walk.group == 0) {
          StoreConstantRows(args, walk.sequence, walk.head, walk.row_tile * kRows, walk.row_tile * kRows + rows);
        }
        continue;
      }

      if (walk.group < groups) {
        if (walk.IsFirstGroup()) query.Load(args, walk, shared.query, warp, lane);
        strand.Clear();
        bool bad = false;
        const int end = walk.cut.StrandBegin(walk.group * S::kWarps + warp + 1);
        for (int tile = walk.cut.StrandBegin(walk.group * S::kWarps + warp); tile < end; ++tile) {
          WaitAsync(stages - 1);
          __syncwarp();
          bad = bad || fetcher.IsBad(stage);
          strand.Add(args, walk, query, shared.query, ring + stage * S::kStageBytes, tile * S::kTile, lane);
          fetcher.Fetch(args, plan, order, stage);
          stage = stage + 1 == stages ? 0 : stage + 1;
        }
        strand.Close(bad);
      }

      if (!walk.solo && cluster_pending) {
        ClusterWait();
        cluster_pending = false;
      }
      if (walk.group < groups) merger.Merge(args, walk, strand, shared, rows, warp, lane);
      if (!walk.solo && args.cluster) {
        ClusterArrive();
        ClusterWait();
        Merger<S>::MergeGroups(args, walk, shared, rows);
        ClusterArrive();
        cluster_pending = true;
      } else {
        __syncthreads();  // the merge has been read
      }
    }
    if (args.fill_unowned && begin == args.seq_begin && blockIdx.x == gridDim.x - 1) {
      FillUnownedRows(args, plan.live, plan.in_order);
    }
    begin += kWindow;
    __syncthreads();  // `order` and `strands` are free
  } while (begin < args.seq_end);
  if (cluster_pending) ClusterWait();
}

// Merges the groups that lie in the scratch, where teams are no clusters. Grid: (sequences of the launch, kv heads); it
// plans as the blocks of the decode kernel did.
template <typename S>
__global__ void __launch_bounds__(S::kThreads) MergeScratchKernel(const __grid_constant__ DecodeArgs args) {
  __shared__ int keys[kWindow];
  __shared__ int first_solo;
  __shared__ uint8_t order[kWindow];
  const PagedAttentionParams& params = args.params;
  const int begin = args.seq_begin + blockIdx.x / kWindow * kWindow;
  const Plan plan = MakePlan<S>(args, begin, {keys, &first_solo, order});
  __syncthreads();
  const int rank = blockIdx.x % kWindow;
  if (rank >= plan.num_team) return;
  const int seq = begin + order[rank];
  const SequenceInfo sequence = LoadSequence(params, seq, plan.in_order);
  const int groups = Cut<S>::Of(params, sequence).Groups();
  if (groups == 0) return;
  const int pairs = static_cast<int>(params.head_dim / 2);
  for (int i = threadIdx.x; i < sequence.q_len * args.group * pairs; i += S::kThreads) {
    const int row = i / pairs;
    const int pair = i - row * pairs;
    const RowPlace place = RowPlace::Of(args, sequence, blockIdx.y, row);
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
