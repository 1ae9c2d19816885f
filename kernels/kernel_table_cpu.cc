#include "kernels/kernel_table_cpu.h"

#include "kernels/activation/activation_cpu.h"
#include "kernels/attention/attention_cpu.h"
#include "kernels/embedding/embedding_cpu.h"
#include "kernels/gemm/linear_cpu.h"
#include "kernels/kv_append/kv_append_cpu.h"
#include "kernels/moe/moe_cpu.h"
#include "kernels/norm/rms_norm_cpu.h"
#include "kernels/rope/rope_cpu.h"

namespace heddle {

const KernelTable& CpuKernelTable() {
  static constexpr KernelTable kTable = {
      .packed_weight_bytes = PackedWeightBytesCpu,
      .pack_weight = PackWeightCpu,
      .linear = LinearCpu,
      .head_linear = HeadLinearCpu,
      .grouped_linear = GroupedLinearCpu,
      .embedding = EmbeddingCpu,
      .rms_norm = RmsNormCpu,
      .rope = RopeCpu,
      .silu_mul = SiluMulCpu,
      .add = AddCpu,
      .gather_rows = GatherRowsCpu,
      .copy_heads = CopyHeadsCpu,
      .router = RouterCpu,
      .expert_dispatch = ExpertDispatchCpu,
      .expert_combine = ExpertCombineCpu,
      .kv_append = KvAppendCpu,
      .latent_append = LatentAppendCpu,
      .latent_gather = LatentGatherCpu,
      .kv_copy_pages = KvCopyPagesCpu,
      .gqa_attention = GqaAttentionCpu,
      .dense_attention = DenseAttentionCpu,
      .mla_decode = MlaDecodeCpu,
      .mla_prefill = MlaPrefillCpu,
      .merge_partials = MergePartialsCpu,
  };
  return kTable;
}

}  // namespace heddle
