// The GPUs of one host that sum with each other, and the memory through which they do.
//
// Each GPU owns one region of device memory. Peers write into it over NVLink; its owner alone reads it. So data cross
// the link once, in one direction, and nothing waits for a read's way back.
#ifndef XLA_GPU_OPS_ALL_REDUCE_DEVICE_GROUP_H_
#define XLA_GPU_OPS_ALL_REDUCE_DEVICE_GROUP_H_

#include <cstddef>
#include <cstdint>

#include "ffi/base/status.h"

namespace xla_gpu {

constexpr int kMaxRanks = 8;

// Bytes of a message that the region takes: as packets of data and flags (low latency), or as words that are their own
// flag. Two ranks send each other these whole too: as much traffic as two-shot, and one exchange instead of two.
constexpr int64_t kDefaultMaxBytes = int64_t{16} << 20;
constexpr int64_t kDefaultLowLatencyBytes = int64_t{1} << 20;  // to all peers together
constexpr int64_t kDefaultPairLowLatencyBytes = int64_t{256} << 10;

// Head of a region. Zero when a group is made, as is all else but the words.
struct GroupControl {
  uint32_t epoch;      // calls that are done on this GPU; the same on every GPU of the group
  uint32_t broken;     // not 0: a call timed out here or on a peer, and no later call waits
  uint32_t ticket;     // CTAs of the running call that have begun
  uint32_t reporting;  // not 0: a thread of this GPU is telling the host
  uint32_t unused[60];
};

// In host memory that the GPU writes: why a call failed there.
struct GroupFailure {
  uint32_t failed;  // written last
  uint32_t peer;    // the rank that did not come; the number of ranks where a peer reported the failure
  uint32_t epoch;   // the call that failed, counted from 1
};

// One GPU's view of its group, as kernels take it: by value, since a captured graph keeps it.
struct GroupView {
  char* regions[kMaxRanks];  // by rank; regions[rank] is this GPU's own
  GroupFailure* failure;
  uint64_t timeout_ns;
  int32_t rank;
  int32_t ranks;
  int64_t max_bytes;          // of one call of the others
  int64_t low_latency_bytes;  // of one call of the low-latency kernels

  static constexpr int64_t RoundUp(int64_t bytes) { return (bytes + 511) / 512 * 512; }
  constexpr int64_t low_latency_offset(int parity, int from) const {
    return static_cast<int64_t>(sizeof(GroupControl)) + (parity * ranks + from) * 2 * low_latency_bytes;
  }
  // Where this rank has words in calls of this parity, all ones but for what it has not read yet: those that peers send
  // of their own, and more than two ranks those of the shares that peers summed.
  constexpr int64_t words_offset(int parity) const {
    return words_begin() + parity * (ranks == 2 ? 1 : 2 * ranks) * words_bytes();
  }
  constexpr int64_t sums_offset(int parity) const { return words_offset(parity) + ranks * words_bytes(); }
  // Of each sender: two ranks send each other whole messages, more ranks shares.
  constexpr int64_t words_bytes() const { return ranks == 2 ? max_bytes : RoundUp((max_bytes + ranks - 1) / ranks); }
  constexpr int64_t words_begin() const { return low_latency_offset(2, 0); }
  constexpr int64_t region_bytes() const { return words_offset(2); }
};

// Loads the operators' kernels on the current GPU. CUDA loads them when they are first launched, and may wait for the
// GPU to do so: for a kernel that spins until a peer's kernel has been loaded, forever.
Status LoadAllReduceKernels();
Status LoadAddRmsNormKernels();

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_ALL_REDUCE_DEVICE_GROUP_H_
