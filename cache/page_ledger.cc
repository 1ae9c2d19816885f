#include "cache/page_ledger.h"

#include <algorithm>
#include <limits>
#include <map>

#include "absl/strings/str_cat.h"
#include "kernels/base/ceil_div.h"
#include "kernels/base/logging.h"

namespace heddle {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// A window of w positions that starts on a page's last token touches the most pages.
int64_t MaxVisiblePages(const PageLedgerOptions& options) {
  if (options.window == 0) return kUnlimited;
  return CeilDiv(options.window - 1, options.page_size) + 1;
}

absl::Status DuplicateError(SequenceId id) {
  return absl::AlreadyExistsError(absl::StrCat("sequence ", id, " already holds pages"));
}

absl::Status ShortageError(int64_t needed, int64_t available) {
  return absl::ResourceExhaustedError(
      absl::StrCat(needed, " more pages are needed and ", available, " available"));
}

}  // namespace

absl::Status PageLedger::Validate(const PageLedgerOptions& options) {
  const auto at_least = [](const char* name, int64_t value, int64_t minimum) {
    return value >= minimum ? absl::OkStatus()
                            : absl::InvalidArgumentError(absl::StrCat(
                                  name, " is ", value, "; it must be at least ", minimum));
  };
  absl::Status status = at_least("page size", options.page_size, 1);
  status.Update(at_least("number of stripes", options.num_stripes, 1));
  status.Update(at_least("number of pages per stripe", options.pages_per_stripe, 1));
  status.Update(at_least("attention window", options.window, 0));
  if (!status.ok()) return status;
  // A slot is an int32, and so is a position inside a page.
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  for (const int64_t value : {options.page_size, options.num_stripes, options.pages_per_stripe}) {
    if (value > kMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("page size ", options.page_size, ", stripes ", options.num_stripes,
                       " and pages ", options.pages_per_stripe, " must each be at most ", kMax));
    }
  }
  return absl::OkStatus();
}

PageLedger::PageLedger(const PageLedgerOptions& options)
    : options_(options), max_visible_pages_(MaxVisiblePages(options)), index_(options.prefix_hash) {
  CHECK_OK(Validate(options));
  num_available_ = options.num_stripes * options.pages_per_stripe;
  pages_.resize(num_available_);
  stripes_.resize(options.num_stripes);
  for (int64_t page = num_pages() - 1; page >= 0; --page) {  // slot 0 on top of the stack
    stripes_[page / options.pages_per_stripe].free.push_back(page);
  }
}

absl::StatusOr<int64_t> PageLedger::Admit(SequenceId id, std::span<const int32_t> tokens,
                                          int64_t num_tokens, const PrefixUse& use) {
  CHECK(!tokens.empty());
  if (Contains(id)) return DuplicateError(id);
  absl::StatusOr<Sequence> sequence = Start(tokens, num_tokens, use);
  if (!sequence.ok() && options_.one_stripe_per_sequence && use.reuse) {
    sequence = Start(tokens, num_tokens, {.reuse = false, .salt = use.salt});
  }
  if (!sequence.ok()) return sequence.status();
  const int64_t num_shared = sequence->num_committed;
  sequences_.emplace(id, *std::move(sequence));
  return num_shared;
}

absl::StatusOr<PageLedger::Sequence> PageLedger::Start(std::span<const int32_t> tokens,
                                                       int64_t num_tokens, const PrefixUse& use) {
  Sequence sequence;
  PrefixHit hit;
  if (options_.enable_prefix_caching) {
    sequence.cursor = index_.PinRoot({options_.model_id, options_.kv_dtype, use.salt});
    if (use.reuse && sequence.cursor) hit = FindPrefix(sequence.cursor, tokens);
  }

  // What the hit shares comes first: its pages must not be evicted to make room for the rest.
  const int64_t num_shared = hit.num_pages * options_.page_size;
  PageTable& table = sequence.table;
  table.first_page = FirstVisiblePage(num_shared);
  const PrefixNode* node = hit.node;
  for (int64_t page = hit.num_pages; page > table.first_page; --page) {
    Hold(node->page);
    table.pages.push_back(LocationOf(node->page));
    node = node->parent;
  }
  std::ranges::reverse(table.pages);
  if (hit.num_pages > 0) {
    index_.Pin(hit.node);
    index_.Unpin(sequence.cursor);
    sequence.cursor = hit.node;
    sequence.num_indexed = hit.num_pages;
    sequence.num_committed = num_shared;
  }
  if (options_.one_stripe_per_sequence) {
    sequence.home =
        table.pages.empty() ? EmptiestStripe(options_.num_stripes - 1) : table.pages.front().stripe;
  }

  const int64_t end_page = StartEndPage(table.first_page, num_tokens);
  const int64_t num_needed = end_page - table.end_page();
  const int64_t num_available = NumAvailableTo(sequence.home);
  if (num_needed > num_available) {
    LetGoAll(sequence);
    return ShortageError(num_needed, num_available);
  }
  Grow(sequence, end_page);
  return sequence;
}

