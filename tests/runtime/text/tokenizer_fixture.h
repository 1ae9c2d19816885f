// The tokenizers of tests/golden/tokenizers.
#pragma once

#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"
#include "runtime/text/tokenizer.h"

namespace heddle {

// A file of a fixture's folder; one that ends in .xz comes unpacked. Dies if it
// cannot be read; the optional one is "" then.
std::string FixtureFile(absl::string_view fixture, absl::string_view name);
std::string OptionalFixtureFile(absl::string_view fixture, absl::string_view name);

// From tokenizer.json or tokenizer.model, and tokenizer_config.json if there. Loaded
// once a process: the real ones take a while under sanitizers.
std::shared_ptr<const Tokenizer> LoadFixture(absl::string_view fixture);
nlohmann::json LoadExpectations(absl::string_view fixture);

}  // namespace heddle
