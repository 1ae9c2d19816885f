// Tests of kernels for each instruction set that this CPU has.
#pragma once

#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "hwy/targets.h"

namespace heddle {

// Lets kernels choose among `target` and the instruction sets below it; 0: all of this CPU.
inline void AllowTargets(int64_t target) {
  hwy::SetSupportedTargetsForTest(0);
  const int64_t lesser = hwy::SupportedTargets() & ~(target - 1);
  if (target != 0) hwy::SetSupportedTargetsForTest(lesser | HWY_EMU128);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

inline std::vector<int64_t> EveryTarget() {
  std::vector<int64_t> targets = {HWY_EMU128};
  for (const int64_t target : {HWY_AVX2, HWY_AVX3, HWY_AVX3_DL}) {
    if ((hwy::SupportedTargets() & target) != 0) targets.push_back(target);
  }
  return targets;
}

inline std::string NameOfTarget(const testing::TestParamInfo<int64_t>& test) {
  return hwy::TargetName(test.param);
}

// Runs a test with one target allowed; to be instantiated with EveryTarget() and NameOfTarget.
class OnTarget : public testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { AllowTargets(GetParam()); }
  void TearDown() override { AllowTargets(0); }
};

}  // namespace heddle
