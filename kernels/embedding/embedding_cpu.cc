// A look-up reads one panel of 16 rows for each token and writes one row: 16 * width elements of
// the table, width floats. That is cheap beside one layer's weights, and spares a second copy of a
// table that is also the output projection.
#include "kernels/embedding/embedding_cpu.h"

#include <algorithm>

#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/gemm/unpack.h"

namespace heddle {

absl::Status EmbeddingCpu(const EmbeddingArgs& args, Stream& stream) {
  RETURN_IF_ERROR(ValidateEmbedding(args));
  RETURN_IF_ERROR(PackedLayout::Create(args.table).status());
  CpuStream::From(stream).Enqueue([args](CpuThreadPool& pool) {
    const PackedLayout layout = PackedLayout::Of(args.table);
    pool.ParallelFor(args.out.rows, [&](int64_t token) {
      float* out = args.out.Row<float>(token);
      const int64_t row = args.token_ids[token] - args.first_id;
      if (row >= 0 && row < args.table.n) {
        UnpackRow(args.table, layout, row, out);
      } else {
        std::fill_n(out, args.out.cols, 0.0f);
      }
    });
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

}  // namespace heddle
