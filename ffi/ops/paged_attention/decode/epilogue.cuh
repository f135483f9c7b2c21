// What becomes of an accumulator of the split-KV kernel: the output's rows, or a split accumulator in the scratch.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_EPILOGUE_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_EPILOGUE_CUH_

#include <cstdint>

#include "ffi/ops/paged_attention/decode/mainloop.cuh"
#include "ffi/ops/paged_attention/decode/output_rows.cuh"
#include "ffi/ops/paged_attention/decode/split_accumulators.cuh"

namespace xla_gpu::decode {

// Writes the rows of a sequence without keys: 0, or NaN if its context_len is not valid.
template <typename Traits>
__device__ inline void StoreEmptyRows(const DecodeArgs& args, const SequencePlan& plan, const WorkTile& work_tile) {
  const int rows = min(plan.q_len * args.group_size - work_tile.row_tile * Traits::kRows, Traits::kRows);
  const int columns = static_cast<int>(args.params.head_dim) / 4;
  const PartialState empty = {{-INFINITY, plan.valid ? 0.0f : NAN}, {0.0f, 0.0f, 0.0f, 0.0f}};
  for (int i = Traits::Cta::Thread(); i < rows * columns; i += Traits::kThreads) {
    const int row = work_tile.row_tile * Traits::kRows + i / columns;
    const RowIndex index = RowIndex::Of(args, plan.q_begin, work_tile.kv_head, row);
    StoreColumns(args, OutputRow::Of(args, index), i % columns * 4, empty);
  }
}

// Stores the first `rows` rows to split accumulator `index`, from its row `first_row` on.
template <typename Traits>
__device__ inline void StorePartial(const DecodeArgs& args, unsigned index, int first_row, const Thread& thread,
                                    int rows, const Accumulator<Traits>& accumulator) {
  const int head_dim = static_cast<int>(args.params.head_dim);
  const uint32_t offset = SplitAccumulators::RowOffset(args, index, first_row);
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n) {
    const int state_row = 8 * n + thread.lane / 4;
    if (thread.warp == 0 && thread.lane % 4 == 0 && state_row < rows) {
      *SplitAccumulators::State(args, offset + static_cast<unsigned>(state_row) * args.accum_row_stride) =
          accumulator.state[n];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 8 * n + thread.lane % 4 * 2 + i;
      if (row >= rows) continue;
      float* const o = SplitAccumulators::O(args, offset + static_cast<unsigned>(row) * args.accum_row_stride);
#pragma unroll
      for (int tile = 0; tile < Traits::kColumnTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int column = Accumulator<Traits>::Column(thread, tile, half);
          if (column < head_dim) o[column] = accumulator.o[tile][n][i + 2 * half];
        }
      }
    }
  }
}

// Normalizes the first `rows` rows, and writes them to out and lse.
template <typename Traits>
__device__ inline void StoreOutput(const DecodeArgs& args, const SequencePlan& plan, const WorkTile& work_tile,
                                   const Thread& thread, int rows, const Accumulator<Traits>& accumulator) {
  const PagedAttentionParams& params = args.params;
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n) {
    // Rows past the last one take its head: all lanes take part in the shuffles.
    const int state_row = 8 * n + thread.lane / 4;
    const int existing_row = work_tile.row_tile * Traits::kRows + min(state_row, rows - 1);
    const RowIndex index = RowIndex::Of(args, plan.q_begin, work_tile.kv_head, existing_row);
    float lse;
    const float row_factor = FinalizeRow(args, accumulator.state[n], HeadEpilogue::Of(args, index.head), &lse);
    const bool writes_lse = params.lse != nullptr && thread.warp == 0 && thread.lane % 4 == 0;
    if (writes_lse && state_row < rows) params.lse[index.index] = lse;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float factor = FromRow(row_factor, i);
      const int row = 8 * n + thread.lane % 4 * 2 + i;
      if (row >= rows) continue;
      const int64_t offset =
          RowIndex::Of(args, plan.q_begin, work_tile.kv_head, work_tile.row_tile * Traits::kRows + row).index *
          params.head_dim;
      uint16_t* const out = static_cast<uint16_t*>(params.out) + offset;
#pragma unroll
      for (int tile = 0; tile < Traits::kColumnTiles; ++tile) {
        const float low = accumulator.o[tile][n][i] * factor;
        const float high = accumulator.o[tile][n][i + 2] * factor;
        const uint32_t two = params.dtype == DType::kBF16 ? Pack<__nv_bfloat16>(low, high) : Pack<__half>(low, high);
        const int column = Accumulator<Traits>::Column(thread, tile, 0);
        const int other = Accumulator<Traits>::Column(thread, tile, 1);
        if (column < params.head_dim) out[column] = static_cast<uint16_t>(two);
        if (other < params.head_dim) out[other] = static_cast<uint16_t>(two >> 16);
      }
    }
  }
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_EPILOGUE_CUH_
