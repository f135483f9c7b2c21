// The device groups of this process: allocated, connected to their peers, looked up by handlers.
#include "ffi/runtime/device_groups.h"

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "ffi/runtime/device.h"
#include "ffi/runtime/error.h"
#include "ffi/runtime/xla_gpu.h"

#ifdef XLA_GPU_WITH_CUDA
#include <cuda_runtime_api.h>

#include "ffi/base/cuda_status.h"
#endif

namespace xla_gpu {
namespace {

struct Member {
  GroupView view = {};
  bool connected = false;
};

// Members live as long as the process: captured graphs hold their addresses, and when the last one is freed is unknown.
struct Groups {
  std::mutex mutex;
  std::map<std::pair<int64_t, int>, std::unique_ptr<Member>> members;  // by group and device
};

Groups& AllGroups() {
  static Groups* groups = new Groups;  // never destroyed: handlers may run while the process ends
  return *groups;
}

Member* FindMember(int64_t group, int device) {
  Groups& groups = AllGroups();
  const auto found = groups.members.find({group, device});
  return found == groups.members.end() ? nullptr : found->second.get();
}

std::string FailureText(const GroupView& view) {
  const GroupFailure& failure = *view.failure;
  const std::string who = failure.peer < static_cast<uint32_t>(view.ranks)
                              ? "rank " + std::to_string(view.rank) + " waited for rank " + std::to_string(failure.peer)
                              : "a peer of rank " + std::to_string(view.rank) + " waited";
  return who + " in call " + std::to_string(failure.epoch) + " of the group for longer than its time-out of " +
         std::to_string(view.timeout_ns / 1000000) +
         " ms; this call's results are NaN, and so are those of every later one: restart the processes of the group";
}

bool Failed(const GroupView& view) { return __atomic_load_n(&view.failure->failed, __ATOMIC_ACQUIRE) != 0; }

#ifdef XLA_GPU_WITH_CUDA

static_assert(sizeof(cudaIpcMemHandle_t) == XLA_GPU_GROUP_HANDLE_BYTES);

Status Allocate(Member* member, cudaIpcMemHandle_t* handle) {
  GroupView& view = member->view;
  void* region = nullptr;
  XLA_GPU_RETURN_IF_CUDA(cudaMalloc(&region, view.region_bytes()));
  XLA_GPU_RETURN_IF_CUDA(cudaMemset(region, 0, view.words_begin()));
  XLA_GPU_RETURN_IF_CUDA(
      cudaMemset(static_cast<char*>(region) + view.words_begin(), 0xff, view.region_bytes() - view.words_begin()));
  view.regions[view.rank] = static_cast<char*>(region);
  void* failure = nullptr;
  XLA_GPU_RETURN_IF_CUDA(cudaHostAlloc(&failure, sizeof(GroupFailure), cudaHostAllocPortable | cudaHostAllocMapped));
  std::memset(failure, 0, sizeof(GroupFailure));
  view.failure = static_cast<GroupFailure*>(failure);
  if (Status status = LoadAllReduceKernels(); !status.ok()) return status;
  if (Status status = LoadAddRmsNormKernels(); !status.ok()) return status;
  // Not needed within a process, and refused on some systems: an error shows where another process opens the handle.
  if (cudaIpcGetMemHandle(handle, region) != cudaSuccess) {
    std::memset(handle, 0, sizeof(*handle));
    cudaGetLastError();
  }
  XLA_GPU_RETURN_IF_CUDA(cudaDeviceSynchronize());  // all that is there before a peer writes
  return Status::Ok();
}

Status EnablePeer(int device, int peer) {
  int possible = 0;
  XLA_GPU_RETURN_IF_CUDA(cudaDeviceCanAccessPeer(&possible, device, peer));
  if (!possible) {
    return Status::Internal("GPU " + std::to_string(device) + " cannot access the memory of GPU " +
                            std::to_string(peer));
  }
  const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    return Status::Ok();
  }
  XLA_GPU_RETURN_IF_CUDA(error);
  return Status::Ok();
}

Status Connect(int64_t group, Member* member, int device, const int32_t* devices, const cudaIpcMemHandle_t* handles) {
  GroupView& view = member->view;
  for (int r = 0; r < view.ranks; ++r) {
    if (r == view.rank) continue;
    if (devices[r] >= 0) {
      const Member* peer = FindMember(group, devices[r]);
      if (peer == nullptr || peer->view.rank != r) {
        return Status::InvalidArgument("rank " + std::to_string(r) + " was not allocated on device " +
                                       std::to_string(devices[r]));
      }
      if (Status status = EnablePeer(device, devices[r]); !status.ok()) return status;
      view.regions[r] = peer->view.regions[r];
    } else {
      void* region = nullptr;
      XLA_GPU_RETURN_IF_CUDA(cudaIpcOpenMemHandle(&region, handles[r], cudaIpcMemLazyEnablePeerAccess));
      view.regions[r] = static_cast<char*>(region);
    }
  }
  member->connected = true;
  return Status::Ok();
}

Error ToError(const Status& status) {
  if (status.ok()) return {};
  return status.code() == Status::Code::kInvalidArgument ? Error::InvalidArgument(status.message())
                                                         : Error::Internal(status.message());
}

#endif

Error Wrong(const char* argument, const std::string& expected, const std::string& got) {
  return Error::InvalidArgument(std::string("device group: ") + argument + ": expected " + expected + ", got " + got);
}

Error AllocateMember(const xla_gpu_group_member* args, void* handle) {
  if (args == nullptr || args->struct_size != sizeof(xla_gpu_group_member) || handle == nullptr) {
    return Error::InvalidArgument("xla_gpu_group_allocate: the caller and the library are of different versions");
  }
  if (args->group <= 0) return Wrong("group", "a positive number", std::to_string(args->group));
  if (args->ranks < 2 || args->ranks > kMaxRanks) {
    return Wrong("ranks", "2 to " + std::to_string(kMaxRanks), std::to_string(args->ranks));
  }
  if (args->rank < 0 || args->rank >= args->ranks) {
    return Wrong("rank", "0 to " + std::to_string(args->ranks - 1), std::to_string(args->rank));
  }
  if (args->timeout_ms < 1) return Wrong("timeout_ms", "at least 1", std::to_string(args->timeout_ms));
  if (args->max_bytes < 0 || args->max_bytes > int64_t{1} << 34) {
    return Wrong("max_bytes", "0 (the default) to 16 GiB", std::to_string(args->max_bytes));
  }
  if (args->low_latency_bytes < -1 || args->low_latency_bytes > int64_t{1} << 30) {
    return Wrong("low_latency_bytes", "-1 (the default) to 1 GiB", std::to_string(args->low_latency_bytes));
  }
#ifdef XLA_GPU_WITH_CUDA
  const DeviceScope scope(args->device_ordinal);
  if (!scope.error().ok()) return scope.error();
  Groups& groups = AllGroups();
  const std::lock_guard<std::mutex> lock(groups.mutex);
  if (FindMember(args->group, args->device_ordinal) != nullptr) {
    return Wrong("group", "a number that device " + std::to_string(args->device_ordinal) + " does not have yet",
                 std::to_string(args->group));
  }
  auto member = std::make_unique<Member>();
  GroupView& view = member->view;
  view.rank = args->rank;
  view.ranks = args->ranks;
  view.timeout_ns = static_cast<uint64_t>(args->timeout_ms) * 1000000;
  view.max_bytes = args->max_bytes == 0 ? kDefaultMaxBytes : GroupView::RoundUp(args->max_bytes);
  // Each peer gets the whole message: what is worth that shrinks with the number of peers.
  const int64_t low_latency =
      args->ranks == 2 ? kDefaultPairLowLatencyBytes : kDefaultLowLatencyBytes / (args->ranks - 1) / 512 * 512;
  view.low_latency_bytes = args->low_latency_bytes < 0 ? low_latency : GroupView::RoundUp(args->low_latency_bytes);
  if (Error error = ToError(Allocate(member.get(), static_cast<cudaIpcMemHandle_t*>(handle))); !error.ok()) {
    return error;
  }
  groups.members[{args->group, args->device_ordinal}] = std::move(member);
  return {};
#else
  return Error::FailedPrecondition("this library was built without CUDA (XLA_GPU_CUDA=OFF)");
#endif
}

Error ConnectMember(int64_t group, int32_t device_ordinal, [[maybe_unused]] const int32_t* devices,
                    [[maybe_unused]] const void* handles) {
  Groups& groups = AllGroups();
  const std::lock_guard<std::mutex> lock(groups.mutex);
  Member* member = FindMember(group, device_ordinal);
  if (member == nullptr) {
    return Wrong("group", "one that was allocated on device " + std::to_string(device_ordinal), std::to_string(group));
  }
#ifdef XLA_GPU_WITH_CUDA
  const DeviceScope scope(device_ordinal);
  if (!scope.error().ok()) return scope.error();
  return ToError(Connect(group, member, device_ordinal, devices, static_cast<const cudaIpcMemHandle_t*>(handles)));
#else
  return Error::FailedPrecondition("this library was built without CUDA (XLA_GPU_CUDA=OFF)");
#endif
}

Error GroupError(int64_t group) {
  Groups& groups = AllGroups();
  const std::lock_guard<std::mutex> lock(groups.mutex);
  bool found = false;
  for (const auto& [key, member] : groups.members) {
    if (key.first != group) continue;
    found = true;
    if (Failed(member->view)) return Error::Internal(FailureText(member->view));
  }
  return found ? Error{} : Wrong("group", "one that was allocated in this process", std::to_string(group));
}

}  // namespace

