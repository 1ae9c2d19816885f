#include "runtime/text/tokenizer.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "runtime/text/stream_decoder.h"

namespace heddle {
namespace {

bool Exists(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error);
}

absl::StatusOr<std::string> ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string contents{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file) return absl::NotFoundError(absl::StrCat("cannot read ", path.string()));
  return contents;
}

}  // namespace

std::string Tokenizer::Decode(std::span<const int32_t> ids, bool skip_special_tokens) const {
  StreamDecoder decoder(this, skip_special_tokens);
  std::string text;
  for (const int32_t id : ids) text += decoder.Push(id);
  return text + decoder.Flush();
}

absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizer(const std::string& directory) {
  const std::filesystem::path root = directory;
  std::string config;
  if (Exists(root / "tokenizer_config.json")) {
    ASSIGN_OR_RETURN(config, ReadFile(root / "tokenizer_config.json"));
  }
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer =
      absl::NotFoundError("neither tokenizer.json nor tokenizer.model is there");
  if (Exists(root / "tokenizer.json")) {
    ASSIGN_OR_RETURN(const std::string contents, ReadFile(root / "tokenizer.json"));
    tokenizer = ParseTokenizerJson(contents, config);
  } else if (Exists(root / "tokenizer.model")) {
    ASSIGN_OR_RETURN(const std::string contents, ReadFile(root / "tokenizer.model"));
    tokenizer = ParseSentencePiece(contents, config);
  }
  if (!tokenizer.ok()) return Annotate(tokenizer.status(), directory);
  return tokenizer;
}

}  // namespace heddle
