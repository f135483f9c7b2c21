// paged_attention on a GPU: checks what the kernels rely on, and launches the decode and the prefill path. Each path
// finds its sequences on the device, so that the launches depend on shapes alone.
#include <cstdint>
#include <string>

#include "ffi/ops/paged_attention/decode/decode.h"
#include "ffi/ops/paged_attention/decode/launch.h"
#include "ffi/ops/paged_attention/decode/params.h"
#include "ffi/ops/paged_attention/paged_attention.h"
#include "ffi/ops/paged_attention/prefill/prefill.h"

namespace xla_gpu {
namespace {

Status CheckAligned(const char* argument, const void* pointer, uintptr_t bytes) {
  if (reinterpret_cast<uintptr_t>(pointer) % bytes == 0) return Status::Ok();
  return Status::InvalidArgument(std::string("paged_attention: ") + argument + ": expected an address aligned to " +
                                 std::to_string(bytes) + " bytes, got one that is not");
}

// Vectors of 8 elements are read and written whole.
Status CheckLayout(const PagedAttentionParams& params) {
  const uintptr_t cache_alignment = IsFloat8(params.cache_dtype) && params.head_dim % 16 != 0 ? 8 : 16;
  for (const Status& status : {CheckAligned("query", params.query, 16), CheckAligned("out", params.out, 16),
                               CheckAligned("kv_cache", params.k_cache, cache_alignment),
                               CheckAligned("kv_cache", params.v_cache, cache_alignment)}) {
    if (!status.ok()) return status;
  }
  if (params.head_dim % 8 != 0 || params.head_dim > kMaxHeadDim ||
      (params.page_stride | params.slot_stride | params.head_stride) % 8 != 0) {
    return Status::InvalidArgument(
        "paged_attention: kv_cache: expected a head_dim and strides that are multiples of 8");
  }
  // Kernels count rows in 32 bits, as positions and grids are.
  if (params.num_tokens * params.num_heads >= int64_t{1} << 31) {
    return Status::InvalidArgument("paged_attention: query: expected fewer than 2^31 rows of head_dim, got " +
                                   std::to_string(params.num_tokens * params.num_heads));
  }
  return Status::Ok();
}

// Where PathsShareCombine: the prefill path's kernel, the decode path's split-KV kernel where the other one does not do
// its work, and one that merges the splits of both.
Status LaunchBothPaths(PagedAttentionCall params, Stream stream) {
  decode::SharedCall decode{};
  params.decode_work = &decode;
  if (Status status = LaunchDecode(params, stream); !status.ok()) return status;  // plans
  params.prefill_kernels = PrefillKernels::kAllButCombine;
  if (Status status = LaunchPrefill(params, stream); !status.ok()) return status;
  if (!decode.launched) {
    if (Status status = LaunchDecode(params, stream); !status.ok()) return status;
  }
  params.prefill_kernels = PrefillKernels::kCombine;
  if (Status status = LaunchPrefill(params, stream); !status.ok()) return status;
  return decode.combines ? decode::LaunchCombine(decode, stream) : Status::Ok();
}

}  // namespace

Status PrefillSplitsKeys(const PagedAttentionParams& shapes, bool* splits) {
  *splits = false;
  if (shapes.dtype == DType::kF32) return Status::Ok();
  return shapes.dtype == DType::kBF16 ? prefill::SplitsKeysBF16(shapes, splits)
                                      : prefill::SplitsKeysF16(shapes, splits);
}

Status LaunchPrefill(const PagedAttentionCall& params, Stream stream) {
  if (params.dtype == DType::kF32) return prefill::LaunchF32(params, stream);
  return params.dtype == DType::kBF16 ? prefill::LaunchBF16(params, stream) : prefill::LaunchF16(params, stream);
}

Status LaunchPagedAttention(const PagedAttentionCall& call, Stream stream) {
  if (call.num_tokens == 0 || call.num_heads == 0 || call.head_dim == 0) return Status::Ok();
  if (Status status = CheckLayout(call); !status.ok()) return status;
  bool splits_keys = false;
  if (Status status = PrefillSplitsKeys(call, &splits_keys); !status.ok()) return status;
  PagedAttentionCall params = call;
  params.max_decode_tokens = static_cast<int>(MaxDecodeTokens(call, splits_keys));
  if (call.tree_mask != nullptr) {
    // The prefill kernel for head_dim 64 takes none.
    params.max_decode_tokens = 0;
    const bool prefill = splits_keys && call.head_dim != 64;
    return prefill ? LaunchPrefill(params, stream) : LaunchDecode(params, stream);
  }
  // Padding rows are written by prefill CTAs without a work tile, or by the decode path where num_tokens leaves no room
  // for a longer sequence. CTAs of the second path start where CTAs of the first one have ended.
  const bool both = params.num_tokens > params.max_decode_tokens;
  const bool decode_first = DecodeComesFirst(params);
  const bool combine_last = splits_keys && PrefillCombineComesLast(params);
  if (both && splits_keys && PathsShareCombine(params)) return LaunchBothPaths(params, stream);
  decode::RareDecodeRows rare;
  const decode::KernelConfig decode_config = decode::MakeKernelConfig(params);
  if (both && splits_keys && decode::HasRareDecodeRows(params, decode_config)) {
    if (Status status = CheckSlotCounts(params); !status.ok()) return status;
    rare.args = decode::MakeRareDecodeRowsArgs(params, decode_config);
    params.rare_decode_rows = &rare;
  }
  if (both && !decode_first) {
    if (combine_last) params.prefill_kernels = PrefillKernels::kAllButCombine;
    if (Status status = LaunchPrefill(params, stream); !status.ok()) return status;
  }
  if (!rare.taken) {
    if (Status status = LaunchDecode(params, stream); !status.ok()) return status;
  }
  if (both && combine_last) {
    params.prefill_kernels = PrefillKernels::kCombine;
    return LaunchPrefill(params, stream);
  }
  return both && decode_first ? LaunchPrefill(params, stream) : Status::Ok();
}

}  // namespace xla_gpu
