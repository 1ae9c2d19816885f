// What a GGUF file says of a model, in the words of the rest of Heddle.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/checkpoint/gguf.h"
#include "runtime/model/model_spec.h"
#include "runtime/text/gguf_vocabulary.h"

namespace heddle {

// Architectures llama (with Q and K rows permuted for interleaved pairs), qwen2 and qwen3.
// `contents` is the whole file, for the frequency factors of rope_freqs.weight. InvalidArgument
// lists every problem.
absl::StatusOr<ModelSpec> GgufModelSpec(const GgufFile& file, absl::string_view contents,
                                        absl::string_view file_name);

// tokenizer.ggml.*; fails only on values of the wrong type.
absl::StatusOr<GgufVocabulary> ReadGgufVocabulary(const GgufFile& file,
                                                  absl::string_view file_name);

// "blk.3.attn_q.weight" → "model.layers.3.self_attn.q_proj.weight". A name that is not known keeps
// its last part; one that GGUF does not use comes back as it is.
std::string HuggingFaceName(absl::string_view gguf_name);

}  // namespace heddle
