#include "cache/prefix_index.h"

#include <map>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heddle {
namespace {

using Page = std::vector<int32_t>;

// Keeps a chain of pages known, as a ledger would: the pages hold the nodes.
PrefixNode* Store(PrefixIndex& index, const PrefixKey& key, const std::vector<Page>& pages,
                  int64_t first_page = 0) {
  PrefixNode* node = index.PinRoot(key);
  for (const Page& page : pages) {
    node = index.Advance(node, page);
    if (!node) return nullptr;
    if (node->page == -1) index.SetPage(node, first_page++);
  }
  index.Unpin(node);
  return node;
}

// The number of leading pages that the index knows.
int64_t NumKnown(PrefixIndex& index, const PrefixKey& key, const std::vector<Page>& pages) {
  PrefixNode* root = index.PinRoot(key);
  const PrefixNode* node = root;
  int64_t num_known = 0;
  for (const Page& page : pages) {
    node = index.Find(node, page);
    if (!node) break;
    ++num_known;
  }
  index.Unpin(root);
  return num_known;
}

TEST(PrefixIndexTest, EverythingThatChangesTheContentsIsPartOfTheKey) {
  const PrefixKey key = {.model_id = "m", .dtype = DType::kFloat32, .salt = "s"};
  const std::vector<Page> pages = {{1, 2}, {3, 4}};
  PrefixIndex index;
  Store(index, key, pages);
  EXPECT_EQ(NumKnown(index, key, pages), 2);
  EXPECT_EQ(NumKnown(index, {"m2", DType::kFloat32, "s"}, pages), 0);
  EXPECT_EQ(NumKnown(index, {"m", DType::kBFloat16, "s"}, pages), 0);
  EXPECT_EQ(NumKnown(index, {"m", DType::kFloat32, ""}, pages), 0);
  EXPECT_EQ(NumKnown(index, {"m", DType::kFloat32, "S"}, pages), 0);
  // The fields do not run into each other.
  EXPECT_EQ(NumKnown(index, {"", DType::kFloat32, "m:float32:s"}, pages), 0);
  // Same tokens, other parent; same parent, other tokens.
  EXPECT_EQ(NumKnown(index, key, {{3, 4}}), 0);
  EXPECT_EQ(NumKnown(index, key, {{1, 2}, {3, 5}}), 1);
  EXPECT_EQ(NumKnown(index, key, {{1, 2}, {1, 2}}), 1);
}

TEST(PrefixIndexTest, ANodeLivesWhileSomethingHoldsIt) {
  PrefixIndex index;
  const PrefixKey key;
  Store(index, key, {{1}, {2}, {3}}, 0);
  EXPECT_EQ(index.num_nodes(), 4);
  PrefixNode* root = index.PinRoot(key);
  PrefixNode* first = index.Find(root, Page{1});
  PrefixNode* second = index.Find(first, Page{2});
  PrefixNode* third = index.Find(second, Page{3});
  index.Unpin(root);
  // A page in the middle goes: its node keeps the place of the third.
  index.ClearPage(second);
  EXPECT_EQ(index.num_nodes(), 4);
  EXPECT_EQ(second->page, -1);
  EXPECT_TRUE(index.CheckIntegrity({}).ok());
  index.ClearPage(third);
  EXPECT_EQ(index.num_nodes(), 2);
  index.ClearPage(first);
  EXPECT_EQ(index.num_nodes(), 0);
}

TEST(PrefixIndexTest, IntegrityNamesAHoldThatNobodyHas) {
  PrefixIndex index;
  PrefixNode* root = index.PinRoot({});
  EXPECT_FALSE(index.CheckIntegrity({}).ok());
  EXPECT_TRUE(index.CheckIntegrity({{root, 1}}).ok());
  EXPECT_THAT(std::string(index.CheckIntegrity({{root, 2}}).message()),
              testing::HasSubstr("counts 1 holds instead of 2"));
}

PrefixHash OneForAll(const PrefixHash&, std::span<const int32_t>) { return {7, 7}; }

TEST(PrefixIndexTest, WithOneHashForAllNothingWrongIsFound) {
  PrefixIndex index(&OneForAll);
  PrefixNode* root = index.PinRoot({});
  ASSERT_NE(root, nullptr);
  EXPECT_EQ(index.PinRoot({"other", DType::kFloat32, ""}), nullptr);
  EXPECT_EQ(index.Find(root, Page{1}), nullptr);
  EXPECT_EQ(index.Advance(root, Page{1}), nullptr);  // which drops the pin
  EXPECT_EQ(index.num_nodes(), 0);
}

PrefixHash TwoBits(const PrefixHash& parent, std::span<const int32_t> tokens) {
  return {PrefixIndex::Hash(parent, tokens).low % 4, 0};
}

TEST(PrefixIndexTest, StoredTokensDecideWhereHashesCollide) {
  PrefixIndex index(&TwoBits);
  std::mt19937_64 random(3);
  const PrefixKey key;
  std::map<std::vector<Page>, int64_t> stored;
  std::vector<PrefixNode*> nodes;
  int64_t num_found = 0;
  for (int64_t round = 0; round < 3000; ++round) {
    std::vector<Page> pages(1 + random() % 3);
    for (Page& page : pages) page = {static_cast<int32_t>(random() % 3)};
    // A node that the walk ends on was stored for exactly these pages.
    PrefixNode* root = index.PinRoot(key);
    if (root) {
      const PrefixNode* node = root;
      std::vector<Page> walked;
      for (const Page& page : pages) {
        node = index.Find(node, page);
        if (!node) break;
        walked.push_back(page);
        if (node->page == -1) continue;
        ASSERT_TRUE(stored.contains(walked));
        EXPECT_EQ(stored.at(walked), node->page);
        ++num_found;
      }
      node = nullptr;
      PrefixNode* end = root;
      for (size_t i = 0; i < pages.size() && end; ++i) end = index.Advance(end, pages[i]);
      if (end && end->page == -1) {
        index.SetPage(end, round);
        stored[pages] = round;
        nodes.push_back(end);
      }
      if (end) index.Unpin(end);
    }
    if (!nodes.empty() && random() % 2) {  // evict
      const size_t victim = random() % nodes.size();
      index.ClearPage(nodes[victim]);
      nodes.erase(nodes.begin() + static_cast<int64_t>(victim));
    }
  }
  EXPECT_GT(num_found, 100);
}

}  // namespace
}  // namespace heddle
