// The decode kernel: blocks of four warps that walk over their share of the work (paged_attention_decode_work.cuh) with
// K and V streaming through a ring of tiles per warp. Warps meet only when a group of keys is done.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_KERNEL_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_KERNEL_CUH_

#include <cstdint>

#include "ffi/device/cluster.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_warp.cuh"

namespace xla_gpu::decode {

// Two places in shared memory where a warp's result waits for another warp, block or group.
template <typename S>
struct Exchange {
  float2 out[2][kRows * S::kDim / 2];
  Softmax softmax[2][kRows];

  // Pairs are stored so that the four lanes of eight rows meet no bank twice as often as they must.
  __device__ static int At(int row, int pair) { return row * (S::kDim / 2) + (pair ^ ((row & 3) << 2)); }

  __device__ void Store(int slot, Strand<S>& strand, int rows) {
    __syncwarp();  // the warp's reads of the slot are done
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + 8 * half;
      if (row >= rows) continue;
#pragma unroll
      for (int i = 0; i < Strand<S>::kPairs; ++i) {
        out[slot][At(row, Strand<S>::PairAt(i))] = {strand.PairElement(i, half, 0), strand.PairElement(i, half, 1)};
      }
      if (lane % 4 == 0) softmax[slot][row] = strand.softmax[half];
    }
  }

  // Merges the slot with `strand`, into it: the strand first, or the slot first.
  template <bool kSlotFirst>
  __device__ void Merge(int slot, Strand<S>& strand, int rows) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + 8 * half;
      if (row >= rows) continue;
      Softmax other = softmax[slot][row];
      MergeFactors factors;
      if (kSlotFirst) {
        factors = MergeInto(other, strand.softmax[half]);
        strand.softmax[half] = other;
      } else {
        factors = MergeInto(strand.softmax[half], other);
      }
#pragma unroll
      for (int i = 0; i < Strand<S>::kPairs; ++i) {
        const float2 pair = out[slot][At(row, Strand<S>::PairAt(i))];
        float& x = strand.PairElement(i, half, 0);
        float& y = strand.PairElement(i, half, 1);
        x = kSlotFirst ? decode::Merge(pair.x, x, factors) : decode::Merge(x, pair.x, factors);
        y = kSlotFirst ? decode::Merge(pair.y, y, factors) : decode::Merge(y, pair.y, factors);
      }
    }
  }
};

// Shared memory behind the ring.
template <typename S>
struct Shared {
  Exchange<S> exchange;
  uint4 query[S::kQueryInRegisters ? 1 : S::kSteps * 32];
  uint8_t order[kWindow];
};

// Writes a finished row tile, held by one warp, to the output.
template <typename S>
__device__ inline void StoreRows(const DecodeArgs& args, const Walk<S::kTile>& walk, Strand<S>& strand, int rows) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + 8 * half;
    if (row >= rows) continue;
    const RowPlace place = RowPlace::Of(args, walk.sequence, walk.head, walk.row_tile * kRows + row);
    float lse;
    const float factor = Finish(args, strand.softmax[half], place.head, &lse);
#pragma unroll
    for (int i = 0; i < Strand<S>::kPairs; ++i) {
      const int column = 2 * Strand<S>::PairAt(i);
      if (column < args.params.head_dim) {
        StorePair(args, place.at * args.params.head_dim + column,
                  {strand.PairElement(i, half, 0) * factor, strand.PairElement(i, half, 1) * factor});
      }
    }
    if (args.params.lse != nullptr && lane % 4 == 0) args.params.lse[place.at] = lse;
  }
}

// Writes a group's result, held by one warp, to the scratch.
template <typename S>
__device__ inline void StoreScratch(const DecodeArgs& args, const Walk<S::kTile>& walk, Strand<S>& strand, int rows) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + 8 * half;
    if (row >= rows) continue;
    const RowPlace place = RowPlace::Of(args, walk.sequence, walk.head, walk.row_tile * kRows + row);
    const ScratchPlace to = ScratchPlace::Of(args, walk.seq, walk.sequence, place, walk.group);
#pragma unroll
    for (int i = 0; i < Strand<S>::kPairs; ++i) {
      const int column = 2 * Strand<S>::PairAt(i);
      if (column < args.params.head_dim) {
        *reinterpret_cast<float2*>(to.out + column) = {strand.PairElement(i, half, 0), strand.PairElement(i, half, 1)};
      }
    }
    if (lane % 4 == 0) *to.softmax = strand.softmax[half];
  }
}

