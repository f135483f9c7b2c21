// Who computes what in the decode path, worked out by every warp for itself from the metadata.
//
// A unit is a sequence, a set of kv heads and a tile of query rows. The keys that a sequence's queries see are cut into
// chunks, at most kMaxChunks of them, whose length is a function of the number of keys alone. The chunks of all units,
// one after the other, are laid out on a line, each as long as its blocks of keys, with a gap behind each unit for the
// time that it takes to begin with another. Every team (a block of the split kernel for each kv head of a set, so that
// all heads of a page are read at about the same time) owns those that begin in its part of the line. So the load is
// even whatever the lengths are, while a chunk's bits, and how chunks are merged (eight to a group, then the groups,
// from left to right), depend on the sequence alone.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_TILE_SCHEDULER_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_TILE_SCHEDULER_CUH_

#include <cstdint>

#include "ffi/ops/paged_attention/decode/params.h"
#include "ffi/ops/paged_attention/sequence_metadata.cuh"

namespace xla_gpu::decode {

// About 1 / x, for x > 0.
__device__ inline float Inverse(unsigned x) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(static_cast<float>(x)));
  return inverse;
}
// x / by, rounded up, where that is below 128.
__device__ inline int CeilSmall(unsigned x, unsigned by) {
  // Less than the quotient, by less than 2.
  int quotient = static_cast<int>(static_cast<float>(x) * Inverse(by));
  if (static_cast<unsigned>(quotient) * by < x) ++quotient;
  if (static_cast<unsigned>(quotient) * by < x) ++quotient;
  return quotient;
}

// A sequence of the plan's window. One without chunks is not of the decode path.
struct PlanEntry {
  uint32_t begin;   // of its first unit, on the line
  uint32_t length;  // of a unit, on the line, with the gap behind it
  int32_t q_begin;
  int32_t first_key;  // keys before it are hidden from all of the sequence's queries
  int32_t end_key;
  int32_t blocks;  // of a chunk, each of kBlockKeys keys
  int32_t tiles;   // of rows, of a kv head
  uint8_t q_len;
  uint8_t chunks;        // of a unit
  uint8_t group_chunks;  // of a group of these; the last one may have fewer
  bool valid;            // context_len is; if not, there are no keys

  __device__ int Units(const DecodeArgs& args) const { return tiles * args.sets; }
  __device__ uint32_t End(const DecodeArgs& args) const { return begin + length * static_cast<unsigned>(Units(args)); }
  // Of a chunk, in a unit's part of the line.
  __device__ uint32_t Place(const DecodeArgs& args, int chunk) const {
    return static_cast<unsigned>(chunk * blocks) >> args.line_shift;
  }
  __device__ int GroupOf(int chunk) const {  // exact for numbers as small as these
    return static_cast<int>((static_cast<float>(chunk) + 0.5f) * Inverse(group_chunks));
  }
  __device__ int Groups() const { return GroupOf(chunks - 1) + 1; }
  // The first chunk that begins at `place` or behind it.
  __device__ int ChunkFrom(const DecodeArgs& args, uint32_t place) const {
    if (place >= length) return chunks;
    return min(CeilSmall(place << args.line_shift, static_cast<unsigned>(blocks)), int{chunks});
  }
};
static_assert(sizeof(PlanEntry) == 32 && kMaxChunks < 127 && kMaxDecodeRows < 256);

// What the metadata says of a sequence.
struct Metadata {
  int q_begin;
  int q_end;
  int context_len;

  __device__ static Metadata Load(const DecodeArgs& args, int sequence) {
    if (sequence >= args.max_seqs) return {0, 0, 0};
    const int32_t* const starts = args.params.query_start_loc + sequence;
    return {__ldg(starts), __ldg(starts + 1), __ldg(args.params.context_lens + sequence)};
  }
  __device__ bool InOrder(const DecodeArgs& args) const {
    return 0 <= q_begin && q_begin <= q_end && q_end <= args.num_tokens;
  }
};

