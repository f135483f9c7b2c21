// Calls of the operators over caches of latents.
#include <cstdint>

#include "ffi/testing/fuzz/call.h"

namespace xla_gpu::fuzz {

void Call::MlaAttention() {
  const bool with_lse = input_.Once(2);
  target_ = with_lse ? "xla_gpu_mla_attention_with_lse" : "xla_gpu_mla_attention";
  const int32_t dtype = kFloats[input_.Below(3)];
  const int64_t tokens = input_.Below(7), heads = 1 + input_.Below(20);
  const int64_t head_dim = 8 * (1 + input_.Below(9)), value_dim = 8 * (1 + input_.Below(head_dim / 8));
  const int64_t pages = 1 + input_.Below(5), page_size = 1 + input_.Below(5);
  const int64_t max_seqs = input_.Below(4), pages_per_seq = input_.Below(5);
  Add(&operands_, dtype, {tokens, heads, head_dim});
  Add(&operands_, dtype, {pages, page_size, head_dim});
  AddSequences(tokens, max_seqs, pages_per_seq, pages, page_size);
  Add(&results_, dtype, {tokens, heads, value_dim});
  if (with_lse) Add(&results_, XLA_FFI_DataType_F32, {tokens, heads});
  AddScalar("scale", XLA_FFI_DataType_F32, input_.Once(8) ? input_.Raw<float>() : 0.25f);
  AddScalar("value_dim", XLA_FFI_DataType_S64, input_.Once(8) ? input_.Raw<int64_t>() : value_dim);
  AddScalar("check_inputs", XLA_FFI_DataType_PRED, input_.Once(2));
  AddScratch();
}

void Call::ConcatAndCacheMla() {
  target_ = "xla_gpu_concat_and_cache_mla";
  const int32_t dtype = kFloats[input_.Below(3)];
  const int64_t tokens = input_.Below(7), rank = 8 * (1 + input_.Below(5)), rope = 8 * (1 + input_.Below(3));
  const Shape cache = {1 + input_.Below(5), 1 + input_.Below(5), rank + rope};
  Add(&operands_, dtype, {tokens, rank});
  Add(&operands_, dtype, {tokens, rope});
  Add(&operands_, dtype, cache);
  AddNumbers(input_.Once(2) ? XLA_FFI_DataType_S64 : XLA_FFI_DataType_S32, {input_.Below(tokens + 1)},
             cache[0] * cache[1]);
  if (input_.Once(2)) {
    results_.push_back(operands_[2]);
  } else {
    Add(&results_, dtype, cache);
  }
  AddScalar("check_inputs", XLA_FFI_DataType_PRED, input_.Once(2));
}

}  // namespace xla_gpu::fuzz
