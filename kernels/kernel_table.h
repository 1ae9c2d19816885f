// Every op of a device, one typed function pointer each.
#pragma once

#include <string>
#include <vector>

#include "kernels/activation/add.h"
#include "kernels/activation/copy_heads.h"
#include "kernels/activation/gather_rows.h"
#include "kernels/activation/silu_mul.h"
#include "kernels/attention/gqa_attention.h"
#include "kernels/attention/merge_partials.h"
#include "kernels/attention/mla_decode.h"
#include "kernels/attention/mla_prefill.h"
#include "kernels/embedding/embedding.h"
#include "kernels/gemm/grouped_linear.h"
#include "kernels/gemm/head_linear.h"
#include "kernels/gemm/linear.h"
#include "kernels/gemm/packed_weight.h"
#include "kernels/kv_append/kv_append.h"
#include "kernels/kv_append/latent_append.h"
#include "kernels/kv_append/latent_gather.h"
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
  HeadLinearFn head_linear = nullptr;
  GroupedLinearFn grouped_linear = nullptr;
  EmbeddingFn embedding = nullptr;
  RmsNormFn rms_norm = nullptr;
  RopeFn rope = nullptr;
  SiluMulFn silu_mul = nullptr;
  AddFn add = nullptr;
  GatherRowsFn gather_rows = nullptr;
  CopyHeadsFn copy_heads = nullptr;
  RouterFn router = nullptr;
  ExpertDispatchFn expert_dispatch = nullptr;
  ExpertCombineFn expert_combine = nullptr;
  KvAppendFn kv_append = nullptr;
  LatentAppendFn latent_append = nullptr;
  LatentGatherFn latent_gather = nullptr;
  KvCopyPagesFn kv_copy_pages = nullptr;
  GqaAttentionFn gqa_attention = nullptr;
  DenseAttentionFn dense_attention = nullptr;
  MlaDecodeFn mla_decode = nullptr;
  MlaPrefillFn mla_prefill = nullptr;
  MergePartialsFn merge_partials = nullptr;
};

// Names of the null entries.
std::vector<std::string> MissingKernels(const KernelTable& table);

}  // namespace heddle
