#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "ffi/host/convert.h"
#include "ffi/host/float_mode.h"
#include "ffi/host/isa.h"
#include "ffi/host/parallel_for.h"
#include "ffi/ops/paged_attention/cpu/plan.h"
#include "ffi/ops/paged_attention/cpu/tile.h"
#include "ffi/ops/paged_attention/paged_attention.h"

namespace xla_gpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

AttendTileFunction* SelectAttendTile() {
#if defined(__x86_64__)
  switch (SelectedIsa()) {
    case Isa::kAvx512:
      return &simd_avx512::AttendTile;
    case Isa::kAvx2:
      return &simd_avx2::AttendTile;
    case Isa::kBaseline:
      break;
  }
#endif
  return &simd_baseline::AttendTile;
}

struct AlignedDelete {
  void operator()(float* floats) const { ::operator delete(floats, std::align_val_t{64}); }
};
using AlignedFloats = std::unique_ptr<float, AlignedDelete>;

AlignedFloats AllocateFloats(int64_t count) {
  return AlignedFloats(static_cast<float*>(::operator new(count * sizeof(float), std::align_val_t{64})));
}

// Working memory for as many work tiles as run at once. Allocated before the work begins: a work tile cannot report
// that there is none.
class Workspaces {
 public:
  Workspaces(int64_t count, int64_t floats_each)
      : floats_each_((floats_each + 15) / 16 * 16), memory_(AllocateFloats(count * floats_each_)), free_(count) {
    for (int64_t i = 0; i < count; ++i) free_[i] = memory_.get() + i * floats_each_;
  }

  float* Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    float* const workspace = free_.back();
    free_.pop_back();
    return workspace;
  }

  void Return(float* workspace) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(workspace);  // capacity is there since the start
  }

 private:
  const int64_t floats_each_;
  const AlignedFloats memory_;
  std::mutex mutex_;
  std::vector<float*> free_;
};

template <class Element>
void StoreRow(const float* values, int64_t count, int64_t row, void* out) {
  auto* to = static_cast<typename Element::Stored*>(out) + row * count;
  for (int64_t i = 0; i < count; ++i) to[i] = Element::Store(values[i]);
}

void StoreOutput(const PagedAttentionCall& params, const float* values, int64_t row) {
  WithElement(params.dtype,
              [&](auto element) { StoreRow<decltype(element)>(values, params.ValueDim(), row, params.out); });
}

// Combines one row's states, which lie `rows_apart` rows apart, in the order of their keys, and writes its result.
void CombineRow(const PagedAttentionCall& params, const TileStates& first, int64_t num_states, int64_t rows_apart,
                int64_t head, int64_t out_row) {
  const int64_t value_dim = params.ValueDim();
  const int64_t stride = AccStride(value_dim);
  const float* const sink = params.sinks != nullptr ? params.sinks + out_row % params.num_heads : nullptr;
  bool sees_a_key = false;
  float largest = -kInfinity;
  for (int64_t i = 0; i < num_states; ++i) {
    const float* max_sum = first.max_sum + i * rows_apart * 2;
    sees_a_key |= max_sum[1] != 0;  // NaN counts
    largest = std::max(largest, max_sum[0]);
  }
  float merged[kMaxHostValueDim] = {};
  float lse = -kInfinity;
  if (sees_a_key) {
    if (sink != nullptr) largest = std::max(largest, *sink);
    const float shift = largest == -kInfinity ? 0.0f : largest;
    float total = sink != nullptr ? std::exp(*sink - shift) : 0.0f;
    for (int64_t i = 0; i < num_states; ++i) {
      const float* const max_sum = first.max_sum + i * rows_apart * 2;
      const float* const acc = first.acc + i * rows_apart * stride;
      const float weight = std::exp(max_sum[0] - shift);
      total += weight * max_sum[1];
      for (int64_t d = 0; d < value_dim; ++d) merged[d] += weight * acc[d];
    }
    const float v_scale = params.v_scale != nullptr ? params.v_scale[params.scale_per_head ? head : 0] : 1.0f;
    for (int64_t d = 0; d < value_dim; ++d) merged[d] = merged[d] / total * v_scale;
    lse = shift + std::log(total);
  }
  StoreOutput(params, merged, out_row);
  if (params.lse != nullptr) params.lse[out_row] = lse;
}

