#include "kernels/activation/add.h"
#include "kernels/activation/copy_heads.h"
#include "kernels/activation/gather_rows.h"
#include "kernels/activation/silu_mul.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/validate.h"

namespace heddle {

absl::Status ValidateAdd(const AddArgs& args) {
  RETURN_IF_ERROR(ValidateFloatMatrix("add", "x", args.x));
  RETURN_IF_ERROR(ValidateFloatMatrix("add", "target", args.target));
  return ValidateShape("add", "target", args.target, args.x.rows, args.x.cols);
}

absl::Status ValidateCopyHeads(const CopyHeadsArgs& args) {
  RETURN_IF_ERROR(ValidateHeads("copy_heads", "x", args.x));
  RETURN_IF_ERROR(ValidateHeads("copy_heads", "out", args.out));
  return ValidateHeadsShape("copy_heads", "out", args.out, args.x.tokens, args.x.heads, args.x.dim);
}

absl::Status ValidateSiluMul(const SiluMulArgs& args) {
  RETURN_IF_ERROR(ValidateFloatMatrix("silu_mul", "gate", args.gate));
  RETURN_IF_ERROR(ValidateFloatMatrix("silu_mul", "up", args.up));
  RETURN_IF_ERROR(ValidateFloatMatrix("silu_mul", "out", args.out));
  RETURN_IF_ERROR(ValidateShape("silu_mul", "up", args.up, args.gate.rows, args.gate.cols));
  return ValidateShape("silu_mul", "out", args.out, args.gate.rows, args.gate.cols);
}

absl::Status ValidateGatherRows(const GatherRowsArgs& args) {
  RETURN_IF_ERROR(ValidateFloatMatrix("gather_rows", "x", args.x));
  RETURN_IF_ERROR(ValidateFloatMatrix("gather_rows", "out", args.out));
  RETURN_IF_ERROR(ValidateArray("gather_rows", "rows", args.rows, args.out.rows));
  return ValidateShape("gather_rows", "out", args.out, args.out.rows, args.x.cols);
}

}  // namespace heddle
