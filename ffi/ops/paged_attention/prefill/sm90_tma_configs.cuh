// The configurations of the TMA prefill kernel (sm90_tma.cuh), an instance each.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_CONFIGS_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_CONFIGS_CUH_

namespace xla_gpu::prefill {

// How a consumer warpgroup hides the softmax behind the tensor cores' work.
enum class Overlap {
  // A warpgroup computes one key tile at a time; its softmax overlaps with the products of the other two warpgroups.
  kInterWarpgroup,
  // A warpgroup's scores of a key tile overlap with the values of the tile before, and the first scores of a work tile
  // with the last values of the one before. Warpgroups take turns, so that softmax and products alternate.
  kIntraWarpgroup,
};

struct TmaConfigDim64 {
  static constexpr int kHeadDim = 64;
  static constexpr int kProducerWarpgroups = 1;  // 0: the consumer's warps load too
  static constexpr bool kFloat8Cache = false;    // the cache holds float8 values, and tiles the same in 16 bits
  static constexpr bool kAnyPages = false;       // K and V by cp.async, for pages that TMA does not load
  static constexpr bool kLongestFirst = false;   // plans as LongestFirstPlan does
  static constexpr bool kTreeMask = false;       // takes calls with a tree_mask; would cost registers, which are short
  static constexpr int kTileKeys = 128;          // keys of a key tile
  static constexpr int kConsumerWarpgroups = 3;
  static constexpr int kRowWarpgroups = 3;            // warpgroups for which a work tile has rows, 64 each
  static constexpr bool kAlternates = false;          // a work tile of up to 64 rows has one warpgroup, in turns
  static constexpr bool kSharedAccumulators = false;  // of splits of up to 64 rows that a CTA takes
  static constexpr Overlap kOverlap = Overlap::kIntraWarpgroup;
  static constexpr int kQueryStages = 2;
  static constexpr int kKeyStages = 4;
  static constexpr int kValueStages = 4;
  static constexpr int kMaxSequences = 1024;  // that a row of the grid plans
  static constexpr int kClasses = 256;        // of the tile scheduler
  static constexpr int kTileStages = 4;       // work tiles that are known at a time
};

// For sequences of few rows: a work tile is computed by one of two warpgroups, in turns.
struct TmaConfigDim64Rows64Alternating : TmaConfigDim64 {
  static constexpr int kConsumerWarpgroups = 2;
  static constexpr int kRowWarpgroups = 1;
  static constexpr bool kAlternates = true;
  static constexpr bool kSharedAccumulators = true;
  static constexpr int kKeyStages = 5;
  static constexpr int kValueStages = 5;
};

// Three sizes of work tiles. They give the same bits: key tiles are the same, and so is what is done with each row.
struct TmaConfigDim128Rows192 {
  static constexpr int kHeadDim = 128;
  static constexpr int kProducerWarpgroups = 1;
  static constexpr bool kFloat8Cache = false;
  static constexpr bool kAnyPages = false;
  static constexpr bool kLongestFirst = false;
  static constexpr bool kTreeMask = false;  // takes calls with a tree_mask
  static constexpr int kTileKeys = 112;     // 128 spill registers in the loop over key tiles
  static constexpr int kConsumerWarpgroups = 3;
  static constexpr int kRowWarpgroups = 3;
  static constexpr bool kAlternates = false;
  static constexpr bool kSharedAccumulators = false;
  static constexpr Overlap kOverlap = Overlap::kInterWarpgroup;
  static constexpr int kQueryStages = 1;
  static constexpr int kKeyStages = 3;
  static constexpr int kValueStages = 3;
  static constexpr int kMaxSequences = 512;
  static constexpr int kClasses = 256;
  static constexpr int kTileStages = 4;
};
// With two stages of Q the next work tile's first scores need not wait for its Q to arrive.
struct TmaConfigDim128Rows128 : TmaConfigDim128Rows192 {
  static constexpr int kConsumerWarpgroups = 2;
  static constexpr int kRowWarpgroups = 2;
  static constexpr Overlap kOverlap = Overlap::kIntraWarpgroup;
  static constexpr int kQueryStages = 2;
  static constexpr int kValueStages = 2;
};
// For sequences of few rows, or a chunk of a prompt beside decode rows. While one warpgroup ends a small work tile, the
// other one has begun the next.
struct TmaConfigDim128Rows128Alternating : TmaConfigDim128Rows128 {
  static constexpr bool kAlternates = true;
  static constexpr bool kSharedAccumulators = true;
  static constexpr int kKeyStages = 2;  // three leave no room for the accumulators
};
// Three stages of V take 4 to 5 % longer.
struct TmaConfigDim128Rows64 : TmaConfigDim128Rows192 {
  static constexpr bool kTreeMask = true;
  static constexpr int kConsumerWarpgroups = 1;
  static constexpr int kRowWarpgroups = 1;
  static constexpr Overlap kOverlap = Overlap::kIntraWarpgroup;
  static constexpr int kQueryStages = 2;
  static constexpr int kValueStages = 2;
};
// Where CTAs have several work tiles of 64 rows, most of them splits of the same rows.
struct TmaConfigDim128Rows64Alternating : TmaConfigDim128Rows128Alternating {
  static constexpr int kRowWarpgroups = 1;
  static constexpr int kKeyStages = 3;
};

// For PrefillTmaOneWarpgroupKernel, whose CTAs are three on an SM.
struct TmaConfigDim128OneWarpgroup : TmaConfigDim128Rows64 {
  static constexpr int kProducerWarpgroups = 0;
  static constexpr bool kTreeMask = false;
  static constexpr int kQueryStages = 1;
  static constexpr int kKeyStages = 1;
  static constexpr int kValueStages = 1;
  static constexpr int kMaxSequences = 256;
  static constexpr int kTileStages = 8;
};

// For float8 caches, with fewer stages: tiles as they are in the cache need shared memory too.
template <typename Config>
struct TmaConfigFloat8 : Config {
  static constexpr bool kFloat8Cache = true;
  static constexpr bool kTreeMask = false;
  // Producer warps convert. Beside three consumer warpgroups a second warpgroup of them has no registers, beside one
  // there is too little to convert.
  static constexpr int kProducerWarpgroups = Config::kConsumerWarpgroups == 2 ? 2 : 1;
  static constexpr int kConversionsAhead = Config::kConsumerWarpgroups == 3 ? 1 : 7;  // as registers allow
  static constexpr bool kAlternates = false;
  static constexpr bool kSharedAccumulators = false;
  static constexpr int kQueryStages = Config::kHeadDim == 64 || Config::kConsumerWarpgroups == 1 ? 2 : 1;
  static constexpr int kKeyStages = Config::kHeadDim == 64 ? 3 : 2;
  static constexpr int kValueStages = kKeyStages;
};

// 80 keys: with 64 key columns wgmma needs all of shared memory's bandwidth. They leave little room for the scheduler.
struct TmaConfigDim256 {
  static constexpr int kHeadDim = 256;
  static constexpr int kProducerWarpgroups = 1;
  static constexpr bool kFloat8Cache = false;
  static constexpr bool kAnyPages = false;
  static constexpr bool kLongestFirst = false;
  static constexpr bool kTreeMask = true;
  static constexpr int kTileKeys = 80;
  static constexpr int kConsumerWarpgroups = 2;
  static constexpr int kRowWarpgroups = 2;
  static constexpr bool kAlternates = false;
  static constexpr bool kSharedAccumulators = false;
  static constexpr Overlap kOverlap = Overlap::kIntraWarpgroup;
  static constexpr int kQueryStages = 1;
  static constexpr int kKeyStages = 2;
  static constexpr int kValueStages = 2;
  static constexpr int kMaxSequences = 128;
  static constexpr int kClasses = 64;
  static constexpr int kTileStages = 2;
};

// For pages that are no multiple of 8 slots: tiles, work tiles and bits are those of other pages.
template <typename Config>
struct TmaConfigAnyPages : Config {
  static constexpr bool kAnyPages = true;
};

// For calls that SuitsLongestFirst: a plan that other calls would wait for the instructions of.
template <typename Config>
struct TmaConfigLongestFirst : Config {
  static constexpr bool kLongestFirst = true;
  static constexpr bool kTreeMask = false;
};

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SM90_TMA_CONFIGS_CUH_
