// The values that paged_attention's metadata may have.
#include <cstdint>
#include <string>

#include "ffi/ops/paged_attention/paged_attention.h"

namespace xla_gpu {
namespace {

Status Wrong(const char* op, const std::string& argument, const std::string& expected, int64_t got) {
  return Status::InvalidArgument(std::string(op) + ": " + argument + ": expected " + expected + ", got " +
                                 std::to_string(got));
}

// "name[index] (sequence s)"
std::string Entry(const char* name, const std::string& index, int64_t s) {
  return std::string(name) + "[" + index + "] (sequence " + std::to_string(s) + ")";
}

Status CheckSequence(const PagedAttentionCall& params, const char* op, int64_t s) {
  const int64_t begin = params.query_start_loc[s];
  const int64_t end = params.query_start_loc[s + 1];
  if (end < begin || end > params.num_tokens) {
    return Wrong(op, Entry("query_start_loc", std::to_string(s + 1), s),
                 "a row from " + std::to_string(begin) +
                     ", where the sequence starts, to num_tokens = " + std::to_string(params.num_tokens),
                 end);
  }
  if (params.tree_words > 0 && end - begin > params.MaxTreeTokens()) {
    return Wrong(op, Entry("query_start_loc", std::to_string(s + 1), s),
                 "at most " + std::to_string(params.MaxTreeTokens()) + " new tokens, for which tree_mask has bits",
                 end - begin);
  }
  const int64_t context = params.context_lens[s];
  const int64_t capacity = params.pages_per_seq * params.page_size;
  if (context < 0 || context > capacity) {
    return Wrong(op, Entry("context_lens", std::to_string(s), s),
                 "a length from 0 to pages_per_seq * page_size = " + std::to_string(capacity), context);
  }
  if (context > 0 && params.num_pages == 0) {
    return Wrong(op, Entry("context_lens", std::to_string(s), s), "0, since kv_cache has no pages", context);
  }
  const int64_t used = (context + params.page_size - 1) / params.page_size;
  for (int64_t i = 0; i < used; ++i) {
    const int64_t page = params.block_tables[s * params.pages_per_seq + i];
    if (page < 0 || page >= params.num_pages) {
      return Wrong(op, Entry("block_tables", std::to_string(s) + ", " + std::to_string(i), s),
                   "a page from 0 to " + std::to_string(params.num_pages - 1), page);
    }
  }
  return Status::Ok();
}

}  // namespace

Status CheckPagedAttentionMetadata(const PagedAttentionCall& params, const char* op) {
  const int64_t num_seqs = params.num_seqs[0];
  if (num_seqs < 0 || num_seqs > params.max_seqs) {
    return Wrong(op, "num_seqs", "a number from 0 to max_seqs = " + std::to_string(params.max_seqs), num_seqs);
  }
  const int64_t first = params.query_start_loc[0];
  if (num_seqs > 0 && (first < 0 || first > params.num_tokens)) {
    return Wrong(op, Entry("query_start_loc", "0", 0),
                 "a row from 0 to num_tokens = " + std::to_string(params.num_tokens), first);
  }
  for (int64_t s = 0; s < num_seqs; ++s) {
    if (Status status = CheckSequence(params, op, s); !status.ok()) return status;
  }
  return Status::Ok();
}

}  // namespace xla_gpu
