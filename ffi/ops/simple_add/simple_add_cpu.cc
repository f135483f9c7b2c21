#include <algorithm>

#include "ffi/host/convert.h"
#include "ffi/host/float_mode.h"
#include "ffi/host/parallel_for.h"
#include "ffi/ops/simple_add/simple_add.h"

namespace xla_gpu {
namespace {

// Elements of one work item: enough to outweigh a thread's wake-up.
constexpr int64_t kAddBlock = int64_t{1} << 16;

template <class Element>
void AddBlock(const SimpleAddParams& params, int64_t begin, int64_t end) {
  using Stored = typename Element::Stored;
  const auto* a = static_cast<const Stored*>(params.a);
  const auto* b = static_cast<const Stored*>(params.b);
  auto* out = static_cast<Stored*>(params.out);
  for (int64_t i = begin; i < end; ++i) out[i] = Element::Store(Element::Load(a[i]) + Element::Load(b[i]));
}

template <class Element>
Status Add(const SimpleAddParams& params, const Executor& executor) {
  ParallelFor(executor, (params.size + kAddBlock - 1) / kAddBlock, [&params](int64_t block) {
    const ScopedFloatMode mode;
    AddBlock<Element>(params, block * kAddBlock, std::min(params.size, (block + 1) * kAddBlock));
  });
  return Status::Ok();
}

}  // namespace

Status RunSimpleAdd(const SimpleAddParams& params, const Executor& executor) {
  return WithElement(params.dtype, [&](auto element) { return Add<decltype(element)>(params, executor); });
}

}  // namespace xla_gpu
