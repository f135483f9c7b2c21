#include <algorithm>
#include <array>
#include <limits>
#include <string>

#include "ffi/host/convert.h"
#include "ffi/host/float_mode.h"
#include "ffi/host/parallel_for.h"
#include "ffi/ops/sample/sample.h"

namespace xla_gpu {
namespace {

using namespace sampling;

// Of the logits up to `limit`, in the order of their distances, as many as make `weigh` add up to `target`: returns the
// bits of the last one's distance; `limit` where there is less than that. A radix search, eight bits at a time.
template <class Distances, class Weigh>
uint32_t Search(const Distances& for_each_distance, uint32_t limit, uint64_t target, const Weigh& weigh) {
  uint32_t prefix = 0;
  uint64_t below = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    std::array<uint64_t, 256> bins = {};
    for_each_distance([&](float distance) {
      const uint32_t key = Bits(distance);
      if (key <= limit && static_cast<uint64_t>(key) >> (shift + 8) == prefix)
        bins[key >> shift & 255] += weigh(distance);
    });
    uint32_t bin = 0;
    while (bin < 256 && below + bins[bin] < target) below += bins[bin++];
    if (bin == 256) return limit;  // in the first round alone
    prefix = prefix << 8 | bin;
  }
  return prefix;
}

template <class Element>
void SampleRow(const SampleParams& p, int64_t index) {
  const auto* logits = static_cast<const typename Element::Stored*>(p.logits) + index * p.vocab;
  const RowOptions row = p.Row(index);
  p.token[index] = -1;
  p.logprob[index] = std::numeric_limits<float>::quiet_NaN();

  uint64_t first = 0;
  for (int64_t i = 0; i < p.vocab; ++i)
    first = std::max(first, RankOf(Element::Load(logits[i]), static_cast<uint32_t>(i)));
  const float largest = LogitOf(first);
  if (first == ~uint64_t{0} || largest == -std::numeric_limits<float>::infinity() || !row.valid()) return;

  const auto for_each_distance = [&](const auto& body) {
    for (int64_t i = 0; i < p.vocab; ++i) body(Distance(largest, Element::Load(logits[i])));
  };
  uint64_t mass = 0;
  for_each_distance([&](float distance) { mass += Mass40(distance); });

  uint32_t token = IndexOf(first);
  if (row.temperature > 0.0f) {
    const float sharpness = row.sharpness();
    uint32_t limit = MinPLimit(row);
    if (row.top_k > 0 && row.top_k < p.vocab) {
      limit = Search(for_each_distance, limit, static_cast<uint64_t>(row.top_k), [](float) { return uint64_t{1}; });
    }
    if (row.top_p < 1.0f) {
      const auto weigh = [&](float distance) { return uint64_t{Mass30(distance, sharpness)}; };
      uint64_t total = 0;
      for_each_distance([&](float distance) { total += Bits(distance) <= limit ? weigh(distance) : 0; });
      limit = Search(for_each_distance, limit, TopPTarget(row.top_p, total), weigh);
    }
    uint64_t best = 0;
    Philox random = {};
    for (int64_t i = 0; i < p.vocab; ++i) {
      if (i % 4 == 0) random = RandomWords(row.seed, static_cast<uint32_t>(i / 4), row.step);
      const float distance = Distance(largest, Element::Load(logits[i]));
      if (Bits(distance) > limit) continue;
      const float score = Score(distance, sharpness, random.words[i % 4]);
      best = std::max(best, RankOf(score, static_cast<uint32_t>(i)));
    }
    token = IndexOf(best);
  }
  p.token[index] = static_cast<int32_t>(token);
  p.logprob[index] = LogProbability(largest, Element::Load(logits[token]), mass);
}

template <class Element>
Status Rows(const SampleParams& p, const Executor& executor) {
  ParallelFor(executor, p.rows, [&p](int64_t row) {
    const ScopedFloatMode mode;
    SampleRow<Element>(p, row);
  });
  return Status::Ok();
}

}  // namespace

Status CheckSampleRows(const SampleParams& params) {
  for (int64_t row = 0; row < params.rows; ++row) {
    const RowOptions options = params.Row(row);
    if (options.valid()) continue;
    const struct {
      const char *name, *expected;
      float value;
      bool wrong;
    } numbers[] = {
        {"temperature", "a finite number >= 0", options.temperature,
         !(options.temperature >= 0.0f && options.temperature <= std::numeric_limits<float>::max())},
        {"top_p", "a number from 0 to 1", options.top_p, !(options.top_p >= 0.0f && options.top_p <= 1.0f)},
        {"min_p", "a number from 0 to 1", options.min_p, !(options.min_p >= 0.0f && options.min_p <= 1.0f)},
    };
    for (const auto& number : numbers) {
      if (!number.wrong) continue;
      return Status::InvalidArgument(std::string("sample: ") + number.name + "[" + std::to_string(row) +
                                     "]: expected " + number.expected + ", got " + std::to_string(number.value));
    }
  }
  return Status::Ok();
}

Status RunSample(const SampleParams& params, const Executor& executor) {
  return WithElement(params.dtype, [&](auto element) { return Rows<decltype(element)>(params, executor); });
}

}  // namespace xla_gpu
