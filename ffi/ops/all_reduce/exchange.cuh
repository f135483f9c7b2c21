// How the GPUs of a device group exchange data: vectors of 16 bytes, packets that carry their own flag, words that are
// their own flag.
#ifndef XLA_GPU_OPS_ALL_REDUCE_EXCHANGE_CUH_
#define XLA_GPU_OPS_ALL_REDUCE_EXCHANGE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ffi/device/vector.cuh"
#include "ffi/ops/all_reduce/device_group.h"

namespace xla_gpu {

// ---- Vectors of elements ----

template <typename T>
__device__ __forceinline__ uint4 AsBits(const Vector<T>& vector) {
  return *reinterpret_cast<const uint4*>(&vector);
}

template <typename T>
__device__ __forceinline__ Vector<T> FromBits(const uint4& bits) {
  return *reinterpret_cast<const Vector<T>*>(&bits);
}

// Sums in float32, in the order of calls.
template <typename T>
struct VectorSum {
  float values[Vector<T>::kSize];

  __device__ __forceinline__ void Set(const Vector<T>& v) {
#pragma unroll
    for (int j = 0; j < Vector<T>::kSize; ++j) values[j] = static_cast<float>(v.values[j]);
  }
  __device__ __forceinline__ void Add(const Vector<T>& v) {
#pragma unroll
    for (int j = 0; j < Vector<T>::kSize; ++j) values[j] += static_cast<float>(v.values[j]);
  }
  __device__ __forceinline__ Vector<T> Round() const {
    Vector<T> v;
#pragma unroll
    for (int j = 0; j < Vector<T>::kSize; ++j) v.values[j] = static_cast<T>(values[j]);
    return v;
  }
};

template <typename T>
__device__ __forceinline__ Vector<T> NanVector() {
  Vector<T> v;
#pragma unroll
  for (int j = 0; j < Vector<T>::kSize; ++j) v.values[j] = static_cast<T>(__int_as_float(0x7fffffff));
  return v;
}

// ---- Waiting that ends ----

__device__ __forceinline__ uint64_t NanoSeconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__device__ __forceinline__ uint32_t LoadRelaxed(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void StoreRelaxed(uint32_t* address, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ GroupControl* Control(const GroupView& group, int rank) {
  return reinterpret_cast<GroupControl*>(group.regions[rank]);
}

// Tells the host that a call failed, waiting for `peer`; or, with group.ranks, that a peer said so. The first report
// stays: the host's memory is read before it is written, which is slow and happens in failures alone.
static __device__ __noinline__ void ReportFailure(const GroupView& group, uint32_t peer, uint32_t epoch) {
  if (LoadRelaxed(&group.failure->failed) != 0) return;
  group.failure->peer = peer;
  group.failure->epoch = epoch;
  __threadfence_system();
  StoreRelaxed(&group.failure->failed, 1);
}

// Tells this GPU's later calls, the peers' and the host that `peer` did not come.
static __device__ __noinline__ void BreakGroup(const GroupView& group, int peer, uint32_t epoch) {
  // Of the threads that give up at once, one reports. What it says stands before others learn that the group is broken,
  // and would lay it on a peer.
  if (atomicExch(&Control(group, group.rank)->reporting, 1u) != 0) return;
  ReportFailure(group, peer, epoch);
  for (int r = 0; r < group.ranks; ++r) StoreRelaxed(&Control(group, r)->broken, 1);
}

// One thread's patience. After the group's time-out, or once the group is broken, `Expired` is true and stays so.
class Deadline {
 public:
  __device__ __forceinline__ Deadline(const GroupView& group, bool broken) : group_(group), expired_(broken) {}

  __device__ __forceinline__ bool expired() const { return expired_; }

  // To be called between two looks at what `peer` is to write.
  __device__ __forceinline__ bool Expired(int peer, uint32_t epoch) {
    if (expired_ || ++looks_ % kLooksPerClock != 0) return expired_;
    const uint64_t now = NanoSeconds();
    if (start_ == 0) start_ = now;
    if (LoadRelaxed(&Control(group_, group_.rank)->broken) != 0) {
      expired_ = true;
      ReportFailure(group_, group_.ranks, epoch);
    } else if (now - start_ > group_.timeout_ns) {
      expired_ = true;
      BreakGroup(group_, peer, epoch);
    }
    return expired_;
  }

 private:
  static constexpr uint32_t kLooksPerClock = 64;

  const GroupView& group_;
  uint64_t start_ = 0;
  uint32_t looks_ = 0;
  bool expired_;
};

// ---- A call's beginning and end ----

struct Call {
  uint32_t epoch;  // this call's, from 1
  bool broken;
  uint32_t ticket;  // of thread 0: how many CTAs came before this one
};

// All threads come here, with what they will need first under way: the CTA waits for the epoch.
__device__ __forceinline__ Call BeginCall(const GroupView& group) {
  GroupControl* control = Control(group, group.rank);
  Call call = {LoadRelaxed(&control->epoch) + 1, LoadRelaxed(&control->broken) != 0, 0};
  __syncthreads();  // every thread of this CTA has read the epoch, before the last CTA may write it
  if (threadIdx.x == 0) call.ticket = atomicAdd(&control->ticket, 1);  // needed at the end only: no wait here
  return call;
}

// The last CTA to begin counts the call: by then all have read the epoch. The next call of this GPU begins after all
// CTAs of this one have ended.
__device__ __forceinline__ void EndCall(const GroupView& group, const Call& call) {
  if (threadIdx.x != 0 || call.ticket != gridDim.x - 1) return;
  GroupControl* control = Control(group, group.rank);
  control->ticket = 0;
  control->epoch = call.epoch;
  if (call.broken) ReportFailure(group, group.ranks, call.epoch);
}

// ---- Packets: each 8 bytes are 4 of data and the call's epoch, written at once, so that data need no other flag ----
//
// A packet area is used by every second call: a rank that begins call e + 2 has ended call e + 1, to which every peer
// contributed after it had read all of call e. An epoch returns after 2^32 calls; nothing that old is left where
// messages of a few sizes alternate.

// The 32 bytes of a vector's packets lie in two halves, so that a warp stores whole lines: half sectors cross the link
// one by one.
constexpr int kPacketHalves = 32 * 16;  // bytes between them

__device__ __forceinline__ int64_t PacketOffset(int64_t i) { return (i / 32 * 2 * 32 + i % 32) * 16; }

template <typename T>
__device__ __forceinline__ void StorePacket(char* area, int64_t i, const Vector<T>& vector, uint32_t epoch) {
  const uint4 data = AsBits(vector);
  const uint64_t flag = static_cast<uint64_t>(epoch) << 32;
  char* to = area + PacketOffset(i);
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(flag | data.x), "l"(flag | data.y)
               : "memory");
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to + kPacketHalves), "l"(flag | data.z),
               "l"(flag | data.w)
               : "memory");
}

