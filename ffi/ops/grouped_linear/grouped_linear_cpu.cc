// grouped_linear on a CPU: linear's product for the rows of each group.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "ffi/host/convert.h"
#include "ffi/host/float_mode.h"
#include "ffi/host/parallel_for.h"
#include "ffi/ops/grouped_linear/grouped_linear.h"

namespace xla_gpu {
namespace {

constexpr int64_t kRowsOfItem = 16;  // weight rows that one work item makes

// As kMxfp4Shift of weights.cuh says, scales of more than 2^33 are infinite on a GPU, and here.
float Mxfp4Scale(uint8_t byte, DType dtype) {
  if (byte == 255) return std::numeric_limits<float>::quiet_NaN();
  const int exponent = static_cast<int>(byte) - 127;
  const int largest = dtype == DType::kF16 ? 15 : 33;
  return exponent > largest ? std::numeric_limits<float>::infinity() : std::ldexp(1.0f, exponent);
}

// Weight rows of mxfp4 as T.
template <typename Element>
void MakeMxfp4Rows(const GroupedLinearParams& p, int64_t group, int64_t begin, int64_t end,
                   typename Element::Stored* to) {
  constexpr float kValues[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const auto* const weight = static_cast<const uint8_t*>(p.weight);
  const auto* const scales = static_cast<const uint8_t*>(p.weight_scale);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t first = (group * p.n + row) * p.k;
    for (int64_t begin_k = 0; begin_k < p.k; begin_k += kMxfp4Group) {
      const float scale = Mxfp4Scale(scales[(first + begin_k) / kMxfp4Group], p.dtype);
      for (int64_t i = begin_k; i < begin_k + kMxfp4Group; ++i) {
        const int code = weight[(first + i) / 2] >> (i % 2 * 4) & 0xf;
        to[row * p.k + i] = Element::Store((code & 8 ? -kValues[code & 7] : kValues[code & 7]) * scale);
      }
    }
  }
}

LinearParams OfGroup(const GroupedLinearParams& p, int64_t group, int64_t first_row, int64_t rows) {
  const auto at = [](const void* array, int64_t bytes) -> const char* {
    return array == nullptr ? nullptr : static_cast<const char*>(array) + bytes;
  };
  const int64_t item = static_cast<int64_t>(SizeOf(p.dtype)), matrix = group * p.n * p.k;
  const int64_t blocks = (p.n + kQuantGroup - 1) / kQuantGroup, groups = (p.k + kQuantGroup - 1) / kQuantGroup;
  LinearParams of{};
  of.x = at(p.x, first_row * p.k * item);
  of.out = const_cast<char*>(at(p.out, first_row * p.n * item));
  of.bias = at(p.bias, group * p.n * item);
  of.rows = rows;
  of.n = p.n;
  of.k = p.k;
  of.dtype = p.dtype;
  of.scale = p.scale;
  of.activation = Activation::kNone;
  switch (p.format) {
    case GroupedFormat::kPlain:
    case GroupedFormat::kMxfp4:
      of.format = WeightFormat::kPlain;
      of.scale = WeightScale::kNone;
      of.weight = at(p.weight, matrix * item);
      return of;
    case GroupedFormat::kFloat8:
    case GroupedFormat::kInt8:
      of.format = p.format == GroupedFormat::kInt8 ? WeightFormat::kInt8 : WeightFormat::kFloat8;
      of.weight = at(p.weight, matrix);
      of.weight_scale = at(p.weight_scale, group * (p.scale == WeightScale::kBlock ? blocks * groups : p.n) * 4);
      return of;
    case GroupedFormat::kInt4:
      break;
  }
  of.format = WeightFormat::kInt4;
  of.weight = at(p.weight, matrix / 2);
  of.weight_scale = at(p.weight_scale, group * p.n * groups * item);
  of.zero_point = p.zero_point == nullptr ? nullptr : p.zero_point + group * p.n * groups;
  return of;
}

template <typename Element>
Status RunMxfp4(const GroupedLinearParams& p, int64_t group, LinearParams of, const Executor& executor) {
  std::vector<typename Element::Stored> made(p.n * p.k);
  ParallelFor(executor, (p.n + kRowsOfItem - 1) / kRowsOfItem, [&](int64_t item) {
    const ScopedFloatMode mode;
    MakeMxfp4Rows<Element>(p, group, item * kRowsOfItem, std::min(p.n, (item + 1) * kRowsOfItem), made.data());
  });
  of.weight = made.data();
  return RunLinear(of, executor);
}

}  // namespace

Status RunGroupedLinear(const GroupedLinearParams& p, const Executor& executor) {
  int64_t row = 0;
  for (int64_t group = 0; group < p.num_groups && row < p.rows; ++group) {
    const int64_t rows = std::clamp<int64_t>(p.group_sizes[group], 0, p.rows - row);
    if (rows == 0) continue;
    const LinearParams of = OfGroup(p, group, row, rows);
    const Status status =
        p.format != GroupedFormat::kMxfp4
            ? RunLinear(of, executor)
            : WithElement(p.dtype, [&](auto element) { return RunMxfp4<decltype(element)>(p, group, of, executor); });
    if (!status.ok()) return status;
    row += rows;
  }
  const int64_t row_bytes = p.n * static_cast<int64_t>(SizeOf(p.dtype));
  std::fill(static_cast<char*>(p.out) + row * row_bytes, static_cast<char*>(p.out) + p.rows * row_bytes, 0);
  return Status::Ok();
}

}  // namespace xla_gpu
