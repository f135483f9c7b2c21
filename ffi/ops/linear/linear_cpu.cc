#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ffi/host/convert.h"
#include "ffi/host/float_mode.h"
#include "ffi/host/parallel_for.h"
#include "ffi/ops/linear/linear.h"

namespace xla_gpu {
namespace {

constexpr int64_t kFeatures = 16;  // of one work item
constexpr int64_t kChunk = 512;    // values of k that are converted at a time; a multiple of a group
constexpr int64_t kRows = 32;      // that use a converted chunk
constexpr int64_t kLanes = 16;     // partial sums of one product, which a compiler keeps in vectors

// Values [begin, begin + count) of a weight row as float32, without a scale of the whole row.
template <class Element>
void ReadWeights(const LinearParams& p, int64_t row, int64_t begin, int64_t count, float* to) {
  const int64_t groups = (p.k + kQuantGroup - 1) / kQuantGroup;
  switch (p.format) {
    case WeightFormat::kPlain: {
      const auto* from = static_cast<const typename Element::Stored*>(p.weight) + row * p.k + begin;
      for (int64_t i = 0; i < count; ++i) to[i] = Element::Load(from[i]);
      return;
    }
    case WeightFormat::kFloat8: {
      const auto* from = static_cast<const uint8_t*>(p.weight) + row * p.k + begin;
      for (int64_t i = 0; i < count; ++i) to[i] = Float8E4M3FNToFloat(from[i]);
      if (p.scale != WeightScale::kBlock) return;
      const auto* scales = static_cast<const float*>(p.weight_scale) + row / kQuantGroup * groups;
      for (int64_t i = 0; i < count; ++i) to[i] *= scales[(begin + i) / kQuantGroup];
      return;
    }
    case WeightFormat::kInt8: {
      const auto* from = static_cast<const int8_t*>(p.weight) + row * p.k + begin;
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]);
      return;
    }
    case WeightFormat::kInt4:
      break;
  }
  const auto* from = static_cast<const uint8_t*>(p.weight) + (row * p.k + begin) / 2;
  const auto* scales = static_cast<const typename Element::Stored*>(p.weight_scale) + row * groups;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t group = (begin + i) / kQuantGroup;
    // Nibbles of four bytes hold values 0, 2, 4, 6, 1, 3, 5, 7.
    const int64_t nibble = i % 2 * 4 + i % 8 / 2;
    const int value = from[i / 8 * 4 + nibble / 2] >> (nibble % 2 * 4) & 0xf;
    const int zero_point = p.zero_point == nullptr ? 8 : p.zero_point[row * groups + group];
    to[i] = static_cast<float>(value - zero_point) * Element::Load(scales[group]);
  }
}

float Dot(const float* a, const float* b, int64_t count, float (&lanes)[kLanes]) {
  for (int64_t i = 0; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  }
  float sum = 0.0f;
  for (float lane : lanes) sum += lane;
  return sum;
}

template <class Element>
float Round(float value) {
  return Element::Load(Element::Store(value));
}

template <class Element>
float ActivationOf(Activation activation, float gate) {
  if (activation == Activation::kSiluAndMul) return Round<Element>(gate / (1.0f + std::exp(-gate)));
  const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
  return Round<Element>(0.5f * gate * (1.0f + std::tanh(inner)));
}

// The feature of weight row `weight_row` for rows [first, first + count) of x, scaled, with bias, rounded to T.
template <class Element>
void Features(const LinearParams& p, const float* x, int64_t weight_row, int64_t first, int64_t count, float* to) {
  float lanes[kRows][kLanes] = {};
  float chunk[kChunk];
  for (int64_t begin = 0; begin < p.k; begin += kChunk) {
    const int64_t size = std::min(kChunk, p.k - begin);
    ReadWeights<Element>(p, weight_row, begin, size, chunk);
    for (int64_t r = 0; r < count; ++r) to[r] = Dot(x + (first + r) * p.k + begin, chunk, size, lanes[r]);
  }
  const auto* scales = static_cast<const float*>(p.weight_scale);
  for (int64_t r = 0; r < count; ++r) {
    if (p.scale == WeightScale::kTensor) to[r] *= scales[0];
    if (p.scale == WeightScale::kChannel) to[r] *= scales[weight_row];
    if (p.bias != nullptr) to[r] += Element::Load(static_cast<const typename Element::Stored*>(p.bias)[weight_row]);
    to[r] = Round<Element>(to[r]);
  }
}

template <class Element>
void ComputeFeature(const LinearParams& p, const float* x, int64_t feature, int64_t first, int64_t count) {
  using Stored = typename Element::Stored;
  const int64_t out_features = p.out_features();
  float values[kRows], factors[kRows];
  Features<Element>(p, x, feature, first, count, values);
  if (p.activation != Activation::kNone) {
    Features<Element>(p, x, out_features + feature, first, count, factors);
    for (int64_t r = 0; r < count; ++r) values[r] = ActivationOf<Element>(p.activation, values[r]) * factors[r];
  }
  for (int64_t r = 0; r < count; ++r) {
    const int64_t at = (first + r) * out_features + feature;
    if (p.residual != nullptr) {
      values[r] = Round<Element>(values[r]) + Element::Load(static_cast<const Stored*>(p.residual)[at]);
    }
    static_cast<Stored*>(p.out)[at] = Element::Store(values[r]);
  }
}

template <class Element>
Status Compute(const LinearParams& p, const Executor& executor) {
  const auto* stored = static_cast<const typename Element::Stored*>(p.x);
  std::vector<float> x(p.rows * p.k);
  {
    const ScopedFloatMode mode;
    for (size_t i = 0; i < x.size(); ++i) x[i] = Element::Load(stored[i]);
  }
  const int64_t out_features = p.out_features();
  ParallelFor(executor, (out_features + kFeatures - 1) / kFeatures, [&](int64_t item) {
    const ScopedFloatMode mode;
    const int64_t end = std::min(out_features, (item + 1) * kFeatures);
    for (int64_t first = 0; first < p.rows; first += kRows) {
      for (int64_t feature = item * kFeatures; feature < end; ++feature) {
        ComputeFeature<Element>(p, x.data(), feature, first, std::min(kRows, p.rows - first));
      }
    }
  });
  return Status::Ok();
}

}  // namespace

Status RunLinear(const LinearParams& params, const Executor& executor) {
  if (params.rows == 0) return Status::Ok();
  return WithElement(params.dtype, [&](auto element) { return Compute<decltype(element)>(params, executor); });
}

}  // namespace xla_gpu
