#include <algorithm>

#include "ffi/host/convert.h"
#include "ffi/host/float_mode.h"
#include "ffi/host/parallel_rows.h"
#include "ffi/host/rms_norm.h"
#include "ffi/ops/all_reduce/all_reduce.h"

namespace xla_gpu {
namespace {

// Elements of one work item: enough to outweigh a thread's wake-up.
constexpr int64_t kAllReduceBlock = int64_t{1} << 14;

// The sum of element i of all ranks, in their order.
template <class Element>
float SumOfParts(const typename Element::Stored* parts, int64_t ranks, int64_t stride, int64_t i) {
  float sum = Element::Load(parts[i]);
  for (int64_t r = 1; r < ranks; ++r) sum += Element::Load(parts[r * stride + i]);
  return sum;
}

template <class Element>
Status Sum(const AllReduceParams& p, const Executor& executor) {
  using Stored = typename Element::Stored;
  ParallelFor(executor, (p.size + kAllReduceBlock - 1) / kAllReduceBlock, [&p](int64_t block) {
    const ScopedFloatMode mode;
    const auto* parts = static_cast<const Stored*>(p.x);
    auto* out = static_cast<Stored*>(p.out);
    const int64_t end = std::min(p.size, (block + 1) * kAllReduceBlock);
    for (int64_t i = block * kAllReduceBlock; i < end; ++i) {
      out[i] = Element::Store(SumOfParts<Element>(parts, p.ranks, p.size, i));
    }
  });
  return Status::Ok();
}

template <class Element>
void NormRow(const AllReduceAddRmsNormParams& p, int64_t row) {
  using Stored = typename Element::Stored;
  const int64_t at = row * p.hidden, stride = p.num_rows * p.hidden;
  const auto* parts = static_cast<const Stored*>(p.x) + at;
  const auto* residual = static_cast<const Stored*>(p.residual) + at;
  const auto* weight = static_cast<const Stored*>(p.weight);
  auto* out = static_cast<Stored*>(p.out) + at;
  auto* sum = static_cast<Stored*>(p.sum) + at;
  for (int64_t i = 0; i < p.hidden; ++i) {
    const float reduced = Rounded<Element>(SumOfParts<Element>(parts, p.ranks, stride, i));
    sum[i] = Element::Store(reduced + Element::Load(residual[i]));
  }
  RmsNormRow<Element>(sum, weight, out, p.hidden, p.eps, {});
}

template <class Element>
Status Norm(const AllReduceAddRmsNormParams& p, const Executor& executor) {
  ParallelForRows(executor, p.num_rows, p.hidden, kAllReduceBlock, [&p](int64_t row) { NormRow<Element>(p, row); });
  return Status::Ok();
}

}  // namespace

Status RunAllReduce(const AllReduceParams& params, const Executor& executor) {
  return WithElement(params.dtype, [&](auto element) { return Sum<decltype(element)>(params, executor); });
}

Status RunAllReduceAddRmsNorm(const AllReduceAddRmsNormParams& params, const Executor& executor) {
  return WithElement(params.dtype, [&](auto element) { return Norm<decltype(element)>(params, executor); });
}

}  // namespace xla_gpu
