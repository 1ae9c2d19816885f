#include "runtime/memory_share.h"

#include <algorithm>
#include <fstream>
#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"

namespace heddle {
namespace {

constexpr double kDefaultCacheBytes = 4.0 * (1 << 30);
constexpr double kDefaultUtilization = 0.9;

// The number behind `key` in a file of such pairs; behind nothing if `key` is empty.
std::optional<int64_t> ReadNumber(const std::string& path, absl::string_view key = "") {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
    const size_t place = key.empty() ? 0 : 1;
    int64_t number = 0;
    if (words.size() <= place || (place == 1 && words[0] != key)) continue;
    if (absl::SimpleAtoi(words[place], &number)) return number;
  }
  return std::nullopt;
}

// The files of one kind of control group.
struct GroupFiles {
  const char* mount;
  const char* limit;
  const char* usage;
  const char* cached_key;  // in memory.stat: file pages that would go first
};
constexpr GroupFiles kVersion1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes",
                                  "memory.usage_in_bytes", "total_inactive_file"};
constexpr GroupFiles kVersion2 = {"/sys/fs/cgroup", "memory.max", "memory.current",
                                  "inactive_file"};

// What a group and those above it leave free.
int64_t RoomInGroup(const GroupFiles& files, const std::string& root, std::string path) {
  int64_t room = std::numeric_limits<int64_t>::max();
  while (true) {
    const std::string folder = absl::StrCat(root, files.mount, path, "/");
    const std::optional<int64_t> limit = ReadNumber(folder + files.limit);  // none: "max"
    const std::optional<int64_t> usage = ReadNumber(folder + files.usage);
    if (limit.has_value() && usage.has_value()) {
      const int64_t cached = ReadNumber(folder + "memory.stat", files.cached_key).value_or(0);
      room = std::min(room, std::max<int64_t>(*limit - *usage + cached, 0));
    }
    if (path.empty()) return room;
    path.resize(path.rfind('/'));
  }
}

int64_t RoomInControlGroups(const std::string& root) {
  int64_t room = std::numeric_limits<int64_t>::max();
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    // "4:memory:/path" of version 1, "0::/path" of version 2.
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3 || !absl::StartsWith(parts[2], "/")) continue;
    const std::string path = parts[2] == "/" ? "" : parts[2];
    if (parts[1].empty()) room = std::min(room, RoomInGroup(kVersion2, root, path));
    for (const absl::string_view controller : absl::StrSplit(parts[1], ',')) {
      if (controller == "memory") room = std::min(room, RoomInGroup(kVersion1, root, path));
    }
  }
  return room;
}

std::string Gibibytes(int64_t bytes) {
  return absl::StrFormat("%.2f GiB", static_cast<double>(bytes) / (int64_t{1} << 30));
}

}  // namespace

int64_t FreeMemory(const std::string& root) {
  const int64_t kibibytes = ReadNumber(root + "/proc/meminfo", "MemAvailable:").value_or(0);
  return std::min(kibibytes * 1024, RoomInControlGroups(root));
}

absl::StatusOr<int64_t> ChooseNumPages(const CacheBudget& budget, const CacheNeed& need) {
  if (need.bytes_per_page == 0) return budget.num_pages.value_or(need.whole_batch);

  const auto pages_in = [&need](double bytes) {
    return std::min(need.whole_batch, static_cast<int64_t>(bytes) / need.bytes_per_page);
  };
  const auto free_memory = static_cast<double>(need.free_memory);
  int64_t num_pages = 0;
  std::string source;
  if (budget.num_pages.has_value()) {
    num_pages = *budget.num_pages;
    source = absl::StrCat("--num-kv-pages ", num_pages);
  } else if (budget.memory_bytes.has_value()) {
    num_pages = pages_in(static_cast<double>(*budget.memory_bytes));
    source = absl::StrCat("--kv-cache-memory-bytes ", *budget.memory_bytes);
  } else if (budget.utilization.has_value()) {
    num_pages = pages_in(*budget.utilization * free_memory);
    source = absl::StrCat("--gpu-memory-utilization ", *budget.utilization);
  } else {
    const auto longest = static_cast<double>(need.longest_sequence * need.bytes_per_page);
    num_pages = pages_in(
        std::min(kDefaultUtilization * free_memory, std::max(kDefaultCacheBytes, longest)));
    source = "no memory for the cache";
  }
  if (num_pages >= 1 && num_pages <= need.free_memory / need.bytes_per_page) return num_pages;
  return absl::ResourceExhaustedError(absl::StrCat(source, ": a page takes ", need.bytes_per_page,
                                                   " bytes, and beside its weights a rank has ",
                                                   need.free_memory, " bytes free"));
}

std::string DescribeUnequalMemory(const std::vector<RankMemory>& ranks) {
  const auto [least, most] = std::minmax_element(
      ranks.begin(), ranks.end(),
      [](const RankMemory& a, const RankMemory& b) { return a.bytes < b.bytes; });
  if (ranks.empty() || least->bytes >= most->bytes / 2) return "";
  const auto name = [&ranks](auto rank) {
    return absl::StrCat("rank ", rank - ranks.begin(), " (", rank->host, ") may take ",
                        Gibibytes(rank->bytes));
  };
  return absl::StrCat("unequal memory: ", name(least), ", ", name(most),
                      "; the smallest share bounds the weights and the cache of all ranks");
}

absl::Status WarnOfUnequalMemory(int64_t own_bytes, World& world) {
  ASSIGN_OR_RETURN(const std::vector<std::string> gathered,
                   world.control->Gather(absl::StrCat(own_bytes, " ", world.self.host)));
  std::vector<RankMemory> ranks;  // on rank 0 alone
  for (const std::string& text : gathered) {
    const std::vector<std::string> parts = absl::StrSplit(text, absl::MaxSplits(' ', 1));
    RankMemory& rank = ranks.emplace_back();
    if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &rank.bytes)) {
      return absl::InternalError(absl::StrCat("free memory of a rank is garbled: ", text));
    }
    rank.host = parts[1];
  }
  const std::string warning = DescribeUnequalMemory(ranks);
  if (!warning.empty()) LOG(WARNING) << warning;
  return absl::OkStatus();
}

}  // namespace heddle
