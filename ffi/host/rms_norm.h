// The RMS norm of a row on the host: shared by rms_norm, all_reduce_add_rms_norm and the norms of query and key heads.
#ifndef XLA_GPU_HOST_RMS_NORM_H_
#define XLA_GPU_HOST_RMS_NORM_H_

#include <cmath>
#include <cstdint>

#include "ffi/host/convert.h"

namespace xla_gpu {

template <class Element>
float Rounded(float value) {
  return Element::Load(Element::Store(value));
}

// As RmsNormWeight of device/rms_norm.cuh.
struct RmsNormRounding {
  float weight_offset = 0.0f;
  bool round_once = false;
};

// out[size] = row[size] / sqrt(mean(row ** 2) + eps) * weight[size]; out may be row.
template <class Element>
void RmsNormRow(const typename Element::Stored* row, const typename Element::Stored* weight,
                typename Element::Stored* out, int64_t size, float eps, const RmsNormRounding& how) {
  constexpr int64_t kLanes = 16;  // sums of their own: more precise than one, and what vector instructions add
  float lanes[kLanes] = {};
  int64_t at = 0;
  for (; at + kLanes <= size; at += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const float value = Element::Load(row[at + lane]);
      lanes[lane] += value * value;
    }
  }
  for (int64_t lane = 0; at < size; ++at, ++lane) {
    const float value = Element::Load(row[at]);
    lanes[lane] += value * value;
  }
  float squares = 0.0f;
  for (float lane : lanes) squares += lane;
  const float scale = 1.0f / std::sqrt(squares / static_cast<float>(size) + eps);
  for (int64_t i = 0; i < size; ++i) {
    const float normed = Element::Load(row[i]) * scale;
    const float factor = Element::Load(weight[i]) + how.weight_offset;
    out[i] = Element::Store((how.round_once ? normed : Rounded<Element>(normed)) * factor);
  }
}

}  // namespace xla_gpu

#endif  // XLA_GPU_HOST_RMS_NORM_H_
