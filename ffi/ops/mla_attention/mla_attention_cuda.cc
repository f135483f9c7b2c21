// mla_attention on a GPU: checks what the kernels rely on, and chooses one. The launches depend on shapes alone.
#include <cstdint>
#include <string>

#include "ffi/ops/mla_attention/kernels.h"
#include "ffi/ops/mla_attention/mla_attention.h"
#include "ffi/ops/mla_attention/split_layout.h"

namespace xla_gpu {
namespace {

Status Wrong(const MlaAttentionParams& params, const std::string& text) {
  return Status::InvalidArgument((params.lse != nullptr ? "mla_attention_with_lse: " : "mla_attention: ") + text);
}

// Vectors of 16 bytes are read and written whole. Rows, and the slots of a page, are counted in 32 bits.
Status CheckLayout(const MlaAttentionParams& params) {
  const struct {
    const char* name;
    const void* pointer;
  } arrays[] = {{"query", params.query}, {"kv_cache", params.kv_cache}, {"out", params.out}};
  for (const auto& array : arrays) {
    if (reinterpret_cast<uintptr_t>(array.pointer) % 16 != 0) {
      return Wrong(params, std::string(array.name) + ": expected an address aligned to 16 bytes, got one that is not");
    }
  }
  if (params.head_dim % 8 != 0 || params.head_dim > kMaxMlaHeadDim || params.value_dim % 8 != 0 ||
      params.value_dim > kMaxMlaValueDim || params.value_dim > params.head_dim) {
    return Wrong(params, "kv_cache: expected a head_dim of at most " + std::to_string(kMaxMlaHeadDim) +
                             " and a value_dim of at most " + std::to_string(kMaxMlaValueDim) +
                             " and of head_dim, multiples of 8, got " + std::to_string(params.head_dim) + " and " +
                             std::to_string(params.value_dim));
  }
  if (params.page_size >= int64_t{1} << 31) {  // of a cache without pages
    return Wrong(params, "kv_cache: expected a page_size below 2^31, got " + std::to_string(params.page_size));
  }
  if (const int64_t rows = params.num_tokens * params.num_heads; rows >= int64_t{1} << 31) {
    return Wrong(params, "query: expected fewer than 2^31 rows of head_dim, got " + std::to_string(rows));
  }
  return Status::Ok();
}

}  // namespace

Status LaunchMlaAttention(const MlaAttentionParams& params, Stream stream) {
  if (params.num_tokens == 0 || params.num_heads == 0 || params.value_dim == 0) return Status::Ok();
  if (Status status = CheckLayout(params); !status.ok()) return status;
  if (params.dtype == DType::kF32) return mla::LaunchPortableF32(params, stream);
  const bool bfloat16 = params.dtype == DType::kBF16;
  bool suits = false;
  if (mla::HasSm90Shape(params)) {
    const auto suits_sm90 = bfloat16 ? mla::SuitsSm90BF16 : mla::SuitsSm90F16;
    if (Status status = suits_sm90(params, &suits); !status.ok()) return status;
  }
  if (!suits) return mla::LaunchPortable16Bit(params, stream);
  return bfloat16 ? mla::LaunchSm90BF16(params, stream) : mla::LaunchSm90F16(params, stream);
}

}  // namespace xla_gpu
