#include "ffi/host/convert.h"
#include "ffi/host/parallel_rows.h"
#include "ffi/host/rms_norm.h"
#include "ffi/ops/rms_norm/rms_norm.h"

namespace xla_gpu {
namespace {

// Elements of one work item: enough to outweigh a thread's wake-up.
constexpr int64_t kRmsNormBlock = int64_t{1} << 14;

template <class Element>
void NormRow(const RmsNormParams& p, int64_t row) {
  using Stored = typename Element::Stored;
  const int64_t at = row * p.size;
  const auto* x = static_cast<const Stored*>(p.x) + at;
  if (p.residual != nullptr) {
    const auto* residual = static_cast<const Stored*>(p.residual) + at;
    auto* sum = static_cast<Stored*>(p.sum) + at;
    for (int64_t i = 0; i < p.size; ++i) sum[i] = Element::Store(Element::Load(x[i]) + Element::Load(residual[i]));
    x = sum;
  }
  RmsNormRow<Element>(x, static_cast<const Stored*>(p.weight), static_cast<Stored*>(p.out) + at, p.size, p.eps,
                      {p.weight_offset, p.round_once});
}

template <class Element>
Status Norm(const RmsNormParams& p, const Executor& executor) {
  ParallelForRows(executor, p.num_rows, p.size, kRmsNormBlock, [&p](int64_t row) { NormRow<Element>(p, row); });
  return Status::Ok();
}

}  // namespace

Status RunRmsNorm(const RmsNormParams& params, const Executor& executor) {
  return WithElement(params.dtype, [&](auto element) { return Norm<decltype(element)>(params, executor); });
}

}  // namespace xla_gpu
