// Any bytes as a .safetensors file: refused, or described without a lie.
#include <cstddef>
#include <cstdint>

#include "kernels/base/logging.h"
#include "runtime/checkpoint/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view contents(reinterpret_cast<const char*>(data), size);
  const auto tensors = heddle::ParseSafetensors(contents, "model.safetensors");
  if (!tensors.ok()) return 0;
  int64_t total = 0;
  for (const heddle::StoredTensor& tensor : *tensors) {
    if (tensor.bytes == 0) continue;
    CHECK(tensor.offset >= 8 && tensor.bytes > 0);
    CHECK_LE(tensor.offset + tensor.bytes, static_cast<int64_t>(size));
    total += tensor.bytes;
  }
  CHECK_LT(total, static_cast<int64_t>(size));  // no byte belongs to two
  return 0;
}
