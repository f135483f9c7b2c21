// A call of a handler through the C interface, made from a fuzzer's input. All memory is on the heap and exactly as
// large as the call says, so that AddressSanitizer sees the first byte read or written past it.
#ifndef XLA_GPU_TESTING_FUZZ_CALL_H_
#define XLA_GPU_TESTING_FUZZ_CALL_H_

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "ffi/runtime/xla_gpu.h"
#include "ffi/testing/fuzz/input.h"

namespace xla_gpu::fuzz {

// A larger buffer has one byte of memory: an operator's call has none such, and handlers of any call do not read them.
inline constexpr int64_t kMaxBytes = 1 << 16;

inline constexpr int32_t kFloats[] = {XLA_FFI_DataType_F32, XLA_FFI_DataType_F16, XLA_FFI_DataType_BF16};

class Call {
 public:
  explicit Call(Input* input) : input_(*input) {}
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Buffers of any dtype and shape, attributes of any type, with some fields that no call may have.
  void Anything();

  // A sound call of one of the library's operators with small shapes and hostile contents, then up to three changes.
  void Operator();

  // Whether the call was answered with a result; ends the process where the answer breaks the interface's promises.
  bool Run(XLA_FFI_Handler* handler);

 private:
  using Shape = std::vector<int64_t>;

  // `bytes` of fresh memory: from the input at first, then the last byte repeated.
  void* Memory(size_t bytes);
  int64_t* Dims(const Shape& shape);

  // Buffers of operators' calls; one of more than kMaxBytes is a mistake here, named before the process ends.
  size_t SoundBytes(const std::vector<xla_gpu_buffer>& buffers, int32_t dtype, const Shape& shape) const;
  void Add(std::vector<xla_gpu_buffer>* buffers, int32_t dtype, const Shape& shape);
  void AddNumbers(int32_t dtype, const Shape& shape, int64_t end);  // an operand of numbers mostly below `end`
  // query_start_loc and num_seqs.
  void AddStarts(int64_t tokens, int64_t max_seqs);
  // paged_attention's context_lens, block_tables, query_start_loc and num_seqs.
  void AddSequences(int64_t tokens, int64_t max_seqs, int64_t pages_per_seq, int64_t pages, int64_t page_size);
  template <typename T>
  void AddScalar(const char* name, int32_t dtype, T value) {
    void* data = std::malloc(sizeof value);
    memory_.emplace_back(static_cast<char*>(data), &std::free);
    std::memcpy(data, &value, sizeof value);
    attributes_.push_back({name, XLA_FFI_AttrType_SCALAR, dtype, data, 1});
  }
  void AddNumberArray(const char* name, const std::vector<int64_t>& values);
  void AnyBuffer(std::vector<xla_gpu_buffer>* buffers);
  std::vector<xla_gpu_attribute>* AnyAttributes(int depth);
  void AddScratch();
  void Change();

  const xla_gpu_handler& Handler() const;
  const char* Run(XLA_FFI_Handler* handler, const std::vector<xla_gpu_buffer>& results, int32_t* code) const;

  void SimpleAdd();
  void PagedAttention();
  void ReshapeAndCache();
  void MergeAttentionStates();
  void BidirectionalAttention();
  // In call_latents.cc:
  void MlaAttention();
  void ConcatAndCacheMla();
  // In call_layer.cc:
  void Linear();
  void GroupedLinear();
  void GatedMlp();
  void AttentionBlock();
  int64_t AddOfWeight(int32_t dtype, int32_t stored, int64_t n, int64_t k, bool zero_point, bool bias);
  void RmsNorm();
  void SiluAndMul();
  void Sample();
  void RotaryEmbedding();
  void RotaryAndCache();
  // In call_user_kernels.cc:
  void KernelCall();
  void Cubin();

  Input& input_;
  std::vector<std::unique_ptr<char, void (*)(void*)>> memory_;
  std::vector<std::unique_ptr<std::vector<xla_gpu_attribute>>> lists_;
  std::vector<std::unique_ptr<std::string>> names_;
  std::vector<xla_gpu_buffer> operands_, results_;
  std::vector<xla_gpu_attribute> attributes_;
  const char* target_ = nullptr;  // of the library; null: the handler that Run is given
  int32_t device_ordinal_ = -1;
  size_t struct_size_ = sizeof(xla_gpu_call_args);
};

// A handler of a tvm-ffi function that reads all that it is given, and fails now and then.
XLA_FFI_Handler* TvmFfiHandler();

}  // namespace xla_gpu::fuzz

#endif  // XLA_GPU_TESTING_FUZZ_CALL_H_