absl::StatusOr<std::optional<PageCopy>> PageLedger::Fork(SequenceId parent, SequenceId child,
                                                         int64_t num_shared_tokens,
                                                         int64_t num_tokens) {
  if (Contains(child)) return DuplicateError(child);
  const Sequence& source = sequences_.at(parent);
  CHECK_LE(num_shared_tokens, source.num_committed);
  CHECK_LE(num_shared_tokens, num_tokens);
  Sequence sequence;
  sequence.home = source.home;
  sequence.table.first_page = FirstVisiblePage(num_shared_tokens);
  if (sequence.table.first_page < source.table.first_page) {
    return absl::FailedPreconditionError(
        absl::StrCat("page ", sequence.table.first_page, " has left the window of sequence ",
                     parent, ", whose first page is ", source.table.first_page));
  }
  const auto source_page = [&](int64_t page) {
    return source.table.pages[page - source.table.first_page];
  };
  const int64_t num_whole = num_shared_tokens / options_.page_size;
  const int64_t num_partial = num_shared_tokens % options_.page_size;
  const int64_t end_page = StartEndPage(sequence.table.first_page, num_tokens);
  const int64_t num_available = NumAvailableTo(source.home);
  if (end_page - num_whole > num_available) {
    return ShortageError(end_page - num_whole, num_available);
  }
  if (num_partial > 0 && stripes_[source_page(num_whole).stripe].num_available() == 0) {
    return ShortageError(1, 0);
  }

  for (int64_t page = sequence.table.first_page; page < num_whole; ++page) {
    Hold(IndexOf(source_page(page)));
    sequence.table.pages.push_back(source_page(page));
  }
  std::optional<PageCopy> copy;
  if (num_partial > 0) {
    const int64_t target = TakePage(source_page(num_whole).stripe);
    copy = PageCopy{source_page(num_whole), LocationOf(target)};
    sequence.table.pages.push_back(copy->target);
    SetFilled(pages_[target], num_partial);
  }
  Grow(sequence, end_page);
  sequence.num_committed = num_shared_tokens;
  if (source.cursor) {
    sequence.cursor = source.cursor;
    for (int64_t page = source.num_indexed; page > num_whole; --page) {
      sequence.cursor = sequence.cursor->parent;
    }
    sequence.num_indexed = num_whole;
    index_.Pin(sequence.cursor);
  }
  sequences_.emplace(child, std::move(sequence));
  return copy;
}

bool PageLedger::Reserve(SequenceId id, int64_t num_tokens) {
  Sequence& sequence = sequences_.at(id);
  const int64_t end_page = CeilDiv(num_tokens, options_.page_size);
  if (end_page - sequence.table.end_page() > NumAvailableTo(sequence.home)) return false;
  Grow(sequence, end_page);
  return true;
}

int64_t PageLedger::ReservableTokens(SequenceId id) const {
  const Sequence& sequence = sequences_.at(id);
  return (sequence.table.end_page() + NumAvailableTo(sequence.home)) * options_.page_size;
}

void PageLedger::Commit(SequenceId id, std::span<const int32_t> tokens, int64_t num_computed) {
  Sequence& sequence = sequences_.at(id);
  const PageTable& table = sequence.table;
  CHECK_LE(sequence.num_committed, num_computed);
  CHECK_LE(num_computed, static_cast<int64_t>(tokens.size()));
  CHECK_LE(CeilDiv(num_computed, options_.page_size), table.end_page());
  for (int64_t page = sequence.num_committed / options_.page_size;
       page * options_.page_size < num_computed; ++page) {
    Page& written = pages_[IndexOf(table.pages[page - table.first_page])];
    CHECK(written.num_holders == 1 && !written.node) << "a shared page was written";
    SetFilled(written, std::min(num_computed - page * options_.page_size, options_.page_size));
  }
  sequence.num_committed = num_computed;
  Index(sequence, tokens);
  DropInvisiblePages(sequence);
}

void PageLedger::Release(SequenceId id) {
  const auto found = sequences_.find(id);
  CHECK(found != sequences_.end()) << "sequence " << id;
  LetGoAll(found->second);
  sequences_.erase(found);
}

const PageTable& PageLedger::table(SequenceId id) const { return sequences_.at(id).table; }

int64_t PageLedger::CapacityTokens() const {
  const int64_t most = options_.one_stripe_per_sequence ? options_.pages_per_stripe : num_pages();
  return most >= max_visible_pages_ ? kUnlimited : most * options_.page_size;
}

