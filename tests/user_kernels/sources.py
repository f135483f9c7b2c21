"""The kernels that these tests bring, as a user would."""

from __future__ import annotations

SCALE = r"""
extern "C" __global__ void scale(const float* x, float factor, int n, float* y) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = factor * x[i];
}
"""

INCREMENT = r"""
extern "C" __global__ void increment(float* x, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] += 1;
}
"""

# Every width of a parameter, as a double each.
WIDTHS = r"""
#include <cuda_fp16.h>
extern "C" __global__ void widths(const float* x, signed char a, unsigned char b, short c, unsigned short d, int e,
                                  unsigned f, long long g, unsigned long long h, __half i, float j, double k, bool l,
                                  const float* nothing, double* y) {
  const double values[] = {(double)a, (double)b, (double)c, (double)d, (double)e, (double)f, (double)g,
                           (double)h, (double)__half2float(i), (double)j, k, (double)l, nothing == nullptr ? 1. : 0.};
  if (threadIdx.x < 13) y[threadIdx.x] = values[threadIdx.x];
}
"""

# The sum of a block, through dynamic shared memory; the last KiB of it is used, so that all must be there.
SHARED = r"""
extern "C" __global__ void reverse(const float* x, int shared_floats, float* y) {
  extern __shared__ float memory[];
  float* const last = memory + shared_floats - blockDim.x;
  last[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = last[blockDim.x - 1 - threadIdx.x];
}
"""

# Each CTA writes its rank in the cluster and the cluster's size.
CLUSTER = r"""
extern "C" __global__ void ranks(const float* x, int* y) {
  unsigned rank, size;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  y[2 * blockIdx.x] = rank;
  y[2 * blockIdx.x + 1] = size;
}
"""

# A sum over all CTAs: partial sums in scratch memory, a barrier over the grid, and every CTA adds all partial sums.
COOPERATIVE = r"""
extern "C" __global__ void total(const float* x, int* arrived, float* partial, float* y) {
  partial[blockIdx.x] = x[blockIdx.x];
  __threadfence();
  atomicAdd(arrived, 1);
  while (*(volatile int*)arrived < gridDim.x) {}
  __threadfence();
  float sum = 0;
  for (int i = 0; i < gridDim.x; ++i) sum += ((volatile float*)partial)[i];
  y[blockIdx.x] = sum;
}
"""

# The result first, as many libraries have it; waits for the kernel in front of it.
DEPENDENT = r"""
extern "C" __global__ void twice(float* y, const float* x, int n) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2 * x[i];
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
"""

TEMPLATE = r"""
template <typename T, int kFactor>
__global__ void multiply(const T* x, T* y) {
  y[threadIdx.x] = kFactor * x[threadIdx.x];
}
"""

FAULT = r"""
extern "C" __global__ void writes_to_null(const float* x, float* nothing, float* y) {
  nothing[threadIdx.x] = y[threadIdx.x] = x[threadIdx.x];
}
"""