Status FindGroup(const char* op, int64_t group, int device_ordinal, const GroupView** view) {
  Groups& groups = AllGroups();
  const std::lock_guard<std::mutex> lock(groups.mutex);
  const Member* member = FindMember(group, device_ordinal);
  if (member == nullptr || !member->connected) {
    return Status::InvalidArgument(std::string(op) + ": group: expected a device group that is connected on device " +
                                   std::to_string(device_ordinal) + ", got " + std::to_string(group) +
                                   (member == nullptr ? ", which is not known there" : ", which is not connected yet"));
  }
  if (Failed(member->view)) return Status::Internal(std::string(op) + ": " + FailureText(member->view));
  *view = &member->view;
  return Status::Ok();
}

}  // namespace xla_gpu

extern "C" const char* xla_gpu_group_allocate(const xla_gpu_group_member* member, void* handle) {
  return xla_gpu::Report(
      xla_gpu::Guarded("xla_gpu_group_allocate", [&] { return xla_gpu::AllocateMember(member, handle); }));
}

extern "C" const char* xla_gpu_group_connect(int64_t group, int32_t device_ordinal, const int32_t* devices,
                                             const void* handles) {
  return xla_gpu::Report(xla_gpu::Guarded(
      "xla_gpu_group_connect", [&] { return xla_gpu::ConnectMember(group, device_ordinal, devices, handles); }));
}

extern "C" const char* xla_gpu_group_error(int64_t group) {
  return xla_gpu::Report(xla_gpu::Guarded("xla_gpu_group_error", [&] { return xla_gpu::GroupError(group); }));
}