double PageLedger::Waste() const {
  if (num_filled_pages_ == 0) return 0.0;
  return 1.0 - static_cast<double>(num_filled_tokens_) /
                   static_cast<double>(num_filled_pages_ * options_.page_size);
}

PageLocation PageLedger::LocationOf(int64_t page) const {
  return {static_cast<int32_t>(page / options_.pages_per_stripe),
          static_cast<int32_t>(page % options_.pages_per_stripe)};
}

int64_t PageLedger::FirstVisiblePage(int64_t position) const {
  if (options_.window == 0) return 0;
  return std::max<int64_t>(0, position - options_.window + 1) / options_.page_size;
}

int64_t PageLedger::StartEndPage(int64_t first_page, int64_t num_tokens) const {
  return first_page +
         std::min(CeilDiv(num_tokens, options_.page_size) - first_page, max_visible_pages_);
}

PageLedger::PrefixHit PageLedger::FindPrefix(PrefixNode* root,
                                             std::span<const int32_t> tokens) const {
  const int64_t max_pages = (static_cast<int64_t>(tokens.size()) - 1) / options_.page_size;
  PrefixHit hit;
  PrefixNode* node = root;
  // Of the unbroken run of pages that ends here: on each stripe, or on all together.
  std::vector<int64_t> first_present(options_.one_stripe_per_sequence ? options_.num_stripes : 1);
  for (int64_t page = 0; page < max_pages; ++page) {
    node = index_.Find(node, tokens.subspan(page * options_.page_size, options_.page_size));
    if (!node) break;
    const int64_t first_seen = FirstVisiblePage((page + 1) * options_.page_size);
    for (size_t run = 0; run < first_present.size(); ++run) {
      const bool present =
          node->page != -1 && (!options_.one_stripe_per_sequence ||
                               LocationOf(node->page).stripe == static_cast<int32_t>(run));
      if (!present) first_present[run] = page + 1;
      if (first_present[run] <= first_seen) hit = {node, page + 1};
    }
  }
  return hit;
}

void PageLedger::Hold(int64_t index) {
  Page& page = pages_[index];
  if (++page.num_holders > 1) return;
  stripes_[LocationOf(index).stripe].evictable.erase(page.evictable_pos);
  --num_available_;
  CountLive(page, +1);
}

void PageLedger::LetGo(int64_t index) {
  Page& page = pages_[index];
  CHECK(page.num_holders > 0) << "page " << index << " let go twice";
  if (--page.num_holders > 0) return;
  Stripe& stripe = stripes_[LocationOf(index).stripe];
  CountLive(page, -1);
  ++num_available_;
  if (page.node) {
    page.evictable_pos = stripe.evictable.insert(stripe.evictable.end(), index);
  } else {
    stripe.free.push_back(index);
  }
}

void PageLedger::CountLive(const Page& page, int sign) {
  num_filled_pages_ += page.num_filled > 0 ? sign : 0;
  num_filled_tokens_ += int64_t{sign} * page.num_filled;
}

void PageLedger::SetFilled(Page& page, int64_t num_filled) {
  CountLive(page, -1);
  page.num_filled = static_cast<int32_t>(num_filled);
  CountLive(page, +1);
}

int64_t PageLedger::TakePage(int64_t stripe_index) {
  Stripe& stripe = stripes_[stripe_index];
  CHECK(stripe.num_available() > 0);
  int64_t index;
  if (!stripe.free.empty()) {
    index = stripe.free.back();
    stripe.free.pop_back();
  } else {
    index = stripe.evictable.front();
    stripe.evictable.pop_front();
    index_.ClearPage(pages_[index].node);
  }
  pages_[index] = Page();
  pages_[index].num_holders = 1;
  --num_available_;
  return index;
}

int64_t PageLedger::NumAvailableTo(int64_t home) const {
  return options_.one_stripe_per_sequence ? stripes_[home].num_available() : num_available_;
}

int64_t PageLedger::EmptiestStripe(int64_t previous) const {
  int64_t best = (previous + 1) % options_.num_stripes;
  for (int64_t step = 2; step <= options_.num_stripes; ++step) {
    const int64_t stripe = (previous + step) % options_.num_stripes;
    if (stripes_[stripe].num_available() > stripes_[best].num_available()) best = stripe;
  }
  return best;
}

void PageLedger::Grow(Sequence& sequence, int64_t end_page) {
  PageTable& table = sequence.table;
  int64_t previous = table.pages.empty() ? options_.num_stripes - 1 : table.pages.back().stripe;
  while (table.end_page() < end_page) {
    const int64_t stripe =
        options_.one_stripe_per_sequence ? sequence.home : EmptiestStripe(previous);
    table.pages.push_back(LocationOf(TakePage(stripe)));
    previous = stripe;
  }
}

