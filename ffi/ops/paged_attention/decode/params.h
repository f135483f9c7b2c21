// The parameters of the decode kernels beside the operator's own, and the sizes that host and device agree on. The host
// compiler reads this too: the workspace follows from it in builds without CUDA.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_PARAMS_H_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_PARAMS_H_

#include <algorithm>
#include <cstdint>

#include "ffi/device/fast_divisor.h"
#include "ffi/device/math_constants.h"
#include "ffi/ops/paged_attention/decode/decode.h"
#include "ffi/ops/paged_attention/paged_attention.h"

namespace xla_gpu::decode {

inline constexpr int kMaxSplits = 64;   // KV splits of a work tile
inline constexpr int kMaxSegments = 8;  // runs of neighbouring splits that are merged first among themselves
inline constexpr int kSegmentSplits = kMaxSplits / kMaxSegments;  // splits of a segment, at most
// Split accumulators that a CTA may store: see SplitAccumulators::IndexOf.
inline constexpr int kCtaAccumulators = kSegmentSplits + kMaxSegments - 1;
// Floats behind each row of o_accum: the row's AttentionState, and padding that keeps rows aligned to 16 bytes.
inline constexpr int kStateFloats = 4;
// Between work tiles of different lengths in the linearised KV-block space: what starting a work tile costs, in KV
// blocks.
inline constexpr int kFixedOverheadBlocks = 2;
inline constexpr int kMaxSms = 152;  // for which the scratch has room
inline constexpr int kCtasPerSm = 2;
// Registers of a thread. 256 threads of the split-KV kernel and 256 of the combine kernel fill the 65536 of an SM, so
// that CTAs of the combine kernel become resident beside those of the split-KV kernel.
inline constexpr int kSplitKvRegisters = 152;
inline constexpr int kCombineRegisters = 104;
// With no more work tiles a call is short. Every split then stores its own accumulator, and the combine kernel need not
// find out which CTA computed what.
inline constexpr int kSmallCombineTiles = 32;

// What both decode kernels take. 32-bit copies of sizes save registers and instructions.
struct DecodeArgs {
  PagedAttentionParams params;
  int group_size;                  // query heads per KV head
  int cta_group_size;              // CTAs of a CTA group: one for each KV head of a KV-head group
  int num_kv_head_groups;          // num_kv_heads / cta_group_size
  int num_cta_groups;              // that the KV-block space is divided among
  SmallDivisor cta_group_divisor;  // by num_cta_groups; the quotient may be one too large
  int block_shift;                 // a unit of the KV-block space is 2^block_shift KV blocks
  uint32_t max_context_len;        // pages_per_seq * page_size; 0 for a cache without pages
  int row_tiles_per_token;         // row tiles that begin in the rows of a token and KV head, at most; if wide: that a
                                   // sequence and KV head has
  int accum_rows;                  // rows of a split accumulator
  uint32_t accum_row_stride;       // from row to row of a split accumulator, in float4
  int prompt_sms;                  // SMs, where CTAs may start beside the last work tiles of prompts; else 0
  bool store_every_split;          // one split accumulator for each split; else kCtaAccumulators for each CTA
  bool whole_tiles;                // a CTA group takes whole work tiles: there is nothing to combine
  bool fill_padding_rows;          // write the rows that no sequence owns
  bool behind_prefill;             // the prefill path was launched before: probably there are no rows for this one
  bool wait_at_start;              // the kernel before may still write this one's inputs, or read its scratch
  uint8_t block_keys_log2 : 3;     // keys of a KV block
  uint8_t tile_rows_log2 : 3;      // query rows of a work tile
  // Of wide work tiles, where their split accumulators stand (work_range.cuh): by the split with which they begin, or,
  // where CTA groups take whole segments of splits, by CTA and segment.
  bool by_split : 1;
  bool whole_segments : 1;
  uint8_t whole_tile_excess;  // KV blocks: see TileScheduler::SuitsWholeTiles; 0: not in this call
  int window;                 // sliding_window in keys; 0 where it hides no key
  float cap;                  // soft_cap * log2(e), in units of log2; 0: no soft cap
  float cap_inverse;          // 1 / soft_cap
  int num_tokens;
  int max_seqs;
  uint32_t pages_per_seq;
  uint32_t prefetch_pages;     // entries of block_tables to prefetch into L2
  uint64_t kv_l2_policy;       // kEvictFirst; a parameter stands in a uniform register, a literal would not
  uint32_t slot_stride_bytes;  // from slot to slot of the cache
  uint32_t num_pages;
  FastDivisor page;           // by page_size
  uint32_t group_multiplier;  // of the SmallDivisor by group_size
  // For wide work tiles, and without tensor cores:
  int max_tokens;             // of a sequence of the decode path
  int tree_words;             // of a row of tree_mask
  const uint32_t* tree_mask;  // as in PagedAttentionCall

#ifdef __CUDACC__
  // The index, among the sequence's pages, of the page that holds the key at `position`.
  __device__ int PageOf(int position) const { return static_cast<int>(page.Divide(static_cast<uint32_t>(position))); }
  // The new tokens that the query at row `token` of the batch sees, a bit each.
  __device__ uint64_t TreeTokens(int token) const {
    const uint32_t* const words = tree_mask + static_cast<int64_t>(token) * tree_words;
    return __ldg(words) | (tree_words > 1 ? static_cast<uint64_t>(__ldg(words + 1)) << 32 : 0);
  }
  // The query that a row of a sequence and KV head belongs to: rows are (query, head of the GQA group) pairs.
  __device__ int QueryOf(int row) const {
    return static_cast<int>(SmallDivisor{group_multiplier}.Divide(static_cast<uint32_t>(row)));
  }
#endif
};

// Which kernels serve a call, and how they use the scratch. A function of shapes and dtypes.
struct KernelConfig {
  int head_dim;        // that the kernels are compiled for: head_dim rounded up
  bool wide;           // work tiles of 64 query rows (WideKernelTraits), where the GPU has large shared memory
  bool dependent;      // behind a kernel of the same call (DependentKernelTraits), where there is such a kernel
  int row_tiles;       // of 8 query rows
  bool narrow_copies;  // cache rows are aligned to 8 bytes only, so that cp.async moves 8 instead of 16
  int row_tiles_per_token;
  int accum_rows;        // rows of a split accumulator
  int64_t work_tiles;    // (sequence, KV head, row tile), at most
  int64_t accumulators;  // split accumulators that the scratch holds
  bool store_every_split;
  bool whole_segments;  // as in DecodeArgs, and the next
  bool whole_tiles;
  int max_ctas;  // of the split-KV kernel for which the scratch has room
};

// Whether the sequences probably are prompts without a context: they have nearly as many tokens as there is room for.
inline bool SuggestWholePrompts(const PagedAttentionCall& shapes) {
  return shapes.max_seqs > 0 && !SuggestFewTokens(shapes) && shapes.tree_words == 0 &&
         shapes.num_tokens * 8 / 7 / shapes.max_seqs >= shapes.pages_per_seq * shapes.page_size;
}

// Whether a CTA group takes whole work tiles, so that a call needs no combine kernel: where the prefill path comes
// first and the decode path probably has nothing to do, since a single sequence has room for many rows, or all of them
// are prompts; and where contexts are so short that splits gain nothing.
inline bool TakesWholeTiles(const PagedAttentionCall& shapes) {
  constexpr int64_t kManyTokens = 64;
  constexpr int64_t kShortContext = 1024;
  return !DecodeComesFirst(shapes) && shapes.tree_words == 0 && shapes.max_seqs > 0 &&
         ((shapes.max_seqs == 1 && shapes.num_tokens >= kManyTokens) || SuggestWholePrompts(shapes) ||
          shapes.pages_per_seq * shapes.page_size <= kShortContext);
}

// Whether there are kernels with wide work tiles, which a call with a tree_mask takes.
inline bool HasWideTiles(const PagedAttentionParams& params) {
  return params.dtype != DType::kF32 && params.head_dim <= 128 && params.cache_dtype != DType::kF8E5M2 &&
         !(IsFloat8(params.cache_dtype) && params.head_dim % 16 != 0) && params.num_tokens > 0 &&
         params.num_heads > 0 && params.num_kv_heads > 0 && params.head_dim > 0 && params.max_seqs > 0;
}

// New tokens of a sequence of the decode path, at most.
inline int64_t MaxSequenceTokens(const PagedAttentionCall& params) {
  return params.tree_words > 0 ? params.MaxTreeTokens() : params.max_decode_tokens;
}

// The kernels with wide work tiles.
inline KernelConfig MakeWideKernelConfig(const PagedAttentionCall& params) {
  constexpr int64_t kTileRows = 64;
  KernelConfig config = {};
  config.wide = true;
  config.head_dim = params.head_dim <= 64 ? 64 : 128;
  config.row_tiles = static_cast<int>(kTileRows / 8);
  const int64_t rows = params.num_heads / params.num_kv_heads * std::min(params.num_tokens, params.MaxTreeTokens());
  config.row_tiles_per_token = static_cast<int>((rows + kTileRows - 1) / kTileRows);
  config.accum_rows = static_cast<int>(std::min(rows, kTileRows));
  config.work_tiles = params.max_seqs * config.row_tiles_per_token * params.num_kv_heads;
  const int64_t accumulator_bytes = config.accum_rows * (params.head_dim + kStateFloats) * int64_t{sizeof(float)};
  const int64_t most = DecodeScratchLimit(params) / accumulator_bytes;
  config.accumulators = config.work_tiles * kMaxSplits;
  config.max_ctas = kMaxSms * kCtasPerSm;
  config.whole_segments = config.accumulators > most;
  if (config.whole_segments) {
    config.max_ctas = static_cast<int>(std::min<int64_t>(most / kMaxSegments, kMaxSms));
    config.accumulators = int64_t{config.max_ctas} * kMaxSegments;
  }
  return config;
}

// The others.
inline KernelConfig MakeKernelConfig(const PagedAttentionCall& params) {
  KernelConfig config = {};
  const bool float8 = IsFloat8(params.cache_dtype);
  const int64_t dim = params.head_dim;
  config.head_dim = dim <= 64 ? 64 : dim <= 128 ? 128 : dim <= 192 && !float8 ? 192 : 256;
  const int64_t group_size = params.num_heads / std::max<int64_t>(params.num_kv_heads, 1);
  const int64_t rows = group_size * std::min(params.num_tokens, kMaxDecodeRows);
  // More tokens than sequences: some sequences have several query rows, which share one pass over K and V.
  // Where prompts may be what makes them more, and the scratch is shared with the prefill path, single rows count.
  const bool several_queries = params.num_tokens > params.max_seqs && DecodeComesFirst(params);
  config.dependent = params.order == LaunchOrder::kDependent && DecodeComesFirst(params);
  config.narrow_copies = float8 && dim % 16 != 0;
  config.row_tiles = config.narrow_copies ? 2 : rows > 8 && (group_size > 8 || several_queries) ? 2 : 1;
  const int64_t tile_rows = 8 * config.row_tiles;
  config.row_tiles_per_token = static_cast<int>((group_size + tile_rows - 1) / tile_rows);
  config.accum_rows = static_cast<int>(std::min(rows, tile_rows));
  config.work_tiles = params.num_tokens * config.row_tiles_per_token * params.num_kv_heads;
  const int64_t accumulator_bytes = config.accum_rows * (dim + kStateFloats) * int64_t{sizeof(float)};
  const int64_t most = DecodeScratchLimit(params) / std::max<int64_t>(accumulator_bytes, 1);
  config.whole_tiles = TakesWholeTiles(params);
  const bool small = config.work_tiles <= kSmallCombineTiles && config.work_tiles * kMaxSplits <= most;
  // Not where the prefill path's combine kernel merges these splits too, which takes those of CTAs.
  config.store_every_split = !config.whole_tiles && small && params.decode_work == nullptr;
  config.max_ctas = static_cast<int>(std::min<int64_t>(most / kCtaAccumulators, kMaxSms * kCtasPerSm));
  const int64_t of_splits = small ? config.work_tiles * kMaxSplits : 0;
  const int64_t of_ctas = int64_t{config.max_ctas} * kCtaAccumulators;
  // Where the paths may share a combine kernel, the GPU decides whether they do: room for both.
  config.accumulators = config.whole_tiles          ? 0
                        : PathsShareCombine(params) ? std::max(of_splits, of_ctas)
                        : small                     ? of_splits
                                                    : of_ctas;
  return config;
}

// The decode path's part of a call where PathsShareCombine. LaunchDecode, called twice, plans first and then launches
// the split-KV kernel, if that is still to be launched. It launches no combine kernel.
struct SharedCall {
  bool planned = false;
  bool suits_prefill;     // the prefill path's kernel can do the split-KV kernel's work (prefill/sm90_tma.cuh)
  bool launched = false;  // the split-KV work is
  bool combines;          // there are splits to merge, and the combine kernel has not been launched
  DecodeArgs args;
  unsigned combine_ctas;
  unsigned prefill_ctas = 0;  // of the prefill path's kernel, if that does the work (prefill/decode_share.cuh)
};

// A call whose sequences probably have more tokens than the decode path takes, since there is one, or all are prompts:
// a kernel that finds nothing to do behind the prefill path's costs 1 to 7 us, so that this one takes few tokens too,
// where it has code for them.
struct RareDecodeRows {
  bool taken = false;  // by a kernel of the prefill path
  DecodeArgs args;
};

// The arguments that follow from shapes and attributes alone.
inline DecodeArgs MakeArgs(const PagedAttentionCall& params, const KernelConfig& config) {
  DecodeArgs args = {};
  args.params = params;
  args.group_size = static_cast<int>(params.num_heads / params.num_kv_heads);
  args.row_tiles_per_token = config.row_tiles_per_token;
  args.accum_rows = config.accum_rows;
  static_assert(kStateFloats == 4);
  args.accum_row_stride = static_cast<uint32_t>((params.head_dim + kStateFloats) / 4);
  args.store_every_split = config.store_every_split;
  args.whole_segments = config.whole_segments;
  args.whole_tiles = config.whole_tiles;
  args.by_split = config.wide && !config.whole_segments;
  args.fill_padding_rows = params.num_tokens <= params.max_decode_tokens || params.tree_mask != nullptr;
  args.behind_prefill = !args.fill_padding_rows && !DecodeComesFirst(params);
  args.max_tokens = static_cast<int>(MaxSequenceTokens(params));
  args.tree_words = static_cast<int>(params.tree_words);
  args.tree_mask = params.tree_mask;
  const bool hides_keys = params.sliding_window < std::min(params.pages_per_seq * params.page_size, int64_t{1} << 31);
  args.window = hides_keys ? static_cast<int>(params.sliding_window) : 0;
  const int64_t max_context_len = std::min<int64_t>(params.pages_per_seq * params.page_size, INT32_MAX);
  args.max_context_len = params.num_pages > 0 ? static_cast<uint32_t>(max_context_len) : 0;
  args.cap = params.soft_cap * kLog2E;
  args.cap_inverse = params.soft_cap == 0.0f ? 0.0f : 1.0f / params.soft_cap;
  args.num_tokens = static_cast<int>(std::min<int64_t>(params.num_tokens, INT32_MAX));
  args.max_seqs = static_cast<int>(std::min<int64_t>(params.max_seqs, INT32_MAX));
  args.pages_per_seq = static_cast<uint32_t>(params.pages_per_seq);
  // Of a larger table the call reads little.
  constexpr int64_t kMaxPrefetchPages = 1 << 17;
  const int64_t table_entries = params.max_seqs * params.pages_per_seq;
  args.prefetch_pages = table_entries <= kMaxPrefetchPages ? static_cast<uint32_t>(table_entries) : 0;
  args.group_multiplier = SmallDivisor::Make(args.group_size).multiplier;
  args.num_pages = static_cast<uint32_t>(params.num_pages);
  args.page = FastDivisor::Make(params.page_size);
  return args;
}

// Whether RareDecodeRows is for such calls.
inline bool HasRareDecodeRows(const PagedAttentionCall& params, const KernelConfig& config) {
  return config.whole_tiles && config.row_tiles == 1 && !IsFloat8(params.cache_dtype) &&
         (params.max_seqs == 1 || SuggestWholePrompts(params));
}
// Its arguments, but for what only device code has names for.
inline DecodeArgs MakeRareDecodeRowsArgs(const PagedAttentionCall& params, const KernelConfig& config) {
  DecodeArgs args = MakeArgs(params, config);
  args.slot_stride_bytes = static_cast<uint32_t>(params.slot_stride * 2);
  args.cta_group_size = 1;
  args.num_kv_head_groups = static_cast<int>(params.num_kv_heads);
  return args;
}

// KV heads that are computed side by side, by a CTA each, where `ctas` CTAs are resident: as many as possible up to 16,
// as long as (almost) no CTA is left over.
inline int CtaGroupSize(int64_t num_kv_heads, int ctas) {
  int best = 1;
  for (int size = 1; size <= std::min<int64_t>({num_kv_heads, 16, ctas}); ++size) {
    if (num_kv_heads % size != 0) continue;
    const auto used = [&](int of) { return ctas / of * of; };
    if (used(size) >= used(best) - ctas / 64) best = size;
  }
  return best;
}

// Divides the work among the `ctas` CTAs of the split-KV kernel that are resident.
inline void PartitionWork(const KernelConfig& config, int ctas, DecodeArgs* args) {
  const PagedAttentionParams& params = args->params;
  if (!config.store_every_split) ctas = std::min(ctas, config.max_ctas);
  args->cta_group_size = CtaGroupSize(params.num_kv_heads, ctas);
  args->num_kv_head_groups = static_cast<int>(params.num_kv_heads / args->cta_group_size);
  const int64_t work_tiles = config.work_tiles / args->cta_group_size;
  const int64_t keys = std::min<int64_t>(params.pages_per_seq * params.page_size, INT32_MAX);
  const int64_t block_keys = int64_t{1} << args->block_keys_log2;
  const int64_t blocks = std::max<int64_t>((keys + block_keys - 1) / block_keys, 1);
  int64_t cta_groups = work_tiles * std::min<int64_t>(blocks, kMaxSplits);
  if (config.whole_tiles) {
    // No more than the sequences of the decode path have row tiles. Probably there are none: the other CTAs would only
    // keep the next kernel from starting.
    const int64_t rows = params.max_decode_tokens * args->group_size;
    const int64_t row_tiles = (rows + (int64_t{1} << args->tile_rows_log2) - 1) >> args->tile_rows_log2;
    cta_groups = std::min(work_tiles, params.max_seqs * row_tiles * args->num_kv_head_groups);
  }
  args->num_cta_groups = static_cast<int>(std::clamp<int64_t>(cta_groups, 1, ctas / args->cta_group_size));
  args->cta_group_divisor = SmallDivisor::Make(args->num_cta_groups);
  // Coordinates of the KV-block space stay below 2^30. A work tile takes its splits, which are equal and rounded up to
  // whole blocks, and the fixed overhead.
  const int64_t length = blocks + std::max<int64_t>(blocks / 32, 4);
  while (work_tiles * ((length >> args->block_shift) + 1 + kFixedOverheadBlocks) >> 30 != 0 && args->block_shift < 30) {
    ++args->block_shift;
  }
}

// DecodeArgs::whole_tile_excess of a call: KV blocks that take about as long as the combine kernel. 0 where up to 32
// sequences are planned by other code, and where a full table has more work tiles than there are CTA groups, unless it
// is small: then it may hold a few sequences of many as well.
inline uint8_t WholeTileExcess(const KernelConfig& config, const DecodeArgs& args) {
  constexpr int kFewSequences = 32, kSmallTable = 128;
  const bool may_suit =
      args.max_seqs <= kSmallTable || int64_t{args.max_seqs} * args.num_kv_head_groups <= args.num_cta_groups;
  const bool divides = !config.wide && !config.whole_tiles && !config.store_every_split && args.block_shift == 0;
  if (args.max_seqs <= kFewSequences || !may_suit || !divides || args.behind_prefill) return 0;
  return config.head_dim <= 128 ? 8 : 4;  // blocks of a larger head_dim have twice the bytes
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_PARAMS_H_