// Returns whether the whole packet has arrived.
__device__ __forceinline__ bool LoadPacket(const char* area, int64_t i, uint32_t epoch, uint4* data) {
  uint64_t a, b, c, d;
  const char* from = area + PacketOffset(i);
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(from) : "memory");
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(c), "=l"(d)
               : "l"(from + kPacketHalves)
               : "memory");
  *data = {static_cast<uint32_t>(a), static_cast<uint32_t>(b), static_cast<uint32_t>(c), static_cast<uint32_t>(d)};
  const uint32_t other = (static_cast<uint32_t>(a >> 32) ^ epoch) | (static_cast<uint32_t>(b >> 32) ^ epoch) |
                         (static_cast<uint32_t>(c >> 32) ^ epoch) | (static_cast<uint32_t>(d >> 32) ^ epoch);
  return other == 0;
}

// Sends vector `i` to all peers. kRanks, here and below: at least as many as there are.
template <typename T, int kRanks>
__device__ __forceinline__ void SendPackets(const GroupView& group, const Call& call, int64_t i, const Vector<T>& own) {
  if (call.broken) return;
#pragma unroll
  for (int r = 0; r < kRanks; ++r) {
    if (r < group.ranks && r != group.rank) {
      StorePacket(group.regions[r] + group.low_latency_offset(call.epoch & 1, group.rank), i, own, call.epoch);
    }
  }
}