// Combines the KV splits of a block. `first`: the states of the first split; those of the next splits follow.
void CombineSplits(const PagedAttentionCall& params, const AttentionBlock& block, const TileStates& first) {
  const AttentionTile& tile = block.tile;
  const int64_t group = params.num_heads / params.num_kv_heads;
  const int64_t rows_per_split = (tile.head_end - tile.head_begin) * RowsOf(params, tile);
  const int64_t stride = AccStride(params.ValueDim());
  int64_t row = 0;
  for (int64_t head = tile.head_begin; head < tile.head_end; ++head) {
    for (int64_t i = 0; i < tile.num_queries; ++i) {
      for (int64_t g = 0; g < group; ++g, ++row) {
        const TileStates state = {first.acc + row * stride, first.max_sum + row * 2};
        const int64_t out_row = (tile.token + i) * params.num_heads + head * group + g;
        CombineRow(params, state, block.num_splits, rows_per_split, head, out_row);
      }
    }
  }
}

// Writes the padding rows [begin, end), which belong to no sequence.
void ClearTokens(const PagedAttentionCall& params, int64_t begin, int64_t end) {
  const int64_t row_bytes = params.num_heads * params.ValueDim() * static_cast<int64_t>(SizeOf(params.dtype));
  if (end <= begin) return;
  std::memset(static_cast<char*>(params.out) + begin * row_bytes, 0, (end - begin) * row_bytes);
  if (params.lse != nullptr) {
    std::fill(params.lse + begin * params.num_heads, params.lse + end * params.num_heads, -kInfinity);
  }
}

void Attend(const PagedAttentionCall& params, const Executor& executor) {
  const int64_t num_threads = executor.num_threads() + 1;
  const AttentionPlan plan = PlanAttention(params, num_threads);
  const int64_t num_work_tiles = plan.work_tiles.size();
  const int64_t stride = AccStride(params.ValueDim());

  // The states of blocks with several KV splits. Those of blocks with one split lie behind their work tile's workspace.
  const AlignedFloats split_acc = AllocateFloats(plan.state_rows * stride);
  const AlignedFloats split_max_sum = AllocateFloats(plan.state_rows * 2);
  Workspaces workspaces(std::min(num_threads, num_work_tiles),
                        plan.workspace_floats + plan.max_tile_rows * (stride + 2));
  const std::unique_ptr<std::atomic<int64_t>[]> splits_left(new std::atomic<int64_t>[plan.blocks.size()]);
  for (size_t i = 0; i < plan.blocks.size(); ++i) splits_left[i] = plan.blocks[i].num_splits;

  const auto attend_tile = SelectAttendTile();
  ParallelFor(executor, num_work_tiles, [&](int64_t i) {
    const ScopedFloatMode mode;
    const WorkTile& work_tile = plan.work_tiles[i];
    const AttentionBlock& block = plan.blocks[work_tile.block];
    AttentionTile tile = block.tile;
    tile.key_begin += work_tile.split * block.split_keys;
    tile.key_end = std::min(tile.key_begin + block.split_keys, tile.key_end);

    float* const workspace = workspaces.Take();
    float* const own_state = workspace + plan.workspace_floats;
    TileStates first = {own_state, own_state + plan.max_tile_rows * stride};
    TileStates state = first;
    if (block.first_state >= 0) {
      first = {split_acc.get() + block.first_state * stride, split_max_sum.get() + block.first_state * 2};
      const int64_t rows = work_tile.split * (tile.head_end - tile.head_begin) * RowsOf(params, tile);
      state = {first.acc + rows * stride, first.max_sum + rows * 2};
    }
    attend_tile(params, tile, state, workspace);
    if (splits_left[work_tile.block].fetch_sub(1, std::memory_order_acq_rel) == 1) CombineSplits(params, block, first);
    workspaces.Return(workspace);
  });
}

}  // namespace

Status RunPagedAttention(const PagedAttentionCall& params, const Executor& executor) {
  const int64_t num_seqs = params.num_seqs[0];
  const int64_t begin = num_seqs > 0 ? params.query_start_loc[0] : 0;
  const int64_t end = num_seqs > 0 ? params.query_start_loc[num_seqs] : 0;
  ClearTokens(params, 0, begin);
  ClearTokens(params, end, params.num_tokens);
  if (end > begin) Attend(params, executor);
  return Status::Ok();
}

}  // namespace xla_gpu