// A sequence's entry, whose `begin` is 0; without `owned` an empty one.
template <int kBlockKeys, int kRows>
__device__ inline PlanEntry MakePlanEntry(const DecodeArgs& args, bool owned, const Metadata& of) {
  PlanEntry entry = {};
  const unsigned q_len = static_cast<unsigned>(of.q_end) - static_cast<unsigned>(of.q_begin);
  if (!owned || q_len - 1 >= kMaxDecodeRows) return entry;
  entry.valid = static_cast<unsigned>(of.context_len) <= args.max_context;
  entry.q_begin = of.q_begin;
  entry.q_len = static_cast<uint8_t>(q_len);
  entry.end_key = entry.valid ? of.context_len : 0;
  if (args.window > 0) {
    const int64_t hidden = int64_t{entry.end_key} - q_len - args.window + 1;
    entry.first_key = hidden > 0 ? static_cast<int>(hidden) : 0;
  }
  // An empty sequence has one empty chunk: somebody has to write its rows.
  const unsigned keys = static_cast<unsigned>(entry.end_key - entry.first_key);
  const unsigned blocks = max((keys + kBlockKeys - 1) / kBlockKeys, 1u);
  const unsigned per_chunk = max((blocks + kMaxChunks - 1) / kMaxChunks, blocks >= 4096 / kBlockKeys ? 2u : 1u);
  const int chunks = CeilSmall(blocks, per_chunk);
  entry.blocks = static_cast<int>(per_chunk);
  entry.chunks = static_cast<uint8_t>(chunks);
  entry.group_chunks = static_cast<uint8_t>((chunks + kMaxGroups - 1) / kMaxGroups);
  entry.tiles = static_cast<int>((q_len * args.group + kRows - 1) / kRows);
  entry.length = ((static_cast<unsigned>(chunks) * per_chunk - 1) >> args.line_shift) + 1;
  return entry;
}

// Where a unit is, of which a block has one kv head.
struct UnitPlace {
  int kv_head;
  int row_tile;
  uint32_t begin;  // on the line

  // head: of the set.
  __device__ static UnitPlace Of(const DecodeArgs& args, const PlanEntry& entry, int unit, int head) {
    // Units of a sequence: row tiles first, then sets.
    const int set = entry.tiles == 1 ? unit : unit / entry.tiles;
    return {set * args.heads + head, unit - set * entry.tiles,
            entry.begin + static_cast<unsigned>(unit) * entry.length};
  }
};

// False if no sequence can be of the decode path; asked only where that is likely. By all threads of a block together.
__device__ inline bool MayHaveDecodeRows(const DecodeArgs& args) {
  const PagedAttentionParams& params = args.params;
  if (DecodeComesFirst(params)) return true;
  bool any = false;
  for (int64_t s = threadIdx.x; s < params.max_seqs; s += blockDim.x) {
    const int64_t rows = int64_t{__ldg(params.query_start_loc + s + 1)} - __ldg(params.query_start_loc + s);
    any = any || (1 <= rows && rows <= kMaxDecodeRows);
  }
  return __syncthreads_or(any);
}

// A warp builds the plan, and calls its functions that are not const, together. It sees 32 sequences at a time, its
// window, and goes through all windows once for the length of the line.
template <int kBlockKeys, int kRows>
class Plan {
 public:
  struct Shared {  // of a warp
    PlanEntry entries[32];
  };

  // What is asked of memory before anything is known: the first sequences, of which some may not be live.
  struct Start {
    Metadata metadata;
    int num_seqs;

    __device__ explicit Start(const DecodeArgs& args)
        : metadata(Metadata::Load(args, Lane())), num_seqs(__ldg(args.params.num_seqs)) {}
  };

