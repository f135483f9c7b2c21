#include <algorithm>
#include <cmath>
#include <limits>

#include "ffi/host/convert.h"
#include "ffi/host/float_mode.h"
#include "ffi/host/parallel_for.h"
#include "ffi/ops/merge_attention_states/merge_attention_states.h"

namespace xla_gpu {
namespace {

// Rows of one work item: enough to outweigh a thread's wake-up.
constexpr int64_t kMergeRows = 256;

template <class Element>
void MergeRow(const MergeAttentionStatesParams& p, int64_t row) {
  using Stored = typename Element::Stored;
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const auto* a = static_cast<const Stored*>(p.out_a) + row * p.head_dim;
  const auto* b = static_cast<const Stored*>(p.out_b) + row * p.head_dim;
  auto* out = static_cast<Stored*>(p.out) + row * p.head_dim;
  const float lse_a = p.lse_a[row];
  const float lse_b = p.lse_b[row];
  // A state that saw no key does not contribute, whatever its values are. Two of them give another one.
  if (lse_a == kNone || lse_b == kNone) {
    const Stored* other = lse_b == kNone ? a : b;
    p.lse[row] = lse_b == kNone ? lse_a : lse_b;
    for (int64_t d = 0; d < p.head_dim; ++d) out[d] = p.lse[row] == kNone ? Element::Store(0.0f) : other[d];
    return;
  }
  const float max = std::max(lse_a, lse_b);
  const float weight_a = std::exp(lse_a - max);
  const float weight_b = std::exp(lse_b - max);
  const float sum = weight_a + weight_b;
  p.lse[row] = max + std::log(sum);
  for (int64_t d = 0; d < p.head_dim; ++d) {
    out[d] = Element::Store((weight_a * Element::Load(a[d]) + weight_b * Element::Load(b[d])) / sum);
  }
}

template <class Element>
Status Merge(const MergeAttentionStatesParams& params, const Executor& executor) {
  ParallelFor(executor, (params.num_rows + kMergeRows - 1) / kMergeRows, [&params](int64_t block) {
    const ScopedFloatMode mode;
    const int64_t end = std::min(params.num_rows, (block + 1) * kMergeRows);
    for (int64_t row = block * kMergeRows; row < end; ++row) MergeRow<Element>(params, row);
  });
  return Status::Ok();
}

}  // namespace

Status RunMergeAttentionStates(const MergeAttentionStatesParams& params, const Executor& executor) {
  return WithElement(params.dtype, [&](auto element) { return Merge<decltype(element)>(params, executor); });
}

}  // namespace xla_gpu
