#include <algorithm>

#include "ffi/host/convert.h"
#include "ffi/host/float_mode.h"
#include "ffi/host/rms_norm.h"
#include "ffi/ops/rms_norm/rms_norm.h"

namespace xla_gpu {
namespace {

// Elements of one work item: enough to outweigh a thread's wake-up.
constexpr int64_t kBlock = int64_t{1} << 14;

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
  const int64_t rows = std::max<int64_t>(1, kBlock / std::max<int64_t>(p.size, 1));  // of one work item
  ParallelFor(executor, (p.num_rows + rows - 1) / rows, [&p, rows](int64_t block) {
    const ScopedFloatMode mode;
    const int64_t end = std::min(p.num_rows, (block + 1) * rows);
    for (int64_t row = block * rows; row < end; ++row) NormRow<Element>(p, row);
  });
  return Status::Ok();
}

}  // namespace

Status RunRmsNorm(const RmsNormParams& params, const Executor& executor) {
  return WithElement(params.dtype, [&](auto element) { return Norm<decltype(element)>(params, executor); });
}

}  // namespace xla_gpu
