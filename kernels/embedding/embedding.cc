#include "kernels/embedding/embedding.h"

#include "absl/strings/str_cat.h"

namespace heddle {

absl::Status ValidateEmbedding(const EmbeddingArgs& args) {
  const auto& [table, token_ids, first_id, out] = args;
  if (out.cols != table.k || out.rows < 0 || (out.rows > 1 && out.row_stride < out.cols)) {
    return absl::InvalidArgumentError(absl::StrCat("embedding: rows of ", table.k,
                                                   " elements do not fit out [", out.rows, ", ",
                                                   out.cols, "] of stride ", out.row_stride));
  }
  if (first_id < 0) {
    return absl::InvalidArgumentError(absl::StrCat("embedding: first id ", first_id));
  }
  if (out.rows == 0 || table.k == 0) return absl::OkStatus();
  if (token_ids == nullptr || out.data == nullptr || (table.n > 0 && table.data == nullptr)) {
    return absl::InvalidArgumentError("embedding: token ids, table or out is null");
  }
  return absl::OkStatus();
}

}  // namespace heddle