// The sum of a vector over all ranks, rounded. `look(r, &part)`: whether rank r's part has come, and if so the part.
// Waits for all; NaN where one did not come.
template <typename T, int kRanks, typename Look>
__device__ __forceinline__ Vector<T> SumOfRanks(const GroupView& group, const Call& call, const Vector<T>& own,
                                                Deadline* deadline, Look look) {
  if (deadline->expired()) return NanVector<T>();
  // Up to four peers' parts are looked at together; more would not fit a thread's registers.
  constexpr int kTogether = kRanks < 4 ? kRanks : 4;
  VectorSum<T> sum;
#pragma unroll
  for (int first = 0; first < kRanks; first += kTogether) {
    uint4 parts[kTogether];
#pragma unroll
    for (int r = 0; r < kTogether; ++r) parts[r] = AsBits(own);
    int missing;
    do {
      missing = -1;
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
        if (first + r < group.ranks && first + r != group.rank && !look(first + r, &parts[r])) missing = first + r;
      }
    } while (missing >= 0 && !deadline->Expired(missing, call.epoch));
    if (missing >= 0) return NanVector<T>();
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      if (first + r == 0) {
        sum.Set(FromBits<T>(parts[0]));
      } else if (first + r < group.ranks) {
        sum.Add(FromBits<T>(parts[r]));
      }
    }
  }
  return sum.Round();
}

// The sum of vector `i` over all ranks, rounded: waits for the peers' packets.
template <typename T, int kRanks>
__device__ __forceinline__ Vector<T> SumPackets(const GroupView& group, const Call& call, int64_t i,
                                                const Vector<T>& own, Deadline* deadline) {
  const char* const region = group.regions[group.rank];
  return SumOfRanks<T, kRanks>(group, call, own, deadline, [&](int r, uint4* part) {
    return LoadPacket(region + group.low_latency_offset(call.epoch & 1, r), i, call.epoch, part);
  });
}

// ---- Words: data that are their own flag ----
//
// What a rank receives stands in an area that holds all ones before. A word of 8 bytes that holds anything else has
// come: half of a packet's traffic, and as no flag no fence. Who reads a word sets it back to all ones, which costs a
// small message more than a packet's flag does. A word of data that is all ones, several NaNs, is sent as other NaNs:
// the bits of a sum with NaNs do not depend on theirs.
//
// As a packet area, one is used by every second call: a rank that begins call e + 2 has ended call e + 1, for which it
// waited for every peer, or for a rank that had. And a peer that contributed to call e + 1 had ended call e, and so had
// read and set back all of it.

constexpr uint64_t kNotArrived = ~uint64_t{0};

// Where a region has the words of one rank. Those of all ranks lie side by side, 32 vectors of each in turn: a message
// touches few pages of a region, whatever the number of ranks.
struct WordArea {
  char* begin;
  int64_t pitch;  // bytes from 32 vectors to the next 32

  __device__ __forceinline__ char* At(int64_t i) const { return begin + i / 32 * pitch + i % 32 * 16; }
};
constexpr int64_t kWarpBytes = 32 * 16;

// In the region of rank `to`, what rank `from` sends of its own.
__device__ __forceinline__ WordArea Words(const GroupView& group, const Call& call, int to, int from) {
  const int sender = group.ranks == 2 ? 0 : from, senders = group.ranks == 2 ? 1 : group.ranks;
  return {group.regions[to] + group.words_offset(call.epoch & 1) + sender * kWarpBytes, senders * kWarpBytes};
}