// Merges the groups of a unit, which lie in slot 0 of the cluster's blocks, and writes this block's part of the output.
template <typename S>
__device__ inline void MergeCluster(const DecodeArgs& args, const Walk<S::kTile>& walk, const Exchange<S>& exchange,
                                    int rows) {
  const int pairs = static_cast<int>(args.params.head_dim / 2);
  const int part = (rows * pairs + kTeam - 1) / kTeam;
  const int begin = blockIdx.x % kTeam * part;
  const int end = min(begin + part, rows * pairs);
  const int groups = walk.cut.Groups();
  for (int i = begin + threadIdx.x; i < end; i += kThreads) {
    const int row = i / pairs;
    const int pair = i - row * pairs;
    const uint32_t softmax_at = SharedAddress(&exchange.softmax[0][row]);
    const uint32_t out_at = SharedAddress(&exchange.out[0][Exchange<S>::At(row, pair)]);
    float2 softmax[kTeam], out[kTeam];
#pragma unroll
    for (int group = 0; group < kTeam; ++group) {
      if (group < groups) {
        softmax[group] = LoadRemote(softmax_at, group);
        out[group] = LoadRemote(out_at, group);
      }
    }
    Softmax total = {softmax[0].x, softmax[0].y};
    float2 sum = out[0];
#pragma unroll
    for (int group = 1; group < kTeam; ++group) {
      if (group < groups) {
        const MergeFactors factors = MergeInto(total, {softmax[group].x, softmax[group].y});
        sum = {Merge(sum.x, out[group].x, factors), Merge(sum.y, out[group].y, factors)};
      }
    }
    const RowPlace place = RowPlace::Of(args, walk.sequence, walk.head, walk.row_tile * kRows + row);
    float lse;
    const float factor = Finish(args, total, place.head, &lse);
    StorePair(args, place.at * args.params.head_dim + 2 * pair, {sum.x * factor, sum.y * factor});
    if (args.params.lse != nullptr && pair == 0) args.params.lse[place.at] = lse;
  }
}

