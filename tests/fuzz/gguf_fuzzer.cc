// Any bytes as a GGUF file: refused, or described without a lie.
#include <cstddef>
#include <cstdint>

#include "kernels/base/logging.h"
#include "runtime/checkpoint/gguf.h"
#include "runtime/checkpoint/gguf_model.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view contents(reinterpret_cast<const char*>(data), size);
  const auto file = heddle::ParseGguf(contents, "model.gguf");
  if (!file.ok()) return 0;
  int64_t total = 0;
  for (const heddle::StoredTensor& tensor : file->tensors) {
    (void)heddle::HuggingFaceName(tensor.name);
    if (tensor.bytes == 0) continue;
    CHECK(tensor.offset > 0 && tensor.bytes > 0);
    CHECK_LE(tensor.offset + tensor.bytes, static_cast<int64_t>(size));
    total += tensor.bytes;
  }
  CHECK_LT(total, static_cast<int64_t>(size));  // no byte belongs to two
  (void)heddle::ReadGgufVocabulary(*file, "model.gguf");
  const auto spec = heddle::GgufModelSpec(*file, contents, "model.gguf");
  if (!spec.ok()) return 0;
  CHECK(heddle::FindSpecProblems(*spec).empty());
  (void)heddle::CosSinTable(spec->rope, 2);
  return 0;
}
