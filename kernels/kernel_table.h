// Every op of a device, one typed function pointer each.
#pragma once

#include <string>
#include <vector>

#include "kernels/activation/add.h"
#include "kernels/activation/gather_rows.h"
#include "kernels/activation/silu_mul.h"
#include "kernels/attention/gqa_attention.h"
#include "kernels/embedding/embedding.h"
#include "kernels/gemm/grouped_linear.h"
#include "kernels/gemm/linear.h"
#include "kernels/gemm/packed_weight.h"
#include "kernels/kv_append/kv_append.h"
#include "kernels/moe/expert_combine.h"
#include "kernels/moe/expert_dispatch.h"
#include "kernels/moe/router.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/rope/rope.h"

namespace heddle {

// Null means unimplemented on this device.
struct KernelTable {
  PackedWeightBytesFn packed_weight_bytes = nullptr;
  PackWeightFn pack_weight = nullptr;
  LinearFn linear = nullptr;
  GroupedLinearFn grouped_linear = nullptr;
  EmbeddingFn embedding = nullptr;
  RmsNormFn rms_norm = nullptr;
  RopeFn rope = nullptr;
  SiluMulFn silu_mul = nullptr;
  AddFn add = nullptr;
  GatherRowsFn gather_rows = nullptr;
  RouterFn router = nullptr;
  ExpertDispatchFn expert_dispatch = nullptr;
  ExpertCombineFn expert_combine = nullptr;
  KvAppendFn kv_append = nullptr;
  KvCopyPagesFn kv_copy_pages = nullptr;
  GqaAttentionFn gqa_attention = nullptr;
  DenseAttentionFn dense_attention = nullptr;
};

// Names of the null entries.
std::vector<std::string> MissingKernels(const KernelTable& table);

}  // namespace heddle
