// The mainloop of the split-KV kernel for work tiles of 64 query rows: several query rows of a sequence times the heads
// of a GQA group, as in speculative decoding. It reads each KV block once for all 64, where narrower work tiles would
// read it up to four times.
//
// Eight warps in two halves of 32 rows each share the KV blocks of a CTA. An iteration has three steps:
//  1. scores: a warp multiplies a quarter of the block's keys with its half's rows, and stores them in shared memory;
//  2. softmax: a warp does that of eight rows over all keys of the block, and stores the weights;
//  3. values: a warp accumulates a quarter of the columns of its half's rows.
// The scores of the next KV block are computed beside the values of this one, so that an iteration has two barriers.
// Each row sees the same operations in the same order as in mainloop.cuh, and so gets the same bits.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_WIDE_MAINLOOP_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_WIDE_MAINLOOP_CUH_

#include <cstdint>

#include "ffi/device/dependent_launch.cuh"
#include "ffi/ops/paged_attention/decode/mainloop.cuh"
#include "ffi/ops/paged_attention/decode/work_range.cuh"

namespace xla_gpu::decode {

template <CacheFormat kFormat, int kHeadDim>
struct SplitKvSharedStorage<WideKernelTraits<kFormat, kHeadDim>> {
  using Traits = WideKernelTraits<kFormat, kHeadDim>;
  alignas(1024) char k[Traits::kStages][Traits::kBlockBytes];
  alignas(1024) char v[Traits::kStages][Traits::kBlockBytes];
  SharedScores<typename Traits::Half> scores[Traits::kHalves];
  // The softmax's weights as B operands of the products with V: of each half, m16 tile and row tile, a lane's
  // registers.
  uint2 weights[Traits::kHalves][Traits::kBlockTiles][Traits::Half::kRowTiles][32];
  float correction[Traits::kRows];      // what the block changes earlier accumulators by
  AttentionState state[Traits::kRows];  // of a split, at its end
  bool bad_page;                        // a page number of the work range is outside the cache
  typename SplitKvTileScheduler<Traits>::SharedStorage scheduler[Traits::kWarps];
  typename SplitKvTileScheduler<Traits>::BatchStorage batch;
  WorkRange range[Traits::kWarps];
  uint32_t interval_end[Traits::kWarps];
};

template <typename Traits>
class WideMainloop {
 public:
  using Shared = SplitKvSharedStorage<Traits>;

  __device__ WideMainloop(const DecodeArgs& args, Shared& shared) : args_(args), shared_(shared) {}

