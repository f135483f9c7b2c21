#include <algorithm>

#include "ffi/host/convert.h"
#include "ffi/host/float_mode.h"
#include "ffi/ops/simple_add/simple_add.h"

namespace xla_gpu {
namespace {

// Elements of one work item: enough to outweigh a thread's wake-up.
constexpr int64_t kBlock = int64_t{1} << 16;

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
  ParallelFor(executor, (params.size + kBlock - 1) / kBlock, [&params](int64_t block) {
    const ScopedFloatMode mode;
    AddBlock<Element>(params, block * kBlock, std::min(params.size, (block + 1) * kBlock));
  });
  return Status::Ok();
}

}  // namespace

Status RunSimpleAdd(const SimpleAddParams& params, const Executor& executor) {
  switch (params.dtype) {
    case DType::kF32:
      return Add<Float32>(params, executor);
    case DType::kF16:
      return Add<Float16>(params, executor);
    case DType::kBF16:
      return Add<BFloat16>(params, executor);
    case DType::kF8E4M3FN:
    case DType::kF8E5M2:
      break;
  }
  return Status::InvalidArgument("simple_add: a: expected float32, float16 or bfloat16, got a float8 type");
}

}  // namespace xla_gpu