  __device__ Plan(const DecodeArgs& args, Shared& shared, const Start& start) : args_(args), shared_(shared) {
    live_ = start.num_seqs <= args.max_seqs ? max(start.num_seqs, 0) : 0;
    in_order_ = __all_sync(0xffffffffu, Lane() >= live_ || start.metadata.InOrder(args));
    if (live_ <= 32 && in_order_) {
      const PlanEntry entry = MakePlanEntry<kBlockKeys, kRows>(args, Lane() < live_, start.metadata);
      const Lengths lengths(entry);
      gap_ = lengths.Gap();
      window_ = 0;
      begin_ = 0;
      end_ = Place(args, shared, entry, live_, gap_, 0);
      SetPerTeam(end_, lengths);
    } else {
      const Extent all = Measure(args, live_);
      in_order_ = all.in_order;
      gap_ = all.lengths.Gap();
      SetPerTeam(all.length + gap_ * all.units, all.lengths);
      LoadWindow(0, 0);
    }
  }

  __device__ uint32_t Total() const { return total_; }
  __device__ uint32_t PerTeam() const { return per_team_; }
  __device__ uint32_t TeamBegin(int team) const { return static_cast<unsigned>(team) * per_team_; }

  __device__ const PlanEntry& At(int index) const { return shared_.entries[index]; }
  // The entry of the window that holds `position` < Total(), after a change of the window if need be.
  __device__ int Find(uint32_t position) {
    if (position < begin_) FirstWindow();
    while (position >= end_) NextWindow();
    const PlanEntry& mine = shared_.entries[Lane()];
    const unsigned before = __ballot_sync(0xffffffffu, mine.chunks > 0 && mine.begin <= position);
    return 31 - __clz(static_cast<int>(before));
  }
  // As above of the window, by each lane for itself: `position` lies in it.
  __device__ const PlanEntry& Search(uint32_t position) const {
    int low = 0;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      if (shared_.entries[low + step].begin <= position) low += step;
    }
    return shared_.entries[low];
  }
  // The next entry with chunks, which must exist, likewise.
  __device__ int Next(int index) {
    unsigned behind = 0xfffffffeu << index;
    while (true) {
      const unsigned found = __ballot_sync(0xffffffffu, shared_.entries[Lane()].chunks > 0) & behind;
      if (found != 0) return __ffs(static_cast<int>(found)) - 1;
      NextWindow();
      behind = 0xffffffffu;
    }
  }

  // The window's part of the line.
  __device__ bool Holds(uint32_t position) const { return begin_ <= position && position < end_; }
  __device__ bool LastWindow() const { return window_ + 32 >= live_; }
  __device__ void FirstWindow() {
    if (window_ > 0) LoadWindow(0, 0);
  }
  __device__ void NextWindow() { LoadWindow(window_ + 32, end_); }

  __device__ int SequenceOf(int index) const { return window_ + index; }

 private:
  __device__ static int Lane() { return static_cast<int>(threadIdx.x % 32); }

  // Of units, on the line, without gaps. The same in all lanes.
  struct Lengths {
    uint32_t longest;
    uint32_t shortest;

    // entry: a lane's.
    __device__ explicit Lengths(const PlanEntry& entry)
        : longest(__reduce_max_sync(0xffffffffu, entry.length)),
          shortest(__reduce_min_sync(0xffffffffu, entry.chunks > 0 ? entry.length : ~0u)) {}

    __device__ bool Alike() const { return longest == shortest; }
    // Where all units are alike so are the times between them. Else 1 to 3 did better than none, and 2 best.
    __device__ uint32_t Gap() const { return Alike() ? 0 : kUnitGap; }
  };

  // All live sequences' units.
  struct Extent {
    uint32_t units;
    uint32_t length;  // without gaps
    Lengths lengths;
    bool in_order;
  };

  // NOTE: these two are not inlined, since only batches of many sequences and wrong metadata need them, and not
  // members, lest all members stand in memory.
  __device__ __noinline__ static Extent Measure(const DecodeArgs& args, int live) {
    bool ok = true;
    for (int s = Lane(); s < live; s += 32) ok = ok && Metadata::Load(args, s).InOrder(args);
    const bool in_order = __all_sync(0xffffffffu, ok);
    Extent all = {0, 0, Lengths({}), in_order};
    for (int first = 0; first < live; first += 32) {
      const PlanEntry entry = EntryOf(args, first + Lane(), live, in_order);
      const unsigned units = static_cast<unsigned>(entry.Units(args));
      all.units += __reduce_add_sync(0xffffffffu, units);
      all.length += __reduce_add_sync(0xffffffffu, units * entry.length);
      const Lengths lengths(entry);
      all.lengths.longest = max(all.lengths.longest, lengths.longest);
      all.lengths.shortest = min(all.lengths.shortest, lengths.shortest);
    }
    return all;
  }
  __device__ __noinline__ static uint32_t PlaceWindow(const DecodeArgs& args, Shared& shared, int live, bool in_order,
                                                      int window, uint32_t gap, uint32_t begin) {
    return Place(args, shared, EntryOf(args, window + Lane(), live, in_order), min(live - window, 32), gap, begin);
  }

  __device__ static PlanEntry EntryOf(const DecodeArgs& args, int sequence, int live, bool in_order) {
    bool owned = sequence < live;
    if (!in_order) owned = owned && LoadSequence(args.params, sequence, false).owned;
    return MakePlanEntry<kBlockKeys, kRows>(args, owned, Metadata::Load(args, sequence));
  }

  // Gives the window's entries, one of each lane, of which the first `live` are, their places on the line from `begin`
  // on. Returns where they end.
  __device__ static uint32_t Place(const DecodeArgs& args, Shared& shared, PlanEntry entry, int live, uint32_t gap,
                                   uint32_t begin) {
    entry.length += gap;
    const uint32_t length = entry.End(args);  // its `begin` is 0
    uint32_t sum = length;
#pragma unroll 1
    for (int i = 1; i < live; i *= 2) {  // none for one sequence
      const uint32_t before = __shfl_up_sync(0xffffffffu, sum, i);
      if (Lane() >= i) sum += before;
    }
    entry.begin = Lane() < live ? begin + sum - length : ~0u;  // behind all that is looked for
    __syncwarp();                                              // the last window is no longer read
    shared.entries[Lane()] = entry;
    __syncwarp();
    return begin + __shfl_sync(0xffffffffu, sum, max(live - 1, 0));
  }

  __device__ void LoadWindow(int window, uint32_t begin) {
    window_ = window;
    begin_ = begin;
    end_ = PlaceWindow(args_, shared_, live_, in_order_, window, gap_, begin);
  }

  // Where all units are of a length, a little more for each team may save much merging: whole units, or a part whose
  // length is a multiple of a power of two, as lengths often are.
  __device__ void SetPerTeam(uint32_t total, const Lengths& lengths) {
    total_ = total;
    // At least total / teams.
    per_team_ = max(__umulhi(2 * (total + args_.teams - 1), args_.teams_magic), 1u);
    if (!lengths.Alike()) return;
    const uint32_t length = lengths.longest;
    const uint32_t most = per_team_ + per_team_ / 16;
    if (most >= length && per_team_ < 64 * length) {
      const uint32_t whole = static_cast<unsigned>(CeilSmall(per_team_, length)) * length;
      if (whole <= most) {
        per_team_ = whole;
        return;
      }
    }
    if (per_team_ < 16) return;
    const uint32_t step = 1u << (27 - __clz(static_cast<int>(per_team_)));
    per_team_ = (per_team_ + step - 1) & ~(step - 1);
  }

  const DecodeArgs& args_;
  Shared& shared_;
  int live_;
  uint32_t gap_;  // on the line, behind a unit
  int window_;    // its first sequence
  uint32_t begin_;
  uint32_t end_;
  bool in_order_;
  uint32_t total_;
  uint32_t per_team_;
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_TILE_SCHEDULER_CUH_
