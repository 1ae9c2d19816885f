#include "cache/prefix_index.h"

#include <xxhash.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/base/logging.h"

namespace heddle {

PrefixHash PrefixIndex::Hash(const PrefixHash& parent, std::span<const int32_t> tokens) {
  const XXH128_hash_t own = XXH3_128bits(tokens.data(), tokens.size_bytes());
  const uint64_t link[] = {parent.low, parent.high, own.low64, own.high64};
  const XXH128_hash_t hash = XXH3_128bits(link, sizeof(link));
  return {hash.low64, hash.high64};
}

PrefixIndex::PrefixIndex(HashFunction hash) : hash_(hash) {}

PrefixNode* PrefixIndex::Lookup(const PrefixHash& hash, const PrefixNode* parent,
                                std::span<const int32_t> tokens, bool* collides) const {
  *collides = false;
  const auto found = nodes_.find(hash);
  if (found == nodes_.end()) return nullptr;
  PrefixNode* node = found->second.get();
  if (node->parent == parent && std::ranges::equal(node->tokens, tokens)) return node;
  *collides = true;
  return nullptr;
}

PrefixNode* PrefixIndex::Find(const PrefixNode* parent, std::span<const int32_t> tokens) const {
  bool collides;
  return Lookup(hash_(parent->hash, tokens), parent, tokens, &collides);
}

PrefixNode* PrefixIndex::FindOrInsert(PrefixNode* parent, std::span<const int32_t> tokens) {
  const PrefixHash hash = hash_(parent ? parent->hash : PrefixHash{}, tokens);
  bool collides;
  if (PrefixNode* node = Lookup(hash, parent, tokens, &collides)) return node;
  if (collides) return nullptr;
  auto node = std::make_unique<PrefixNode>();
  node->hash = hash;
  node->parent = parent;
  node->tokens.assign(tokens.begin(), tokens.end());
  if (parent) Pin(parent);
  return (nodes_[hash] = std::move(node)).get();
}

PrefixNode* PrefixIndex::PinRoot(const PrefixKey& key) {
  // The key's bytes take the place of a page's tokens. The lengths keep its fields apart.
  const std::string text = absl::StrCat(key.model_id.size(), ":", key.model_id, ":",
                                        DTypeName(key.dtype), ":", key.salt);
  PrefixNode* root = FindOrInsert(nullptr, std::vector<int32_t>(text.begin(), text.end()));
  if (root) Pin(root);
  return root;
}

PrefixNode* PrefixIndex::Advance(PrefixNode* parent, std::span<const int32_t> tokens) {
  PrefixNode* child = FindOrInsert(parent, tokens);
  if (child) Pin(child);
  Unpin(parent);
  return child;
}

void PrefixIndex::Unpin(PrefixNode* node) {
  while (node) {
    CHECK(node->num_holds > 0);
    if (--node->num_holds > 0) return;
    PrefixNode* parent = node->parent;
    const PrefixHash hash = node->hash;
    nodes_.erase(hash);
    node = parent;
  }
}

void PrefixIndex::SetPage(PrefixNode* node, int64_t page) {
  CHECK_EQ(node->page, -1);
  node->page = page;
  Pin(node);
}

void PrefixIndex::ClearPage(PrefixNode* node) {
  CHECK_NE(node->page, -1);
  node->page = -1;
  Unpin(node);
}

absl::Status PrefixIndex::CheckIntegrity(const std::map<const PrefixNode*, int64_t>& pins) const {
  std::map<const PrefixNode*, int64_t> expected = pins;
  for (const auto& [hash, node] : nodes_) {
    if (!(node->hash == hash)) return absl::InternalError("prefix node filed under another hash");
    if (node->parent) ++expected[node->parent];
    if (node->page != -1) ++expected[node.get()];
  }
  if (expected.size() != nodes_.size()) {
    return absl::InternalError(absl::StrCat("of ", nodes_.size(), " prefix nodes ", expected.size(),
                                            " are held by something"));
  }
  for (const auto& [hash, node] : nodes_) {
    const auto found = expected.find(node.get());
    if (found == expected.end() || found->second != node->num_holds) {
      return absl::InternalError(absl::StrCat("prefix node of page ", node->page, " counts ",
                                              node->num_holds, " holds instead of ",
                                              found == expected.end() ? 0 : found->second));
    }
  }
  return absl::OkStatus();
}

}  // namespace heddle
