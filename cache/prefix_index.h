// Finds the pages that already hold a prompt's first tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/base/dtype.h"

namespace heddle {

// What a page's contents depend on beside its tokens and those before them.
struct PrefixKey {
  std::string model_id;
  DType dtype = DType::kFloat32;
  std::string salt;  // adapter, tenant: whatever must not be shared
};

// The XXH3-128 of a page's tokens, chained to that of the pages before it.
struct PrefixHash {
  uint64_t low = 0;
  uint64_t high = 0;
  bool operator==(const PrefixHash&) const = default;
};

// One whole page of tokens behind one certain prefix. Nodes form a tree whose roots are keys, so
// a node's identity stands for all tokens up to its page's end. Its page may be gone (evicted)
// while later pages still need its place in the tree.
struct PrefixNode {
  PrefixHash hash;
  PrefixNode* parent = nullptr;
  std::vector<int32_t> tokens;  // [page_size]; of a root: its key
  int64_t page = -1;            // the ledger's index of the page with these tokens, or -1
  int64_t num_holds = 0;        // children, pins, and the page if there is one
};

// Owned by the ledger and used from its thread. A hash finds, stored tokens decide: whatever the
// hash, a node is found only if its own tokens and its parent's identity agree. A node lives while
// somebody holds it.
class PrefixIndex {
 public:
  using HashFunction = PrefixHash (*)(const PrefixHash& parent, std::span<const int32_t> tokens);
  // Tests pass hashes that collide.
  explicit PrefixIndex(HashFunction hash = &Hash);
  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;

  // The root of a key, pinned for the caller; null if another prefix has its hash.
  PrefixNode* PinRoot(const PrefixKey& key);
  // The child of `parent` with these tokens, not pinned; null if unknown.
  PrefixNode* Find(const PrefixNode* parent, std::span<const int32_t> tokens) const;
  // Finds or makes that child and moves the caller's pin from `parent` to it; null, and the pin
  // dropped, if another prefix has the same hash: such a prefix is never indexed.
  PrefixNode* Advance(PrefixNode* parent, std::span<const int32_t> tokens);

  void Pin(PrefixNode* node) { ++node->num_holds; }
  // Deletes the node if that was the last hold, then its parents likewise.
  void Unpin(PrefixNode* node);
  void SetPage(PrefixNode* node, int64_t page);
  void ClearPage(PrefixNode* node);

  int64_t num_nodes() const { return static_cast<int64_t>(nodes_.size()); }
  // Internal unless every hold is explained by a child, a page or one of `pins`.
  absl::Status CheckIntegrity(const std::map<const PrefixNode*, int64_t>& pins) const;

  static PrefixHash Hash(const PrefixHash& parent, std::span<const int32_t> tokens);

 private:
  struct HashOfHash {
    size_t operator()(const PrefixHash& hash) const { return static_cast<size_t>(hash.low); }
  };

  // The node with this hash if it is really that child; sets `collides` if it is another one.
  PrefixNode* Lookup(const PrefixHash& hash, const PrefixNode* parent,
                     std::span<const int32_t> tokens, bool* collides) const;
  PrefixNode* FindOrInsert(PrefixNode* parent, std::span<const int32_t> tokens);

  HashFunction hash_;
  std::unordered_map<PrefixHash, std::unique_ptr<PrefixNode>, HashOfHash> nodes_;
};

}  // namespace heddle
