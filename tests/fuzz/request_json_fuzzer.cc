// Any bytes as a line of a request file or of a score file, or as a step plan: refused with a
// reason, or a request that says what it means.
#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>

#include "kernels/base/logging.h"
#include "launch/request_file.h"
#include "runtime/step_plan.h"

namespace {

void CheckLine(const heddle::RequestLine& line) {
  if (line.request.ok()) {
    CHECK_EQ(line.id, line.request->id);
    heddle::ValidateSamplingParams(line.request->params, 1000).IgnoreError();
  } else {
    CHECK(!line.request.status().message().empty());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  CheckLine(heddle::ParseRequestLine(text, heddle::SamplingParams(), "fallback"));
  CheckLine(heddle::ParseScoreLine(text, "fallback"));
  const absl::StatusOr<heddle::StepPlan> plan = heddle::ParseStepPlan(text);
  if (plan.ok()) CHECK(heddle::SerializeStepPlan(*plan) == text);
  return 0;
}
