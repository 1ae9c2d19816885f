#include "tests/runtime/text/tokenizer_fixture.h"

#include <lzma.h>

#include <fstream>
#include <iterator>
#include <limits>
#include <map>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/logging.h"

namespace heddle {
namespace {

std::string Unpack(const std::string& packed) {
  lzma_stream stream = LZMA_STREAM_INIT;
  CHECK_EQ(lzma_stream_decoder(&stream, std::numeric_limits<uint64_t>::max(), 0), LZMA_OK);
  stream.next_in = reinterpret_cast<const uint8_t*>(packed.data());
  stream.avail_in = packed.size();
  std::string unpacked;
  lzma_ret result = LZMA_OK;
  while (result == LZMA_OK) {
    const size_t size = unpacked.size();
    unpacked.resize(size + (1 << 20));
    stream.next_out = reinterpret_cast<uint8_t*>(unpacked.data()) + size;
    stream.avail_out = 1 << 20;
    result = lzma_code(&stream, LZMA_FINISH);
    unpacked.resize(unpacked.size() - stream.avail_out);
  }
  CHECK_EQ(result, LZMA_STREAM_END);
  lzma_end(&stream);
  return unpacked;
}

}  // namespace

std::string OptionalFixtureFile(absl::string_view fixture, absl::string_view name) {
  std::ifstream file(absl::StrCat(HEDDLE_TESTS_DIR, "/golden/tokenizers/", fixture, "/", name),
                     std::ios::binary);
  const std::string contents{std::istreambuf_iterator<char>(file), {}};
  return absl::EndsWith(name, ".xz") && !contents.empty() ? Unpack(contents) : contents;
}

std::string FixtureFile(absl::string_view fixture, absl::string_view name) {
  std::string contents = OptionalFixtureFile(fixture, name);
  CHECK(!contents.empty()) << fixture << "/" << name;
  return contents;
}

std::shared_ptr<const Tokenizer> LoadFixture(absl::string_view fixture) {
  static auto* const loaded = new std::map<std::string, std::shared_ptr<const Tokenizer>>;
  std::shared_ptr<const Tokenizer>& place = (*loaded)[std::string(fixture)];
  if (place != nullptr) return place;
  const std::string config = OptionalFixtureFile(fixture, "tokenizer_config.json");
  const std::string model = OptionalFixtureFile(fixture, "tokenizer.model.xz");
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer =
      model.empty() ? ParseTokenizerJson(FixtureFile(fixture, "tokenizer.json.xz"), config)
                    : ParseSentencePiece(model, config);
  CHECK_OK(tokenizer.status());
  return place = *std::move(tokenizer);
}

nlohmann::json LoadExpectations(absl::string_view fixture) {
  return nlohmann::json::parse(FixtureFile(fixture, "expect.json.xz"));
}

}  // namespace heddle