// In the region of rank `to`, of more than two ranks, what rank `from` summed.
__device__ __forceinline__ WordArea Sums(const GroupView& group, const Call& call, int to, int from) {
  return {group.regions[to] + group.sums_offset(call.epoch & 1) + from * kWarpBytes, group.ranks * kWarpBytes};
}

__device__ __forceinline__ uint64_t Word(uint32_t low, uint32_t high) {
  const uint64_t word = static_cast<uint64_t>(high) << 32 | low;
  return word == kNotArrived ? kNotArrived - 1 : word;
}

__device__ __forceinline__ void StoreWords(char* to, uint64_t a, uint64_t b) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(a), "l"(b) : "memory");
}

template <typename T>
__device__ __forceinline__ void StoreAsWords(const WordArea& area, int64_t i, const Vector<T>& vector) {
  const uint4 data = AsBits(vector);
  StoreWords(area.At(i), Word(data.x, data.y), Word(data.z, data.w));
}

// Returns whether both words of vector `i` have come.
__device__ __forceinline__ bool LoadWords(const WordArea& area, int64_t i, uint4* data) {
  uint64_t a, b;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(area.At(i)) : "memory");
  *data = {static_cast<uint32_t>(a), static_cast<uint32_t>(a >> 32), static_cast<uint32_t>(b),
           static_cast<uint32_t>(b >> 32)};
  return a != kNotArrived && b != kNotArrived;
}

__device__ __forceinline__ void SetBack(const WordArea& area, int64_t i) {
  StoreWords(area.At(i), kNotArrived, kNotArrived);
}

// Sends vector `i` to all peers.
template <typename T, int kRanks>
__device__ __forceinline__ void SendWords(const GroupView& group, const Call& call, int64_t i, const Vector<T>& own) {
  if (call.broken) return;
#pragma unroll
  for (int r = 0; r < kRanks; ++r) {
    if (r < group.ranks && r != group.rank) {
      StoreAsWords(Words(group, call, r, group.rank), i, own);
    }
  }
}

// The sum of vector `i` over all ranks, rounded: waits for the peers' words and sets them back.
template <typename T, int kRanks>
__device__ __forceinline__ Vector<T> SumWords(const GroupView& group, const Call& call, int64_t i, const Vector<T>& own,
                                              Deadline* deadline) {
  const auto area = [&](int r) { return Words(group, call, group.rank, r); };
  const Vector<T> sum = SumOfRanks<T, kRanks>(group, call, own, deadline,
                                              [&](int r, uint4* part) { return LoadWords(area(r), i, part); });
#pragma unroll
  for (int r = 0; r < kRanks; ++r) {
    if (r < group.ranks && r != group.rank) SetBack(area(r), i);
  }
  return sum;
}

// Takes vectors first, first + step, … below `vectors` of what `peer` writes to `area`: waits for them and sets them
// back. NaN where one did not come.
template <typename T, int kCount>
__device__ __forceinline__ void TakeWords(int peer, const Call& call, const WordArea& area, int64_t first, int64_t step,
                                          int64_t vectors, Vector<T> (&taken)[kCount], Deadline* deadline) {
  const auto has = [&](int b) { return first + b * step < vectors; };
  uint4 parts[kCount];
  bool missing;
  do {
    missing = deadline->expired();
#pragma unroll
    for (int b = 0; b < kCount; ++b) {
      if (has(b) && !LoadWords(area, first + b * step, &parts[b])) missing = true;
    }
  } while (missing && !deadline->Expired(peer, call.epoch));
#pragma unroll
  for (int b = 0; b < kCount; ++b) {
    if (missing) {
      taken[b] = NanVector<T>();
    } else if (has(b)) {
      SetBack(area, first + b * step);
      taken[b] = FromBits<T>(parts[b]);
    }
  }
}

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_ALL_REDUCE_EXCHANGE_CUH_
