// Weights read from mapped files, safetensors or GGUF.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/checkpoint/mapped_file.h"
#include "runtime/checkpoint/stored_tensor.h"
#include "runtime/checkpoint/weight_source.h"
#include "runtime/model/model_spec.h"

namespace heddle {

struct MappedTensor {
  StoredTensor stored;  // under its Hugging Face name, its span inside `file`
  std::shared_ptr<const MappedFile> file;
};

// Keeps the tensors that the model needs, and the scales of float8 ones. InvalidArgument lists
// every one that is missing, has another shape, is stored as something there is no arithmetic for,
// or is unknown; `where` names the checkpoint. Tensors that may be ignored, or hold no element, are
// logged in one line.
absl::StatusOr<std::unique_ptr<WeightSource>> MapWeights(const ModelSpec& spec,
                                                         std::vector<MappedTensor> tensors,
                                                         absl::string_view where);

}  // namespace heddle