// Writes the rows that no sequence owns: see paged_attention_metadata.cuh.
__device__ inline void FillUnownedRows(const DecodeArgs& args, const Plan& plan) {
  const PagedAttentionParams& params = args.params;
  const int first_pad = plan.live >= 0 ? __ldg(params.query_start_loc + plan.live) : -1;
  for (int row = 0; row < params.num_tokens; ++row) {
    bool owned = false;
    if (plan.live > 0) {
      if (plan.in_order) {
        owned = row >= __ldg(params.query_start_loc) && row < first_pad;
      } else {
        for (int s = 0; s < plan.live && !owned; ++s) {
          const SequenceInfo sequence = LoadSequence(params, s, false);
          owned = row >= sequence.q_begin && row < sequence.q_begin + sequence.q_len;
        }
      }
    }
    if (owned) continue;
    const bool pad = first_pad >= 0 && first_pad <= params.num_tokens && row >= first_pad;
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
__global__ void __launch_bounds__(kThreads, S::kBlocksPerSm) DecodeKernel(const __grid_constant__ DecodeArgs args) {
  extern __shared__ __align__(128) uint8_t memory[];
  Shared<S>& shared = *reinterpret_cast<Shared<S>*>(memory + args.stages * S::kStageBytes);
  Exchange<S>& exchange = shared.exchange;
  const uint8_t* const order = shared.order;
  const int warp = threadIdx.x / 32;
  const uint32_t ring = SharedAddress(memory) + warp * S::kWarpStageBytes;
  const int stages = args.stages;

  if (args.params.head_dim < S::kDim) {  // columns past head_dim: no copy ever touches them
    for (int i = threadIdx.x; i < stages * S::kStageBytes / 16; i += kThreads) {
      reinterpret_cast<uint4*>(memory)[i] = {0, 0, 0, 0};
    }
  }

  bool cluster_pending = false;  // this block has told the cluster that it read its slots, and not heard from all others
  int begin = args.seq_begin;
  do {  // once even without a sequence: for the rows that none owns
    if (cluster_pending) ClusterWait();
    cluster_pending = false;
    __syncthreads();  // `order` and the exchange are free
    static_assert(kWindow * sizeof(int) <= sizeof(exchange.out));
    const Plan plan = MakePlan<S::kTile>(args, begin, reinterpret_cast<int*>(exchange.out), shared.order);

    Fetcher<S> fetcher;
    fetcher.Start(args, plan, order, ring);
    for (int stage = 0; stage < stages; ++stage) fetcher.Fetch(args, plan, order, stage);
    int stage = 0;

    Query<S> query;
    Strand<S> strand;
    Walk<S::kTile> walk;
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
        if (walk.IsFirstGroup()) query.Load(args, walk, shared.query);
        strand.Clear();
        bool bad = false;
        const int end = walk.cut.StrandBegin(walk.group * kWarps + warp + 1);
        for (int tile = walk.cut.StrandBegin(walk.group * kWarps + warp); tile < end; ++tile) {
          WaitAsync(stages - 1);
          __syncwarp();
          bad = bad || fetcher.IsBad(stage);
          strand.Add(args, walk, query, shared.query, ring + stage * S::kStageBytes, tile * S::kTile);
          __syncwarp();
          fetcher.Fetch(args, plan, order, stage);
          stage = stage + 1 == stages ? 0 : stage + 1;
        }
        strand.Close(bad);
      }

      if (cluster_pending) ClusterWait();
      cluster_pending = false;
      if (walk.solo) {
        // (0 + 1) + (2 + 3) through slot 1; slot 0 holds the sum of the groups so far.
        if (warp == 1) exchange.Store(1, strand, rows);
        __syncthreads();
        if (warp == 0) exchange.template Merge<false>(1, strand, rows);
        __syncthreads();
        if (warp == 3) exchange.Store(1, strand, rows);
        __syncthreads();
        if (warp == 2) {
          exchange.template Merge<false>(1, strand, rows);
          exchange.Store(1, strand, rows);
        }
        __syncthreads();
        if (warp == 0) {
          exchange.template Merge<false>(1, strand, rows);
          if (!walk.IsFirstGroup()) exchange.template Merge<true>(0, strand, rows);
          if (walk.IsLastGroup()) {
            StoreRows(args, walk, strand, rows);
          } else {
            exchange.Store(0, strand, rows);
          }
        }
        __syncthreads();
        continue;
      }

      if (walk.group < groups) {
        if (warp % 2 == 1) exchange.Store(warp / 2, strand, rows);
        __syncthreads();
        if (warp % 2 == 0) exchange.template Merge<false>(warp / 2, strand, rows);
        if (warp == 2) exchange.Store(1, strand, rows);
        __syncthreads();
        if (warp == 0) {
          exchange.template Merge<false>(1, strand, rows);
          if (args.cluster) {
            exchange.Store(0, strand, rows);
          } else {
            StoreScratch(args, walk, strand, rows);
          }
        }
      }
      if (args.cluster) {
        ClusterArrive();
        ClusterWait();
        MergeCluster(args, walk, exchange, rows);
        ClusterArrive();
        cluster_pending = true;
      } else {
        __syncthreads();
      }
    }
    if (args.fill_unowned && begin == args.seq_begin && blockIdx.x == gridDim.x - 1) FillUnownedRows(args, plan);
    begin += kWindow;
  } while (begin < args.seq_end);
  if (cluster_pending) ClusterWait();
}

// Merges the groups that lie in the scratch, where teams are no clusters. Grid: (sequences of the launch, kv heads).
template <int kTile>
__global__ void __launch_bounds__(kThreads) MergeScratchKernel(const __grid_constant__ DecodeArgs args) {
  const PagedAttentionParams& params = args.params;
  const int live = LiveSequences(params);
  const int seq = args.seq_begin + blockIdx.x;
  const bool in_order = QueryStartsInOrder(params, live);
  if (seq >= live) return;
  const SequenceInfo sequence = LoadSequence(params, seq, in_order);
  const Cut<kTile> cut = Cut<kTile>::Of(params, sequence);
  const int groups = cut.Groups();
  if (sequence.q_len < 1 || sequence.q_len > kMaxDecodeRows || groups == 0 || cut.Solo(args, live)) return;
  const int pairs = static_cast<int>(params.head_dim / 2);
  for (int i = threadIdx.x; i < sequence.q_len * args.group * pairs; i += kThreads) {
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
