// Arrays one after the other in a call's scratch memory.
#ifndef XLA_GPU_BASE_SCRATCH_LAYOUT_H_
#define XLA_GPU_BASE_SCRATCH_LAYOUT_H_

#include <cstdint>

namespace xla_gpu {

class ScratchLayout {
 public:
  // A null `base`: the sizes alone are of interest.
  explicit ScratchLayout(void* base) : base_(static_cast<char*>(base)) {}

  // The next `bytes`, aligned to 256.
  void* Take(int64_t bytes) {
    void* const taken = base_ == nullptr ? nullptr : base_ + bytes_;
    bytes_ += (bytes + 255) / 256 * 256;
    return taken;
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* base_;
  int64_t bytes_ = 0;
};

}  // namespace xla_gpu

#endif  // XLA_GPU_BASE_SCRATCH_LAYOUT_H_
