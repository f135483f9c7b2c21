#include <cmath>

#include "ffi/host/convert.h"
#include "ffi/host/parallel_rows.h"
#include "ffi/ops/silu_and_mul/silu_and_mul.h"

namespace xla_gpu {
namespace {

// Elements of one work item: enough to outweigh a thread's wake-up.
constexpr int64_t kActivationBlock = int64_t{1} << 13;

float Silu(float x) { return x / (1.0f + std::exp(-x)); }

// As in device/activation.cuh.
float GeluTanh(float x) {
  const float inner = 1.5957691216057308f * (x + 0.044715f * x * x * x);  // 2 sqrt(2 / pi)
  return x / (1.0f + std::exp(-inner));
}

template <class Element>
void Row(const ActivationAndMulParams& p, int64_t row) {
  using Stored = typename Element::Stored;
  const auto* gate = static_cast<const Stored*>(p.x) + row * 2 * p.size;
  const auto* up = gate + p.size;
  auto* out = static_cast<Stored*>(p.out) + row * p.size;
  for (int64_t i = 0; i < p.size; ++i) {
    const float x = Element::Load(gate[i]);
    const float active = p.activation == GatedActivation::kSilu ? Silu(x) : GeluTanh(x);
    out[i] = Element::Store(Element::Load(Element::Store(active)) * Element::Load(up[i]));
  }
}

template <class Element>
Status Rows(const ActivationAndMulParams& p, const Executor& executor) {
  ParallelForRows(executor, p.num_rows, p.size, kActivationBlock, [&p](int64_t row) { Row<Element>(p, row); });
  return Status::Ok();
}

}  // namespace

Status RunActivationAndMul(const ActivationAndMulParams& params, const Executor& executor) {
  return WithElement(params.dtype, [&](auto element) { return Rows<decltype(element)>(params, executor); });
}

}  // namespace xla_gpu
