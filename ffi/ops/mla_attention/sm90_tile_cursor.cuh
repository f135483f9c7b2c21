// The work tiles of a CTA of the sm_90a kernels, one after the other, as its share (sm90_schedule.cuh) has them.
#ifndef XLA_GPU_OPS_MLA_ATTENTION_SM90_TILE_CURSOR_CUH_
#define XLA_GPU_OPS_MLA_ATTENTION_SM90_TILE_CURSOR_CUH_

#include <cstdint>

#include "ffi/ops/mla_attention/sm90_schedule.cuh"
#include "ffi/ops/mla_attention/sm90_traits.cuh"
#include "ffi/ops/mla_attention/sm90_units.cuh"
#include "ffi/ops/paged_attention/sequence_metadata.cuh"

namespace xla_gpu::mla {

// Walks over a CTA's work tiles. By one warp.
class TileCursor {
 public:
  __device__ TileCursor(const Sm90Params& params, const Schedule& schedule)
      : params_(params),
        schedule_(schedule),
        info_(LoadInfo(schedule.sequence)),
        units_(params, info_),
        sequence_(schedule.sequence),
        unit_(units_.Find(schedule.begin - schedule.start, schedule.length)),
        start_(schedule.start + units_.LengthBefore(unit_, schedule.length)) {}

  // The next work tile; false if there are no more. *split is set if its keys are shared and this CTA has the first.
  __device__ bool Next(WorkTile* tile, SplitTile* split) {
    while (start_ < schedule_.end && sequence_ < schedule_.num_live) {
      const bool found = MakeTile(tile, split);
      Advance();
      if (found) return true;
    }
    return false;
  }

 private:
  __device__ SequenceInfo LoadInfo(int s) const { return LoadSequenceInline(params_.attention, s, schedule_.in_order); }

  __device__ void Advance() {
    start_ += schedule_.length.Of(units_.KeyTiles(unit_));
    if (++unit_ < units_.count) return;
    unit_ = 0;
    while (++sequence_ < schedule_.num_live) {
      info_ = LoadInfo(sequence_);
      units_ = SequenceUnits(params_, info_);
      if (units_.count > 0) return;
    }
  }

  // This CTA's work tile of the current unit; false if it has none.
  __device__ bool MakeTile(WorkTile* tile, SplitTile* split) const {
    const Sm90Params& params = params_;
    const int num_heads = static_cast<int>(params.attention.num_heads);
    const int unit_tiles = units_.KeyTiles(unit_);
    int key_begin = 0, key_end = unit_tiles;  // key tiles of the unit that are this CTA group's
    int unit_parts = 0;                       // where they are equal
    if (schedule_.length.per_key_tile != 0) {
      const int64_t low = max(schedule_.begin - start_, int64_t{0});
      const int64_t high = min(schedule_.end - start_, int64_t{unit_tiles + params.unit_cost});
      key_begin = max(static_cast<int>(low) - params.unit_cost, 0);
      key_end = max(static_cast<int>(high) - params.unit_cost, 0);
      if (key_begin == key_end && (unit_tiles > 0 || low > 0)) return false;
    } else if (schedule_.length.constant > 1) {
      const int parts = schedule_.length.constant, part_tiles = max((unit_tiles + parts - 1) / parts, 1);
      const int part = static_cast<int>(schedule_.begin - start_);
      key_begin = part * part_tiles;
      key_end = min(key_begin + part_tiles, unit_tiles);
      if (key_begin >= unit_tiles && part > 0) return false;
      unit_parts = (unit_tiles + part_tiles - 1) / part_tiles;
    }
    const int group_cta = static_cast<int>(blockIdx.x) % params.group_ctas;
    tile->sequence_row = (unit_ * params.group_ctas + group_cta) * params.tile_rows;
    const int sequence_rows = info_.q_len * num_heads;
    if (tile->sequence_row >= sequence_rows) return false;
    tile->rows = min(params.tile_rows, sequence_rows - tile->sequence_row);
    tile->first_row = info_.q_begin * num_heads + tile->sequence_row;
    tile->kind = info_.valid ? WorkTile::kAttention : WorkTile::kNan;
    tile->offset = info_.context_len - info_.q_len;
    const auto last_row = static_cast<uint32_t>(tile->sequence_row + tile->rows - 1);
    tile->key_end = max(tile->offset + static_cast<int>(params.heads.Divide(last_row)) + 1, 0);
    tile->first_key_tile = key_begin;
    tile->key_tiles = info_.valid ? max(min(KeyTilesOf(tile->key_end), key_end) - key_begin, 0) : 0;
    tile->block_table = sequence_;
    const auto context = static_cast<uint32_t>(info_.context_len);
    tile->first_page = 0;
    tile->pages = context == 0 ? 0 : static_cast<int>(params.page.Divide(context - 1)) + 1;
    const bool begins_here = key_begin == 0, ends_here = key_end == unit_tiles;
    // The parts of a sequence's only unit have all its pages together, and a row is NaN if one of its parts is.
    if (units_.count == 1) {
      tile->first_page = static_cast<int>(params.page.Divide(static_cast<uint32_t>(key_begin * kTileKeys)));
      if (!ends_here)
        tile->pages = static_cast<int>(params.page.Divide(static_cast<uint32_t>(key_end * kTileKeys - 1))) + 1;
    }
    tile->slot = begins_here && ends_here ? -1 : static_cast<int>(blockIdx.x) * 2 + (begins_here ? 1 : 0);
    if (begins_here && !ends_here) {
      const int64_t unit_end = start_ + schedule_.length.Of(unit_tiles);
      const int group = static_cast<int>(blockIdx.x) / params.group_ctas;
      split->first_row = tile->first_row;
      split->rows = tile->rows;
      split->parts = unit_parts > 0 ? unit_parts : static_cast<int>((unit_end - 1) / schedule_.share) - group + 1;
      split->cta_step = params.group_ctas;
    }
    return true;
  }

  const Sm90Params& params_;
  const Schedule& schedule_;
  SequenceInfo info_;
  SequenceUnits units_;
  int sequence_;
  int unit_;
  int64_t start_;  // of the unit
};

}  // namespace xla_gpu::mla

#endif  // XLA_GPU_OPS_MLA_ATTENTION_SM90_TILE_CURSOR_CUH_
