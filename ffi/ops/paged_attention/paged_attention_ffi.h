// The checks of paged_attention, for every handler that computes it.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_FFI_H_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_FFI_H_

#include <array>
#include <cstdint>
#include <optional>

#include "ffi/handlers/check.h"
#include "ffi/ops/paged_attention/paged_attention.h"

namespace xla_gpu {

// The operands in their order; those from k_scale on are optional.
enum AttentionOperand {
  kQuery,
  kKvCache,
  kContextLens,
  kBlockTables,
  kQueryStartLoc,
  kNumSeqs,
  kKScale,
  kVScale,
  kSinks,
  kTreeMask,
  kNumAttentionOperands
};
using AttentionOperands = std::array<std::optional<ffi::AnyBuffer>, kNumAttentionOperands>;

struct AttentionNumbers {
  float scale;
  int64_t sliding_window;
  float soft_cap;
};

ffi::Error CheckAttentionNumbers(const char* op, const AttentionNumbers& numbers);

// The operands from context_lens to num_seqs, which say what the sequences are.
ffi::Error GetAttentionMetadata(const char* op, const AttentionOperands& operands, PagedAttentionParams* params);

// Everything but the results.
ffi::Error GetPagedAttentionParams(const char* op, const AttentionOperands& operands, const AttentionNumbers& numbers,
                                   PagedAttentionCall* params);

#ifdef XLA_GPU_WITH_CUDA
// CheckPagedAttentionMetadata on a copy of the metadata, for which it waits for the device.
Status CheckPagedAttentionMetadataOnDevice(const PagedAttentionCall& params, const char* op, Stream stream);
#endif

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_FFI_H_
