#include "ffi/host/processors.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <thread>

namespace xla_gpu {
namespace {

int64_t ProcessorsOfAffinity() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#endif
  return std::thread::hardware_concurrency();  // 0 when unknown, or on machines with more processors than the set holds
}

// A container sees its own control group where a machine has the root of all.
int64_t ProcessorsOfQuota() {
  constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();
  int64_t quota = 0, period = 0;                 // microseconds of processor time, in so many of wall time
  std::ifstream both("/sys/fs/cgroup/cpu.max");  // "max 100000" without a quota
  if (!(both >> quota >> period)) {              // version 1 of control groups: -1 without one
    std::ifstream first("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), second("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
    if (!(first >> quota) || !(second >> period)) return kUnlimited;
  }
  return quota > 0 && period > 0 ? (quota - 1) / period + 1 : kUnlimited;
}

}  // namespace

int64_t UsableProcessors() { return std::max<int64_t>(std::min(ProcessorsOfAffinity(), ProcessorsOfQuota()), 1); }

}  // namespace xla_gpu
