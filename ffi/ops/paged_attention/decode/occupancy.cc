#include "ffi/ops/paged_attention/decode/occupancy.h"

#include <map>
#include <mutex>
#include <utility>

namespace xla_gpu::decode {
namespace {

// A source of its own: CUDA sources take twice as long to read <map> and <mutex>, for the host and for the GPU.
struct Known {
  std::mutex mutex;
  std::map<std::pair<void (*)(DecodeArgs), int>, Occupancy> occupancy;  // by kernel and device
};

Known& GetKnown() {
  static Known known;
  return known;
}

}  // namespace

bool FindOccupancy(void (*kernel)(DecodeArgs), int device, Occupancy* occupancy) {
  Known& known = GetKnown();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const auto found = known.occupancy.find({kernel, device});
  if (found == known.occupancy.end()) return false;
  *occupancy = found->second;
  return true;
}

void StoreOccupancy(void (*kernel)(DecodeArgs), int device, const Occupancy& occupancy) {
  Known& known = GetKnown();
  const std::lock_guard<std::mutex> lock(known.mutex);
  known.occupancy.emplace(std::pair(kernel, device), occupancy);
}

}  // namespace xla_gpu::decode
