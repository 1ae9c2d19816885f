#include "kernels/kernel_table.h"

namespace heddle {

std::vector<std::string> MissingKernels(const KernelTable& table) {
  std::vector<std::string> missing;
  const auto check = [&](bool present, const char* name) {
    if (!present) missing.emplace_back(name);
  };
  check(table.packed_weight_bytes != nullptr, "packed_weight_bytes");
  check(table.pack_weight != nullptr, "pack_weight");
  check(table.linear != nullptr, "linear");
  check(table.head_linear != nullptr, "head_linear");
  check(table.grouped_linear != nullptr, "grouped_linear");
  check(table.embedding != nullptr, "embedding");
  check(table.rms_norm != nullptr, "rms_norm");
  check(table.rope != nullptr, "rope");
  check(table.silu_mul != nullptr, "silu_mul");
  check(table.add != nullptr, "add");
  check(table.gather_rows != nullptr, "gather_rows");
  check(table.copy_heads != nullptr, "copy_heads");
  check(table.router != nullptr, "router");
  check(table.expert_dispatch != nullptr, "expert_dispatch");
  check(table.expert_combine != nullptr, "expert_combine");
  check(table.kv_append != nullptr, "kv_append");
  check(table.latent_append != nullptr, "latent_append");
  check(table.latent_gather != nullptr, "latent_gather");
  check(table.kv_copy_pages != nullptr, "kv_copy_pages");
  check(table.gqa_attention != nullptr, "gqa_attention");
  check(table.dense_attention != nullptr, "dense_attention");
  check(table.mla_decode != nullptr, "mla_decode");
  check(table.mla_prefill != nullptr, "mla_prefill");
  check(table.merge_partials != nullptr, "merge_partials");
  return missing;
}

}  // namespace heddle
