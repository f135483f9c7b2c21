// A fuzzer's input as a sequence of decisions about a call. Past its end every decision is 0.
#ifndef XLA_GPU_TESTING_FUZZ_INPUT_H_
#define XLA_GPU_TESTING_FUZZ_INPUT_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace xla_gpu::fuzz {

class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  uint8_t Byte() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }

  // Below `end`, which is at most 256; 0 if nothing is.
  int64_t Below(int64_t end) { return end > 0 ? Byte() % end : 0; }

  // True once in `times`.
  bool Once(int64_t times) { return Below(times) == times - 1; }

  template <typename T>
  T Raw() {
    uint8_t bytes[sizeof(T)];
    for (uint8_t& byte : bytes) byte = Byte();
    T value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
  }

  // A small number that calls hold, and sometimes any.
  int64_t Number(int64_t end) { return Once(16) ? Raw<int64_t>() : Below(end); }

 private:
  const uint8_t* data_;
  size_t size_;
};

}  // namespace xla_gpu::fuzz

#endif  // XLA_GPU_TESTING_FUZZ_INPUT_H_