  // By all threads of the CTA, with a barrier after the last range.
  __device__ void Run(const WorkRange& range) {
    const PagedAttentionParams& params = args_.params;
    const SequencePlan& plan = range.plan;
    const int range_keys = range.key_end - range.key_begin;

    // Page look-ups of the first stages, which all else waits for. A warp copies an eighth of every KV block.
    int copy_keys_left = range_keys - static_cast<int>(threadIdx.x / 32) * Copy::kTileKeys;
    KvView kv;
    kv.page_table = params.block_tables + static_cast<uint64_t>(range.sequence) * args_.pages_per_seq;
    kv.end_key = range.key_end;
    PageLookup first[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      first[i].Start(args_, kv.page_table, kv.end_key, copy_keys_left - i * Half::kBlockKeys, Copy::kTileKeys);
    }
    if (threadIdx.x == 0) shared_.bad_page = false;

    // Q to registers, and the addresses of K and V.
    const Thread cta_thread = Thread::Opaque(WholeCta::Thread());
    const int half = cta_thread.warp / Half::kWarps;
    const Thread thread = {cta_thread.lane, cta_thread.warp % Half::kWarps};  // in its half
    const WorkTile rows = {range.work_tile.kv_head, range.work_tile.row_tile * Traits::kHalves + half,
                           range.work_tile.begin};
    const int rows_left = plan.q_len * args_.group_size - rows.row_tile * Half::kRows;
    const bool has_rows = rows_left > 0;                        // of the half
    const bool has_softmax_rows = rows_left > 8 * thread.warp;  // of the warp's own eight
    QueryFragment<Half> query;
    query.Load(args_, plan, rows, thread);
    const TileCopy<Copy> copy(args_, cta_thread);
    const int64_t head_offset = range.work_tile.kv_head * params.head_stride * Traits::kElementBytes + copy.column;
    kv.k = static_cast<const char*>(params.k_cache) + head_offset;
    kv.v = static_cast<const char*>(params.v_cache) + head_offset;
    kv.plan = &plan;
    kv.row_tile = rows.row_tile;
    // With a tree_mask the last token may be hidden too.
    kv.causal_tail = min(0, plan.end_key - kv.end_key - int{plan.q_len} + (args_.tree_mask == nullptr ? 1 : 0));
    __syncthreads();  // bad_page is false

    // Prologue: the first stages' copies.
    const int blocks = (range_keys - 1) / Half::kBlockKeys + 1;
    const uint32_t my_k = SharedAddress(shared_.k[0]) + cta_thread.warp * Copy::kTileBytes;
    // Copies the warp's part of KV block `block`, if there is one, to the stage at `stage` bytes.
    const auto load_stage = [&](const PageLookup& lookup, int block, uint32_t stage) {
      bool bad = false;
      const uint32_t slot = lookup.Slot(args_, &bad);
      if (bad) shared_.bad_page = true;
      if (block < blocks) copy.Start(args_, kv, slot, my_k + stage, sizeof(shared_.k));
      CommitAsync();
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load_stage(first[i], i, i * Traits::kBlockBytes);
    AllowDependentLaunch();  // see DecodeSplitKvKernel
    copy_keys_left -= kAhead * Half::kBlockKeys;
    PageLookup lookup;
    lookup.Start(args_, kv.page_table, kv.end_key, copy_keys_left, Copy::kTileKeys);

    // The first scores.
    int keys_left = range_keys - thread.warp * Half::kTileKeys;
    const uint32_t k_offset = thread.warp * Half::kTileBytes + KOffset<Half>(thread.lane);
    const uint32_t all_k = SharedAddress(shared_.k[0]) + k_offset;
    const auto compute_scores = [&](uint32_t stage) {
      ScoreFragment<Half> scores;
      ComputeScores<Half>(all_k + stage, query, scores);
      StoreScores<Half>(args_, kv, query, thread, keys_left, shared_.bad_page, scores, shared_.scores[half]);
    };
    WaitAsync<kAhead - 1>();
    __syncthreads();
    if (has_rows) compute_scores(0);

    // Mainloop. accumulator: of a split; segment: of a segment's splits so far; tile: of the work tile's segments so
    // far. Their states are those of the half's rows, and are known at the end of a split.
    Accumulator<Half> accumulator, segment, tile;
    accumulator.Clear();
    AttentionState state = {-INFINITY, 0.0f};  // of the softmax's row lane / 4
    const typename Accumulator<Half>::VOffsets v_offsets(thread);
    const uint32_t all_v = SharedAddress(shared_.v[0]);
    uint32_t stage = 0;
    uint32_t stage_before = (Traits::kStages - 1) * Traits::kBlockBytes;
    int split = range.split_begin;
    int split_blocks_left = plan.split_blocks;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      const bool split_ends = --split_blocks_left == 0 || block == blocks - 1;
      const uint32_t stage_next =
          stage == (Traits::kStages - 1) * Traits::kBlockBytes ? 0 : stage + Traits::kBlockBytes;
      WaitAsync<kAhead - 2>();
      // Behind it the block's scores are there, the next block's copies have ended, and the stage of the block before
      // is no longer read.
      __syncthreads();
      load_stage(lookup, block + kAhead, stage_before);
      copy_keys_left -= Half::kBlockKeys;
      lookup.Start(args_, kv.page_table, kv.end_key, copy_keys_left, Copy::kTileKeys);
      if (has_softmax_rows) Softmax(half, thread, split_ends, state);
      __syncthreads();  // the weights are there, and the scores are no longer read
      keys_left -= Half::kBlockKeys;
      if (has_rows && block + 1 < blocks) compute_scores(stage_next);
      if (has_rows) AddValues(half, thread, all_v + stage, v_offsets, accumulator);
      stage_before = stage;
      stage = stage_next;
      if (!split_ends) continue;

      // The end of a split.
      if (has_rows) {
#pragma unroll
        for (int n = 0; n < Half::kRowTiles; ++n) {
          accumulator.state[n] = shared_.state[half * Half::kRows + 8 * n + thread.lane / 4];
        }
        AccumulateSplit<Half, Traits::kHalves>(args_, WholeCta{}, range, rows, half, thread, split, accumulator,
                                               segment, tile);
      }
      accumulator.Clear();
      split_blocks_left = plan.split_blocks;
      ++split;
    }
  }

