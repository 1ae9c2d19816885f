// Accounts for the pages of all ranks by id; it knows no bytes.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache/page_table.h"
#include "cache/prefix_index.h"
#include "kernels/base/dtype.h"

namespace heddle {

using SequenceId = uint64_t;

struct PageLedgerOptions {
  int64_t page_size = 16;  // tokens
  int64_t num_stripes = 1;
  int64_t pages_per_stripe = 0;
  // All pages of a sequence are on one stripe, its home: that of the prefix it shares or, without
  // one, the stripe with the fewest live pages. A hit is given up, not waited for, where its stripe
  // lacks room and another has it. Else pages go to the stripe with the most to give.
  bool one_stripe_per_sequence = false;
  // Positions a token sees, itself included; 0: all. Of the layer that sees most.
  int64_t window = 0;
  bool enable_prefix_caching = false;
  std::string model_id;  // with the dtype, part of every prefix key
  DType kv_dtype = DType::kFloat32;
  PrefixIndex::HashFunction prefix_hash = &PrefixIndex::Hash;
};

// How one sequence meets the prefix cache.
struct PrefixUse {
  bool reuse = true;  // false: compute every position (prompt log-probabilities)
  std::string salt;
};

// A page whose contents must be copied before the step writes anything.
struct PageCopy {
  PageLocation source;
  PageLocation target;
};

// Owned by rank 0's scheduler and used from its thread; workers mirror the tables. A page is free,
// live (held by sequences, counted) or evictable (held by none, contents kept for the prefix
// index). Invariants: on every stripe free + live + evictable = total; a page that a sequence may
// still write is held by that sequence alone and is not indexed; evictable pages go in order of
// last use and, within a sequence, from its end.
class PageLedger {
 public:
  // InvalidArgument names the option and its value.
  static absl::Status Validate(const PageLedgerOptions& options);
  // The options must be valid.
  explicit PageLedger(const PageLedgerOptions& options);

  // Starts a sequence: shares the pages of its longest known prefix (at most
  // (tokens - 1) / page_size: the last token is always computed; on one stripe, if that is asked
  // for) and reserves room for num_tokens; with a window, for no more than one token can see. All
  // or nothing. Returns the number of shared tokens; AlreadyExists; ResourceExhausted.
  absl::StatusOr<int64_t> Admit(SequenceId id, std::span<const int32_t> tokens, int64_t num_tokens,
                                const PrefixUse& use = {});
  // Starts `child` with the first num_shared_tokens of `parent`, all committed, and room for
  // num_tokens. Whole pages are shared. Both go on to write behind a shared partial page, so the
  // child gets a copy of it at once, on the same stripe; nullopt when there is none to copy. All
  // or nothing: AlreadyExists; ResourceExhausted; FailedPrecondition when pages the child must
  // see have left the parent's window.
  absl::StatusOr<std::optional<PageCopy>> Fork(SequenceId parent, SequenceId child,
                                               int64_t num_shared_tokens, int64_t num_tokens);
  // Grows the table to num_tokens positions. All or nothing; false if the pages are not there.
  bool Reserve(SequenceId id, int64_t num_tokens);
  // The most that Reserve would grant now.
  int64_t ReservableTokens(SequenceId id) const;
  // The first num_computed of `tokens` are stored: whole pages enter the prefix index, pages that
  // no later token sees are let go.
  void Commit(SequenceId id, std::span<const int32_t> tokens, int64_t num_computed);
  // Ends a sequence, at whatever point it is.
  void Release(SequenceId id);

  bool Contains(SequenceId id) const { return sequences_.contains(id); }
  const PageTable& table(SequenceId id) const;
  // Sequences compete for pages within a pool: a stripe each with one_stripe_per_sequence, else one
  // for all.
  int64_t PoolOf(SequenceId id) const { return sequences_.at(id).home; }
  const PageLedgerOptions& options() const { return options_; }

  int64_t num_pages() const { return static_cast<int64_t>(pages_.size()); }
  // Free or evictable.
  int64_t num_available_pages() const { return num_available_; }
  int64_t num_live_pages() const { return num_pages() - num_available_; }
  // The longest sequence that fits when it is alone; INT64_MAX if the window always fits.
  int64_t CapacityTokens() const;
  // Empty token slots over all token slots of the live pages that hold at least one token.
  double Waste() const;

  // Internal, with what is wrong, if any invariant is broken.
  absl::Status CheckIntegrity() const;

 private:
  struct Page {
    int32_t num_holders = 0;
    int32_t num_filled = 0;                      // tokens stored
    PrefixNode* node = nullptr;                  // set while indexed
    std::list<int64_t>::iterator evictable_pos;  // valid while evictable
  };
  struct Stripe {
    std::vector<int64_t> free;     // a stack
    std::list<int64_t> evictable;  // oldest first
    int64_t num_available() const { return static_cast<int64_t>(free.size() + evictable.size()); }
  };
  struct Sequence {
    PageTable table;
    int64_t home = 0;  // its stripe, if it has one
    int64_t num_committed = 0;
    // Node of the last indexed page (of the key before the first), pinned; null: not indexed.
    PrefixNode* cursor = nullptr;
    int64_t num_indexed = 0;  // pages
  };
  struct PrefixHit {
    PrefixNode* node = nullptr;  // of the last page of the hit
    int64_t num_pages = 0;
  };

  int64_t IndexOf(PageLocation location) const {
    return location.stripe * options_.pages_per_stripe + location.slot;
  }
  PageLocation LocationOf(int64_t page) const;
  // The first page that a token at `position` sees.
  int64_t FirstVisiblePage(int64_t position) const;
  // One past the last page to reserve for a sequence that starts with num_tokens.
  int64_t StartEndPage(int64_t first_page, int64_t num_tokens) const;
  PrefixHit FindPrefix(PrefixNode* root, std::span<const int32_t> tokens) const;
  // What Admit starts.
  absl::StatusOr<Sequence> Start(std::span<const int32_t> tokens, int64_t num_tokens,
                                 const PrefixUse& use);

  void Hold(int64_t page);
  void LetGo(int64_t page);
  // Adds a live page to the counts of filled pages and tokens, or takes it off.
  void CountLive(const Page& page, int sign);
  void SetFilled(Page& page, int64_t num_filled);
  // To a sequence with that home.
  int64_t NumAvailableTo(int64_t home) const;
  // Ties go to the one that follows `previous` first.
  int64_t EmptiestStripe(int64_t previous) const;
  // From that stripe, which must have one available.
  int64_t TakePage(int64_t stripe);
  // Appends pages until the table ends at end_page; they must be available.
  void Grow(Sequence& sequence, int64_t end_page);
  void Index(Sequence& sequence, std::span<const int32_t> tokens);
  void DropInvisiblePages(Sequence& sequence);
  void LetGoAll(Sequence& sequence);

  const PageLedgerOptions options_;
  // The most pages that one token sees; INT64_MAX without a window.
  const int64_t max_visible_pages_;
  std::vector<Page> pages_;  // by IndexOf
  std::vector<Stripe> stripes_;
  int64_t num_available_ = 0;
  // Of the live pages: those with a token, and their tokens.
  int64_t num_filled_pages_ = 0;
  int64_t num_filled_tokens_ = 0;
  PrefixIndex index_;
  std::unordered_map<SequenceId, Sequence> sequences_;
};

}  // namespace heddle
