#include "kernels/embedding/embedding.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/validate.h"

namespace heddle {

absl::Status ValidateEmbedding(const EmbeddingArgs& args) {
  const PackedWeight& table = args.table;
  RETURN_IF_ERROR(ValidateFloatMatrix("embedding", "out", args.out));
  RETURN_IF_ERROR(ValidateShape("embedding", "out", args.out, args.out.rows, table.k));
  if (args.first_id < 0) {
    return absl::InvalidArgumentError(absl::StrCat("embedding: first id ", args.first_id));
  }
  RETURN_IF_ERROR(ValidateArray("embedding", "token_ids", args.token_ids, args.out.rows));
  RETURN_IF_ERROR(ValidateArray("embedding", "table", table.data, table.n * table.k));
  return absl::OkStatus();
}

}  // namespace heddle
