#include "runtime/model/rotary_table.h"

#include <vector>

#include "kernels/base/status_macros.h"
#include "kernels/kernel_table.h"

namespace heddle {

RotaryTable::RotaryTable(const RopeSpec& spec, int64_t num_positions, Backend& backend)
    : kernels_(&backend.kernels()),
      rotary_dim_(spec.rotary_dim),
      interleaved_(spec.interleaved),
      num_positions_(num_positions) {}

absl::StatusOr<RotaryTable> RotaryTable::Create(const RopeSpec& spec, int64_t num_positions,
                                                Backend& backend) {
  RotaryTable table(spec, num_positions, backend);
  const std::vector<float> host = CosSinTable(spec, num_positions);
  const size_t bytes = host.size() * sizeof(float);
  ASSIGN_OR_RETURN(table.cos_sin_, backend.Allocate(bytes));
  ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, backend.CreateStream());
  RETURN_IF_ERROR(backend.CopyAsync(table.cos_sin_.data(), host.data(), bytes, *stream));
  RETURN_IF_ERROR(stream->Synchronize());
  return table;
}

absl::Status RotaryTable::Rotate(MatrixView x, int64_t num_heads, int64_t head_dim,
                                 const int32_t* positions, Stream& stream) const {
  return kernels_->rope({.x = x,
                         .num_heads = num_heads,
                         .head_dim = head_dim,
                         .rotary_dim = rotary_dim_,
                         .interleaved = interleaved_,
                         .cos_sin = cos_sin_.as<const float>(),
                         .num_positions = num_positions_,
                         .positions = positions},
                        stream);
}

}  // namespace heddle