void PageLedger::Index(Sequence& sequence, std::span<const int32_t> tokens) {
  const int64_t num_whole = sequence.num_committed / options_.page_size;
  while (sequence.cursor && sequence.num_indexed < num_whole) {
    const int64_t page = sequence.num_indexed++;
    sequence.cursor = index_.Advance(sequence.cursor,
                                     tokens.subspan(page * options_.page_size, options_.page_size));
    // If another page already stands for these tokens, this one stays unknown.
    if (!sequence.cursor || sequence.cursor->page != -1) continue;
    const int64_t index = IndexOf(sequence.table.pages[page - sequence.table.first_page]);
    index_.SetPage(sequence.cursor, index);
    pages_[index].node = sequence.cursor;
  }
}

void PageLedger::DropInvisiblePages(Sequence& sequence) {
  PageTable& table = sequence.table;
  const int64_t first = FirstVisiblePage(sequence.num_committed);
  if (first <= table.first_page) return;
  const auto end = table.pages.begin() + (first - table.first_page);
  for (auto page = table.pages.begin(); page != end; ++page) LetGo(IndexOf(*page));
  table.pages.erase(table.pages.begin(), end);
  table.first_page = first;
}

void PageLedger::LetGoAll(Sequence& sequence) {
  // From the end, so that of two pages let go together the later one is evicted first.
  for (auto page = sequence.table.pages.rbegin(); page != sequence.table.pages.rend(); ++page) {
    LetGo(IndexOf(*page));
  }
  sequence.table.pages.clear();
  if (sequence.cursor) index_.Unpin(sequence.cursor);
  sequence.cursor = nullptr;
}

absl::Status PageLedger::CheckIntegrity() const {
  std::vector<int64_t> holders(pages_.size(), 0);
  std::map<const PrefixNode*, int64_t> pins;
  for (const auto& [id, sequence] : sequences_) {
    for (const PageLocation& location : sequence.table.pages) {
      ++holders[IndexOf(location)];
      if (options_.one_stripe_per_sequence && location.stripe != sequence.home) {
        return absl::InternalError(absl::StrCat("sequence ", id, " of stripe ", sequence.home,
                                                " has a page on stripe ", location.stripe));
      }
    }
    if (sequence.cursor) ++pins[sequence.cursor];
  }
  enum : uint8_t { kLive, kFree, kEvictable };
  std::vector<uint8_t> state(pages_.size(), kLive);
  const auto mark = [&](int64_t index, int64_t stripe, uint8_t as) {
    const bool first_time = state[index] == kLive;
    state[index] = as;
    return first_time && LocationOf(index).stripe == stripe;
  };
  int64_t num_available = 0;
  for (int64_t i = 0; i < options_.num_stripes; ++i) {
    num_available += stripes_[i].num_available();
    for (const int64_t index : stripes_[i].free) {
      if (!mark(index, i, kFree)) {
        return absl::InternalError(absl::StrCat("page ", index, " is free twice"));
      }
    }
    for (const int64_t index : stripes_[i].evictable) {
      if (!mark(index, i, kEvictable)) {
        return absl::InternalError(absl::StrCat("page ", index, " is evictable and free"));
      }
    }
  }
  int64_t num_live = 0;
  int64_t filled_pages = 0;
  int64_t filled_tokens = 0;
  for (int64_t index = 0; index < num_pages(); ++index) {
    const Page& page = pages_[index];
    const bool live = state[index] == kLive;
    if (page.num_holders != holders[index] || live != (holders[index] > 0)) {
      return absl::InternalError(absl::StrCat("page ", index, live ? " is live" : " is not live",
                                              ", counts ", page.num_holders, " holders and has ",
                                              holders[index]));
    }
    if (page.node ? page.node->page != index : state[index] == kEvictable) {
      return absl::InternalError(absl::StrCat("page ", index, " and the prefix index disagree"));
    }
    if (page.node && (state[index] == kFree || page.num_filled != options_.page_size)) {
      return absl::InternalError(absl::StrCat("page ", index, " is indexed with ", page.num_filled,
                                              " tokens, or while free"));
    }
    num_live += live;
    filled_pages += live && page.num_filled > 0;
    filled_tokens += live ? page.num_filled : 0;
  }
  if (num_available != num_available_ || num_live + num_available != num_pages()) {
    return absl::InternalError(absl::StrCat(num_live, " live and ", num_available,
                                            " available pages of ", num_pages(), "; counted ",
                                            num_available_, " available"));
  }
  if (filled_pages != num_filled_pages_ || filled_tokens != num_filled_tokens_) {
    return absl::InternalError(absl::StrCat(filled_tokens, " tokens in ", filled_pages,
                                            " pages, counted ", num_filled_tokens_, " in ",
                                            num_filled_pages_));
  }
  return index_.CheckIntegrity(pins);
}

}  // namespace heddle
