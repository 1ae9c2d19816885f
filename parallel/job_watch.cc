#include "parallel/job_watch.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace heddle {
namespace {

// Ranks that finish leave within moments of each other, though a crowded machine may wake one late.
constexpr double kLeaveGraceSeconds = 2;
constexpr double kVagueGraceSeconds = 1.5;

}  // namespace

JobWatch::JobWatch(double timeout_seconds, bool sees_all_nodes, std::vector<std::string> rank_names,
                   std::vector<std::string> node_names)
    : timeout_seconds_(timeout_seconds),
      vague_timeout_seconds_(timeout_seconds + std::min(timeout_seconds, kVagueGraceSeconds)),
      sees_all_nodes_(sees_all_nodes),
      rank_names_(std::move(rank_names)),
      node_names_(std::move(node_names)),
      heartbeats_(rank_names_.size()),
      busy_progress_(rank_names_.size()),
      deserted_(rank_names_.size()),
      messages_(node_names_.size()) {}

absl::Status JobWatch::Observe(double elapsed_seconds, std::span<const RankSigns> ranks,
                               std::span<const NodeSigns> nodes) {
  uint64_t progress = 0;
  bool somebody_waits = false;
  const bool somebody_left = !Leaver(ranks, nodes).empty();
  for (size_t i = 0; i < ranks.size(); ++i) {
    const RankSigns& rank = ranks[i];
    heartbeats_[i].Look(rank.heartbeat, elapsed_seconds);
    busy_progress_[i].Look(rank.progress, elapsed_seconds);
    deserted_[i].Look(rank.progress, elapsed_seconds);
    const bool busy = !rank.waiting && !rank.idle && !rank.left;
    if (!busy) busy_progress_[i].seconds = 0;
    if (busy || rank.left || !somebody_left) deserted_[i].seconds = 0;
    progress += rank.progress;
    somebody_waits |= rank.waiting && !rank.left;
  }
  for (size_t i = 0; i < nodes.size(); ++i) {
    messages_[i].Look(nodes[i].num_messages, elapsed_seconds);
    progress += nodes[i].progress;
    somebody_waits |= nodes[i].waiting;
  }
  job_.Look(progress, elapsed_seconds);
  if (!somebody_waits) job_.seconds = 0;

  const absl::Status status = CheckRanks(ranks, nodes);
  return status.ok() ? CheckJob(ranks, nodes) : status;
}

std::string JobWatch::Leaver(std::span<const RankSigns> ranks,
                             std::span<const NodeSigns> nodes) const {
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i].left) return rank_names_[i];
  }
  for (const NodeSigns& node : nodes) {
    if (node.left_rank >= 0) return absl::StrCat("rank ", node.left_rank);
  }
  return "";
}

// A single rank or node that is at fault. These come first: who waits for it is not.
absl::Status JobWatch::CheckRanks(std::span<const RankSigns> ranks,
                                  std::span<const NodeSigns> nodes) const {
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i].left) continue;
    if (ranks[i].dead) {
      return absl::UnavailableError(absl::StrCat(rank_names_[i], " has died"));
    }
    if (heartbeats_[i].seconds > timeout_seconds_ && ranks[i].heartbeat == 0) {
      return absl::DeadlineExceededError(absl::StrFormat("%s has not joined the job within %.1f s",
                                                         rank_names_[i], heartbeats_[i].seconds));
    }
    if (heartbeats_[i].seconds > timeout_seconds_) {
      return absl::DeadlineExceededError(
          absl::StrFormat("%s has shown no sign of life for %.1f s: its process is stopped",
                          rank_names_[i], heartbeats_[i].seconds));
    }
    if (busy_progress_[i].seconds > timeout_seconds_) {
      return absl::DeadlineExceededError(
          absl::StrFormat("%s has made no progress for %.1f s (--distributed-timeout-seconds)",
                          rank_names_[i], busy_progress_[i].seconds));
    }
  }
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (!nodes[i].all_left && messages_[i].seconds > vague_timeout_seconds_) {
      return absl::DeadlineExceededError(
          absl::StrFormat("%s has not been heard of for %.1f s: its first rank is stopped, or the "
                          "network between the nodes is broken",
                          node_names_[i], messages_[i].seconds));
    }
  }
  return absl::OkStatus();
}

// Nobody is at fault alone, but the ranks wait for what will not come.
absl::Status JobWatch::CheckJob(std::span<const RankSigns> ranks,
                                std::span<const NodeSigns> nodes) const {
  for (const Stillness& deserted : deserted_) {
    if (deserted.seconds <= kLeaveGraceSeconds) continue;
    return absl::UnavailableError(
        absl::StrCat(Leaver(ranks, nodes), " has left the job, but ", DescribeWaits(ranks, nodes)));
  }
  if (sees_all_nodes_ && job_.seconds > vague_timeout_seconds_) {
    return absl::DeadlineExceededError(absl::StrFormat(
        "no rank has made progress for %.1f s; the ranks do not agree on what comes next: %s",
        job_.seconds, DescribeWaits(ranks, nodes)));
  }
  return absl::OkStatus();
}

std::string JobWatch::DescribeWaits(std::span<const RankSigns> ranks,
                                    std::span<const NodeSigns> nodes) const {
  std::vector<std::string> waits;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i].left) continue;
    if (ranks[i].waiting) {
      waits.push_back(absl::StrCat(
          rank_names_[i], " waits in ", WaitOpName(ranks[i].wait_op),
          ranks[i].wait_peer >= 0 ? absl::StrCat(" for rank ", ranks[i].wait_peer) : ""));
    } else {
      waits.push_back(absl::StrCat(rank_names_[i], ranks[i].idle ? " is idle" : " computes"));
    }
  }
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (nodes[i].waiting) waits.push_back(absl::StrCat(node_names_[i], " waits"));
  }
  return absl::StrJoin(waits, "; ");
}

}  // namespace heddle
