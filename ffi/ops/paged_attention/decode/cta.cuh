// The threads that compute as a CTA of the split-KV kernel: a CTA of its own, or a warpgroup of another kernel's CTA.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_CTA_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_CTA_CUH_

#include "ffi/ops/paged_attention/decode/params.h"

namespace xla_gpu::decode {

// A CTA of the split-KV kernel, or of a combine kernel.
struct WholeCta {
  // Whether the number of CTA groups that the KV-block space is divided among is found on the GPU.
  static constexpr bool kGroupsVary = false;

  __device__ static int Thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int Warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ static int Warps() { return static_cast<int>(blockDim.x / 32); }
  __device__ static void Sync() { __syncthreads(); }

  // Its CTA group, the CTAs of one, and its number among these.
  __device__ unsigned Group() const { return blockIdx.y; }
  __device__ static unsigned GroupSize(const DecodeArgs&) { return gridDim.x; }
  __device__ unsigned Number() const { return blockIdx.x; }
};

// A CTA of the combine kernel behind WarpgroupCta.
struct VaryingCombineCta : WholeCta {
  static constexpr bool kGroupsVary = true;
};

// A warpgroup. It takes the named barrier whose number is kFirstBarrier and its own.
struct WarpgroupCta {
  static constexpr bool kGroupsVary = true;
  static constexpr int kThreads = 128;
  static constexpr int kFirstBarrier = 8;  // behind those of the other kernel

  unsigned group, number;

  // Number `cta` of those that stand for CTAs.
  __device__ WarpgroupCta(const DecodeArgs& args, unsigned cta)
      : group(cta / GroupSize(args)), number(cta - group * GroupSize(args)) {}

  __device__ static int Thread() { return static_cast<int>(threadIdx.x) % kThreads; }
  __device__ static int Warp() { return static_cast<int>(threadIdx.x / 32) % (kThreads / 32); }
  __device__ static int Warps() { return kThreads / 32; }
  __device__ static void Sync() {
    asm volatile("bar.sync %0, %1;" ::"r"(kFirstBarrier + static_cast<int>(threadIdx.x) / kThreads), "n"(kThreads)
                 : "memory");
  }
  __device__ unsigned Group() const { return group; }
  __device__ static unsigned GroupSize(const DecodeArgs& args) { return static_cast<unsigned>(args.cta_group_size); }
  __device__ unsigned Number() const { return number; }
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_CTA_CUH_
