// One function a subcommand; each runs on rank 0 and gives the process's exit code.
#pragma once

#include <functional>

#include "absl/status/statusor.h"
#include "launch/command_line.h"
#include "parallel/world.h"

namespace heddle {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;  // something broke while running
inline constexpr int kExitRefused = 2;  // usage, or input that cannot be used

// A command that drives an engine over all ranks. Preparing it checks and reads what it can before
// the engine costs anything; running it starts the engine, while the other ranks are in ServeRank.
using EngineCommand = std::function<absl::StatusOr<int>(World& world)>;
absl::StatusOr<EngineCommand> PrepareGenerate(const CommandLine& line);
absl::StatusOr<EngineCommand> PrepareScore(const CommandLine& line);
absl::StatusOr<EngineCommand> PrepareBenchThroughput(const CommandLine& line);
absl::StatusOr<EngineCommand> PrepareBenchLatency(const CommandLine& line);
// On every rank, since it runs an engine for each placement; so its EngineCommand serves the
// others.
absl::StatusOr<EngineCommand> PrepareBenchBatch(const CommandLine& line, const RankInfo& self);

// Need no ranks.
absl::StatusOr<int> RunInspect(const CommandLine& line);
absl::StatusOr<int> RunPlan(const CommandLine& line);
absl::StatusOr<int> RunDoctor();

}  // namespace heddle
