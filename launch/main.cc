// The heddle program: finds its rank, parses its arguments, runs one command.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "launch/bootstrap.h"
#include "launch/command_line.h"
#include "launch/commands/commands.h"
#include "runtime/agreement.h"
#include "runtime/engine.h"

namespace heddle {
namespace {

// What only a world of a certain size can do.
absl::Status CheckParallelFlags(const ParallelFlags& flags, int world_size) {
  if (flags.tensor_parallel_size.has_value() && *flags.tensor_parallel_size != world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("--tensor-parallel-size ", *flags.tensor_parallel_size, " but this job has ",
                     world_size, " rank(s): start it with mpirun -np ", *flags.tensor_parallel_size,
                     ", or leave the flag out"));
  }
  if (!(flags.distributed_timeout_seconds > 0)) {
    return absl::InvalidArgumentError("--distributed-timeout-seconds: expected more than 0");
  }
  return absl::OkStatus();
}

absl::StatusOr<EngineCommand> PrepareCommand(const CommandLine& line, const RankInfo& self) {
  RETURN_IF_ERROR(CheckParallelFlags(line.parallel, self.size));
  if (line.command == Command::kBenchBatch) return PrepareBenchBatch(line, self);
  if (self.rank != 0) {
    return [&line](World& world) -> absl::StatusOr<int> {
      RETURN_IF_ERROR(ServeRank(line.engine, world));
      return kExitOk;
    };
  }
  switch (line.command) {
    case Command::kScore:
      return PrepareScore(line);
    case Command::kBenchThroughput:
      return PrepareBenchThroughput(line);
    case Command::kBenchLatency:
      return PrepareBenchLatency(line);
    default:
      return PrepareGenerate(line);
  }
}

// The command's exit code, or why there is none.
absl::StatusOr<int> RunCommand(const CommandLine& line, World& world) {
  switch (line.command) {
    case Command::kInspect:
      return world.self.rank == 0 ? RunInspect(line) : kExitOk;
    case Command::kPlan:
      return world.self.rank == 0 ? RunPlan(line) : kExitOk;
    case Command::kDoctor:
      return world.self.rank == 0 ? RunDoctor() : kExitOk;
    default:
      break;
  }
  absl::StatusOr<EngineCommand> command = PrepareCommand(line, world.self);
  RETURN_IF_ERROR(AgreeOnStatus(command.status(), *world.control));
  return (*command)(world);
}

// Input that was refused, in contrast to a run that broke.
bool IsRefusal(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kPermissionDenied:
      return true;
    default:
      return false;
  }
}

int RunRank(const CommandLine& line, Bootstrap& bootstrap) {
  World& world = bootstrap.world();
  const absl::StatusOr<int> exit_code = RunCommand(line, world);
  if (exit_code.ok()) return *exit_code;
  // After an abort the first error has been printed, and there is nobody left to wait for.
  if (!world.control->abort_status().ok()) bootstrap.Die(kExitFailure);
  if (world.self.rank == 0) {
    std::fprintf(stderr, "[rank 0 %s] %s\n", world.self.host.c_str(),
                 std::string(exit_code.status().message()).c_str());
  }
  return IsRefusal(exit_code.status()) ? kExitRefused : kExitFailure;
}

int Main(const std::vector<std::string>& arguments) {
  ParsedCommandLine parsed = ParseCommandLine(arguments);
  const double timeout = parsed.command_line.has_value()
                             ? parsed.command_line->parallel.distributed_timeout_seconds
                             : ParallelFlags().distributed_timeout_seconds;
  // Every rank joins before any complains: a launcher kills the rest when one has gone.
  absl::StatusOr<std::unique_ptr<Bootstrap>> bootstrap =
      Bootstrap::Create(timeout > 0 ? timeout : ParallelFlags().distributed_timeout_seconds);
  if (!bootstrap.ok()) {
    std::fprintf(stderr, "heddle: %s\n", std::string(bootstrap.status().message()).c_str());
    return IsRefusal(bootstrap.status()) ? kExitRefused : kExitFailure;
  }
  const RankInfo& self = (*bootstrap)->world().self;
  SetLogPrefix(absl::StrCat("rank ", self.rank, " ", self.host));
  if (self.rank != 0) SetMinLogSeverity(LogSeverity::kWarning);
  int exit_code = parsed.exit.exit_code;
  if (parsed.command_line.has_value()) {
    exit_code = RunRank(*parsed.command_line, **bootstrap);
  } else if (self.rank == 0) {
    std::fputs(parsed.exit.text.c_str(), exit_code == 0 ? stdout : stderr);
  }
  std::fflush(nullptr);
  (*bootstrap)->Leave();
  return exit_code;
}

}  // namespace
}  // namespace heddle

int main(int argc, char** argv) {
  return heddle::Main(std::vector<std::string>(argv + 1, argv + argc));
}
