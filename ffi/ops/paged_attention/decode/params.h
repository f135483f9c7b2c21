// What the decode kernels are launched with, beside the operator's own parameters, and the sizes that host and device
// agree on.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_PARAMS_H_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_PARAMS_H_

#include <algorithm>
#include <cstdint>

#include "ffi/ops/paged_attention/decode/decode.h"
#include "ffi/ops/paged_attention/paged_attention.h"

namespace xla_gpu::decode {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr int kMaxChunks = 64;                         // of a unit
inline constexpr int kMaxGroups = 8;                          // of chunks, which are merged first among themselves
inline constexpr int kGroupChunks = kMaxChunks / kMaxGroups;  // of a group, at most
inline constexpr int kWorkerSlots = kGroupChunks + kMaxGroups + 2;  // partial results that a worker leaves: see SlotOf
inline constexpr int kSlotPadding = 4;  // floats behind a row's output: its softmax, and room so that rows are aligned
inline constexpr int kUnitGap = 2;      // on the line, behind a unit, where units are of several lengths
inline constexpr int kMaxSms = 152;     // for which the scratch is laid out
inline constexpr int kDecodeBlocksPerSm = 2;
// Registers of a thread where blocks of both kernels share an SM: 256 threads of the first and 256 of the second fill
// its 65536, so that the second's get ready beside the first's.
inline constexpr int kSplitRegisters = 152;
inline constexpr int kCombineRegisters = 104;
// With so few units a call is short: then all chunks' results are left one by one, and whoever merges them need not
// know who computed what.
inline constexpr int kFewUnits = 32;

struct DecodeArgs {
  PagedAttentionParams params;
  int group;             // query heads per kv head
  int heads;             // kv heads of a set: blocks of a team
  int sets;              // of kv heads
  int teams;             // among which the chunks are shared out
  uint32_t teams_magic;  // 2 * n * teams_magic >> 32 is n / teams, or one more
  int line_shift;        // the line is measured in 2^line_shift blocks of keys
  uint32_t max_context;  // the largest context_len that is valid
  int tiles_per_token;   // row tiles that begin in a token's rows of a kv head, at most
  int slot_rows;         // rows of a partial result in the scratch
  uint32_t slot_row;     // how long they are, counted in four floats
  bool few;              // a slot for each chunk of each unit; else kWorkerSlots for each worker
  bool fill_unowned;     // write the rows that no sequence owns
  bool wait_first;       // the kernel before may still write what is read
  int window;            // sliding_window, or 0 where it hides nothing
  float cap;             // soft_cap in units of log2; 0: none
  float cap_inverse;     // 2 * log2(e) / soft_cap
  int num_tokens;        // in 32 bits, as the next
  int max_seqs;
  uint32_t pages_per_seq;
  uint32_t prefetch_pages;  // the page numbers that are brought into L2 beforehand
  uint64_t stream_policy;   // kEvictFirst: as a parameter it stands in a uniform register
  uint32_t slot_bytes;      // between neighbouring slots of the cache
  uint32_t num_pages;
  uint32_t page_size;
  uint32_t page_magic;  // 2 * token * page_magic >> 32 + page_shift is token / page_size
  int page_shift;
  uint32_t group_magic;  // 2 * row * group_magic >> 32 is row / group

#ifdef __CUDACC__
  __device__ int PageOf(int token) const {
    return static_cast<int>(__umulhi(2u * static_cast<unsigned>(token), page_magic) >> page_shift);
  }
  // Of a row of a sequence and kv head: which query it is.
  __device__ int QueryOf(int row) const {
    return static_cast<int>(__umulhi(2u * static_cast<unsigned>(row), group_magic));
  }
#endif
};

// Which kernel, and how the scratch is used.
struct Layout {
  int dim;        // head_dim that the kernel is made for
  int row_tiles;  // of eight (query, head) rows
  bool narrow;    // rows of the cache start at multiples of 8 bytes, not 16
  int tiles_per_token;
  int slot_rows;
  int64_t units;  // at most
  int64_t slots;  // partial results that the scratch holds
  bool few;
};

inline Layout MakeLayout(const PagedAttentionParams& params) {
  Layout layout = {};
  const bool float8 = IsFloat8(params.cache_dtype);
  const int64_t dim = params.head_dim;
  layout.dim = dim <= 64 ? 64 : dim <= 128 ? 128 : dim <= 192 && !float8 ? 192 : 256;
  const int64_t group = params.num_heads / std::max<int64_t>(params.num_kv_heads, 1);
  const int64_t rows = group * std::min(params.num_tokens, kMaxDecodeRows);
  // With more tokens than sequences some have several; then their rows shall share one pass over K and V.
  const bool several = params.num_tokens > params.max_seqs;
  layout.narrow = float8 && dim % 16 != 0;
  layout.row_tiles = layout.narrow ? 2 : rows > 8 && (group > 8 || several) ? 2 : 1;
  const int64_t tile = 8 * layout.row_tiles;
  layout.tiles_per_token = static_cast<int>((group + tile - 1) / tile);
  layout.slot_rows = static_cast<int>(std::min(rows, tile));
  layout.units = params.num_tokens * layout.tiles_per_token * params.num_kv_heads;
  layout.few = layout.units <= kFewUnits;
  layout.slots = layout.few ? layout.units * kMaxChunks : int64_t{kMaxSms} * kDecodeBlocksPerSm * kWorkerSlots;
  return layout;
}

// The arguments that follow from the parameters alone.
inline DecodeArgs MakeArgs(const PagedAttentionParams& params, const Layout& layout) {
  DecodeArgs args = {};
  args.params = params;
  args.group = static_cast<int>(params.num_heads / params.num_kv_heads);
  args.tiles_per_token = layout.tiles_per_token;
  args.slot_rows = layout.slot_rows;
  static_assert(kSlotPadding == 4);
  args.slot_row = static_cast<uint32_t>((params.head_dim + kSlotPadding) / 4);
  args.few = layout.few;
  args.fill_unowned = params.num_tokens <= kMaxDecodeRows;
  const bool hides = params.sliding_window < std::min(params.pages_per_seq * params.page_size, int64_t{1} << 31);
  args.window = hides ? static_cast<int>(params.sliding_window) : 0;
  const int64_t room = std::min<int64_t>(params.pages_per_seq * params.page_size, INT32_MAX);
  args.max_context = params.num_pages > 0 ? static_cast<uint32_t>(room) : 0;
  args.cap = params.soft_cap * kLog2E;
  args.cap_inverse = params.soft_cap == 0.0f ? 0.0f : 2.0f * kLog2E / params.soft_cap;
  args.num_tokens = static_cast<int>(std::min<int64_t>(params.num_tokens, INT32_MAX));
  args.max_seqs = static_cast<int>(std::min<int64_t>(params.max_seqs, INT32_MAX));
  args.pages_per_seq = static_cast<uint32_t>(params.pages_per_seq);
  constexpr int64_t kMostPages = 1 << 17;
  const int64_t pages = params.max_seqs * params.pages_per_seq;
  args.prefetch_pages = pages <= kMostPages ? static_cast<uint32_t>(pages) : 0;
  args.group_magic = static_cast<uint32_t>(((int64_t{1} << 31) + args.group - 1) / args.group);
  args.num_pages = static_cast<uint32_t>(params.num_pages);
  args.page_size = static_cast<uint32_t>(params.page_size);
  // token / page_size for tokens below 2^31: the magic number is 2^(31 + shift) / page_size, rounded up.
  while ((int64_t{1} << args.page_shift) < params.page_size) ++args.page_shift;
  args.page_magic =
      static_cast<uint32_t>(((uint64_t{1} << (31 + args.page_shift)) + static_cast<uint64_t>(params.page_size) - 1) /
                            static_cast<uint64_t>(params.page_size));
  return args;
}

// How many kv heads are computed side by side, by a block each, where `workers` blocks are resident: up to 16, so many
// that as good as no block is left over.
inline int HeadsOfSet(int64_t num_kv_heads, int workers) {
  int best = 1;
  for (int heads = 1; heads <= std::min<int64_t>({num_kv_heads, 16, workers}); ++heads) {
    if (num_kv_heads % heads != 0) continue;
    const auto used = [&](int of) { return workers / of * of; };
    if (used(heads) >= used(best) - workers / 64) best = heads;
  }
  return best;
}

// Who shares the work, where `workers` blocks of the split kernel are resident.
inline void ShareOut(const Layout& layout, int block_keys, int workers, DecodeArgs* args) {
  const PagedAttentionParams& params = args->params;
  args->heads = HeadsOfSet(params.num_kv_heads, workers);
  args->sets = static_cast<int>(params.num_kv_heads / args->heads);
  const int64_t units = layout.units / args->heads;
  const int64_t keys = std::min<int64_t>(params.pages_per_seq * params.page_size, INT32_MAX);
  const int64_t blocks = std::max<int64_t>((keys + block_keys - 1) / block_keys, 1);
  args->teams =
      static_cast<int>(std::clamp<int64_t>(units * std::min<int64_t>(blocks, kMaxChunks), 1, workers / args->heads));
  args->teams_magic = static_cast<uint32_t>(((int64_t{1} << 31) + args->teams - 1) / args->teams);
  // The line is to be shorter than 2^30. Chunks are equal parts of a unit, rounded up to whole blocks; then comes a
  // gap.
  const int64_t length = blocks + std::max<int64_t>(blocks / 32, 4);
  while (units * ((length >> args->line_shift) + 1 + kUnitGap) >> 30 != 0 && args->line_shift < 30) ++args->line_shift;
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_PARAMS_H_
