// Which work tiles there are, and which a CTA takes: work tile b of n CTAs, then n + b, 2n + b and so on. They are
// numbered sequence by sequence, head by head, row tile by row tile, so that CTAs that run together read the same keys.
#ifndef XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_SM90_SCHEDULE_CUH_
#define XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_SM90_SCHEDULE_CUH_

#include <cstdint>

#include "ffi/device/dependent_launch.cuh"
#include "ffi/ops/bidirectional_attention/sm90_traits.cuh"

namespace xla_gpu::bidirectional {

// The sum over the lanes up to this one.
__device__ inline unsigned InclusiveWarpSum(unsigned value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const unsigned before = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += before;
  }
  return value;
}

template <typename Traits>
class Sm90Schedule {
 public:
  bool valid;                  // num_seqs and query_start_loc are; else the other members say nothing
  int owned_begin, owned_end;  // the rows of all sequences
  unsigned total;              // work tiles

  // By all threads of the CTA, behind the launch wait. Ends with a barrier.
  __device__ explicit Sm90Schedule(const Sm90Cta<Traits>& cta) : cta_(cta) {
    const Sm90Params& params = cta.params;
    auto& shared = cta.Storage();
    const int first = static_cast<int>(threadIdx.x) * params.thread_seqs;
    // All loads of a thread with one sequence are in flight at once.
    const int32_t* const starts = params.query_start_loc;
    int begin = LoadBehindWait(starts + min(first, params.max_seqs));
    int end = LoadBehindWait(starts + min(first + 1, params.max_seqs));
    const int num_seqs = LoadBehindWait(params.num_seqs);
    bool invalid = num_seqs < 0 || num_seqs > params.max_seqs;
    unsigned row_tiles = 0;
    for (int seq = first; seq < min(first + params.thread_seqs, num_seqs) && !invalid; ++seq) {
      if (seq > first) {
        begin = end;
        end = LoadBehindWait(starts + seq + 1);
      }
      invalid = begin < 0 || end < begin || end > params.num_tokens;
      row_tiles += RowTiles(end - begin);
    }
    const unsigned before = InclusiveWarpSum(row_tiles, cta.lane);
    const unsigned warp = threadIdx.x / 32;
    if (cta.lane == 31) shared.warp_tiles[warp] = before;
    valid = !__syncthreads_or(invalid);
    if (!valid) return;
    unsigned all = 0, offset = 0;
#pragma unroll
    for (unsigned w = 0; w < Traits::kThreads / 32; ++w) {
      offset = w == warp ? all : offset;
      all += shared.warp_tiles[w];
    }
    shared.first_tiles[threadIdx.x] = offset + before - row_tiles;
    total = all * static_cast<unsigned>(params.num_heads);
    owned_begin = LoadBehindWait(starts);
    owned_end = LoadBehindWait(starts + num_seqs);
    if (num_seqs == 0) owned_begin = owned_end = 0;
    __syncthreads();
  }

  // Work tile `index`, by a warp.
  __device__ WorkTile Find(unsigned index) const {
    const Sm90Params& params = cta_.params;
    // Some row tile of the work tile's sequence: the one that `index` would have if heads were the inner loop.
    const unsigned row_tile = params.heads.Divide(index);
    unsigned first_tile;
    int seq = FindThread(row_tile, &first_tile) * params.thread_seqs;
    int begin, end;
    if (params.thread_seqs == 1) {
      begin = LoadBehindWait(params.query_start_loc + seq);
      end = LoadBehindWait(params.query_start_loc + seq + 1);
    } else {
      seq = FindSequence(seq, row_tile, &first_tile, &begin, &end);
    }
    WorkTile tile;
    tile.begin = begin;
    tile.length = end - begin;
    tile.window = params.window;
    const unsigned row_tiles = RowTiles(tile.length);
    const unsigned in_sequence = index - first_tile * static_cast<unsigned>(params.num_heads);
    const unsigned head = in_sequence / row_tiles;
    tile.head = static_cast<int>(head);
    tile.first_row = static_cast<int>(in_sequence - head * row_tiles) * Traits::kRows;
    tile.count = min(Traits::kRows, tile.length - tile.first_row);
    tile.FindKeys(Traits::kTileKeys);
    return tile;
  }

 private:
  static __device__ unsigned RowTiles(int length) {
    return (static_cast<unsigned>(length) + Traits::kRows - 1) / Traits::kRows;
  }

  // The thread among whose sequences is the one of `row_tile`, and the row tiles before those.
  __device__ int FindThread(unsigned row_tile, unsigned* first_tile) const {
    const unsigned* const first_tiles = cta_.Storage().first_tiles;
    constexpr int kWarps = Traits::kThreads / 32;
    const int chunk = __popc(__ballot_sync(~0u, first_tiles[cta_.lane * kWarps] <= row_tile)) - 1;
    const unsigned mine = cta_.lane < kWarps ? first_tiles[chunk * kWarps + cta_.lane] : ~0u;
    const int in_chunk = __popc(__ballot_sync(~0u, mine <= row_tile)) - 1;
    *first_tile = __shfl_sync(~0u, mine, in_chunk);
    return chunk * kWarps + in_chunk;
  }

  // The sequence of `row_tile`, from sequence `seq` on, before which there are *first_tile row tiles.
  __device__ int FindSequence(int seq, unsigned row_tile, unsigned* first_tile, int* begin, int* end) const {
    const Sm90Params& params = cta_.params;
    while (true) {
      // Past the last sequence in use there is nothing to be found: the search ends before.
      const int mine = min(seq + cta_.lane, params.max_seqs - 1);
      const int mine_begin = LoadBehindWait(params.query_start_loc + mine);
      const int mine_end = LoadBehindWait(params.query_start_loc + mine + 1);
      const unsigned row_tiles = RowTiles(mine_end - mine_begin);
      const unsigned up_to = InclusiveWarpSum(row_tiles, cta_.lane) + *first_tile;
      const unsigned above = __ballot_sync(~0u, up_to > row_tile);
      if (above != 0) {
        const int found = __ffs(static_cast<int>(above)) - 1;
        *first_tile = __shfl_sync(~0u, up_to - row_tiles, found);
        *begin = __shfl_sync(~0u, mine_begin, found);
        *end = __shfl_sync(~0u, mine_end, found);
        return seq + found;
      }
      *first_tile = __shfl_sync(~0u, up_to, 31);
      seq += 32;
    }
  }

  const Sm90Cta<Traits>& cta_;
};

}  // namespace xla_gpu::bidirectional

#endif  // XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_SM90_SCHEDULE_CUH_
