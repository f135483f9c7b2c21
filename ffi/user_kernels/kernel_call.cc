// kernel_call: checks of a launch that need no GPU.
#include "ffi/user_kernels/kernel_call.h"

#include <string>

#include "ffi/user_kernels/cubin.h"

namespace xla_gpu {
namespace {

// Limits of all GPUs of compute capability 8.0 and newer.
constexpr int64_t kMaxGrid[3] = {(int64_t{1} << 31) - 1, 65535, 65535};
constexpr int64_t kMaxBlock[3] = {1024, 1024, 64};
constexpr int64_t kMaxLaunchThreads = 1024;
constexpr int64_t kMaxCluster = 16;            // CTAs; above 8 the kernel must allow it, which the driver checks
constexpr int64_t kMaxShared = 1 << 20;        // bytes; the device's own limit is smaller
constexpr int64_t kMaxParameterBytes = 32764;  // of all parameters

std::string Triple(const int64_t* values) {
  return "(" + std::to_string(values[0]) + ", " + std::to_string(values[1]) + ", " + std::to_string(values[2]) + ")";
}

}  // namespace

Status CheckKernelLaunch(const KernelLaunch& launch) {
  const auto mismatch = [&](const std::string& argument, const std::string& expected, const std::string& got) {
    return Status::InvalidArgument("kernel_call: " + std::string(launch.name) + ": " + argument + ": expected " +
                                   expected + ", got " + got);
  };
  if (launch.cubin.substr(0, 4) != std::string_view("\x7f"
                                                    "ELF",
                                                    4)) {
    return mismatch("cubin", "an ELF file", std::to_string(launch.cubin.size()) + " bytes of something else");
  }
  int64_t threads = 1, ctas_of_cluster = 1;
  for (int axis = 0; axis < 3; ++axis) {
    if (launch.grid[axis] < 1 || launch.grid[axis] > kMaxGrid[axis]) {
      return mismatch("grid", "1 to (2147483647, 65535, 65535) CTAs", Triple(launch.grid));
    }
    if (launch.block[axis] < 1 || launch.block[axis] > kMaxBlock[axis]) {
      return mismatch("block", "1 to (1024, 1024, 64) threads", Triple(launch.block));
    }
    if (launch.cluster[axis] < 1 || launch.cluster[axis] > kMaxCluster) {
      return mismatch("cluster", "1 to 16 CTAs", Triple(launch.cluster));
    }
    threads *= launch.block[axis];
    ctas_of_cluster *= launch.cluster[axis];
  }
  if (threads > kMaxLaunchThreads) return mismatch("block", "at most 1024 threads in all", Triple(launch.block));
  if (ctas_of_cluster > kMaxCluster) return mismatch("cluster", "at most 16 CTAs in all", Triple(launch.cluster));
  for (int axis = 0; axis < 3; ++axis) {
    if (launch.grid[axis] % launch.cluster[axis] != 0) {
      return mismatch("grid", "whole clusters of " + Triple(launch.cluster) + " CTAs", Triple(launch.grid));
    }
  }
  if (launch.shared_bytes < 0 || launch.shared_bytes > kMaxShared) {
    return mismatch("shared", "0 to " + std::to_string(kMaxShared) + " bytes", std::to_string(launch.shared_bytes));
  }
  int64_t bytes = 0;
  for (const KernelParameter& parameter : launch.parameters) bytes += parameter.size;
  if (bytes > kMaxParameterBytes) {
    return mismatch("arguments", "at most " + std::to_string(kMaxParameterBytes) + " bytes", std::to_string(bytes));
  }
  return Status::Ok();
}

Status CheckCubin(const KernelLaunch& launch) {
  const std::string damage = CubinDamage(launch.cubin);
  if (damage.empty()) return Status::Ok();
  return Status::InvalidArgument("kernel_call: " + std::string(launch.name) + ": cubin: expected a whole cubin, got " +
                                 std::to_string(launch.cubin.size()) + " bytes with " + damage);
}

}  // namespace xla_gpu