 private:
  using Half = typename Traits::Half;
  using Copy = typename Traits::Copy;
  // KV blocks that are loaded ahead of the one whose values are computed.
  static constexpr int kAhead = Traits::kStages - 1;
  static_assert(kAhead >= 2 && Half::kRowTiles == Half::kWarps);

  // The online softmax of the eight rows of row tile thread.warp of a half: from scores to weights. As
  // Accumulator::Update. state: of row lane / 4; of its sum each lane has the part of its own keys.
  __device__ void Softmax(int half, const Thread& thread, bool split_ends, AttentionState& state) const {
    using T = typename Traits::Operand;
    const int lane = thread.lane;
    const int row = 8 * thread.warp + lane / 4;  // of the half
    const int column = SharedScores<Half>::Column(row, lane % 4 * 2);
    float weights[Traits::kBlockTiles][4];
    float largest = -INFINITY;
#pragma unroll
    for (int tile = 0; tile < Traits::kBlockTiles; ++tile) {
      const float2 low = *reinterpret_cast<const float2*>(&shared_.scores[half].scores[tile][row][column]);
      const float2 high = *reinterpret_cast<const float2*>(&shared_.scores[half].scores[tile][row][column ^ 8]);
      weights[tile][0] = low.x;
      weights[tile][1] = low.y;
      weights[tile][2] = high.x;
      weights[tile][3] = high.y;
      largest = fmaxf(largest, fmaxf(fmaxf(low.x, low.y), fmaxf(high.x, high.y)));
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    largest = fmaxf(largest, state.max);
    const float shift = largest == -INFINITY ? 0.0f : largest;
    const float correction = Exp2(state.max - shift);
    state.max = largest;
    state.sum *= correction;
#pragma unroll
    for (int tile = 0; tile < Traits::kBlockTiles; ++tile) {
      auto& p = weights[tile];
#pragma unroll
      for (int j = 0; j < 4; ++j) p[j] = Exp2(p[j] - shift);
      state.sum += (p[0] + p[1]) + (p[2] + p[3]);
      shared_.weights[half][tile][thread.warp][lane] = {Pack<T>(p[0], p[1]), Pack<T>(p[2], p[3])};
    }
    const int cta_row = half * Half::kRows + row;
    if (lane % 4 == 0) shared_.correction[cta_row] = correction;
    if (!split_ends) return;
    state.sum += __shfl_xor_sync(0xffffffffu, state.sum, 1);
    state.sum += __shfl_xor_sync(0xffffffffu, state.sum, 2);
    if (lane % 4 == 0) shared_.state[cta_row] = state;
    state = {-INFINITY, 0.0f};
  }

  // Adds a KV block's values to the half's rows and the warp's columns. v_tiles: the address of the stage's V.
  __device__ void AddValues(int half, const Thread& thread, uint32_t v_tiles,
                            const typename Accumulator<Half>::VOffsets& v_offsets,
                            Accumulator<Half>& accumulator) const {
    float2 correction[Half::kRowTiles];  // of rows 2t and 2t + 1
    bool changed = false;
#pragma unroll
    for (int n = 0; n < Half::kRowTiles; ++n) {
      correction[n] =
          *reinterpret_cast<const float2*>(&shared_.correction[half * Half::kRows + 8 * n + thread.lane % 4 * 2]);
      changed = changed || correction[n].x != 1.0f || correction[n].y != 1.0f;
    }
    if (__any_sync(0xffffffffu, changed)) {
#pragma unroll
      for (int n = 0; n < Half::kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < Half::kColumnTiles; ++i) {
          accumulator.o[i][n][0] *= correction[n].x;
          accumulator.o[i][n][1] *= correction[n].y;
          accumulator.o[i][n][2] *= correction[n].x;
          accumulator.o[i][n][3] *= correction[n].y;
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < Traits::kBlockTiles; ++tile) {
      uint32_t b[Half::kRowTiles][2];
#pragma unroll
      for (int n = 0; n < Half::kRowTiles; ++n) {
        const uint2 weights = shared_.weights[half][tile][n][thread.lane];
        b[n][0] = weights.x;
        b[n][1] = weights.y;
      }
      accumulator.AddValues(v_tiles + tile * 16 * Half::kRowBytes, v_offsets, thread, b);
    }
  }

  const DecodeArgs& args_;
  Shared& shared_;
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_WIDE_MAINLOOP_CUH_
