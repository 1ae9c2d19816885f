#!/bin/sh
# Checks on this machine what --decode-context-parallel-size auto chooses: for cells of batch x
# context, the decode step of every number of stripes as predicted and as measured (stripe_check.cc
# says how), over ranks that share memory and, as root, over links that are slowed: the loopback of
# a network namespace, shaped with tc. For an otherwise idle machine.
# Usage: tests/bench/stripe_check.sh [BUILD_DIR [RUN...]]
#   RUN: ranks, or ranks:ranks a pretended node:rate, such as 4:2:1gbit; 2 4 2:1:1gbit 4:2:1gbit
#   CELLS in the environment: BATCHxCONTEXT of a run instead of the default ones
set -eu
build=$(realpath "${1:-build}")
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- 2 4 2:1:1gbit 4:2:1gbit
cells=${CELLS:-1x256 1x1024 1x4096 1x16384 4x256 4x1024 4x4096 16x256 16x1024 16x4096 64x256 64x1024}

folder=$(mktemp -d)
space=heddle_stripe_check
cleanup() {
  rm -rf "$folder"
  if [ "$(id -u)" = 0 ]; then ip netns del "$space" 2>/dev/null || true; fi
}
trap cleanup EXIT

# DeepSeek-V2-Lite's attention, in fewer and thinner layers.
cat >"$folder/config.json" <<'JSON'
{"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_act": "silu",
 "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 3,
 "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": null, "kv_lora_rank": 512,
 "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
 "n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4,
 "moe_intermediate_size": 384, "moe_layer_freq": 1, "first_k_dense_replace": 1, "n_group": 1,
 "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": false,
 "routed_scaling_factor": 1.0, "vocab_size": 4096, "max_position_embeddings": 32768,
 "rms_norm_eps": 1e-06, "rope_theta": 10000, "attention_bias": false,
 "tie_word_embeddings": false, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1}
JSON

export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
for run in "$@"; do
  ranks=${run%%:*}
  echo "== $run"
  case $run in
    *:*:*)
      per_node=${run#*:}
      rate=${per_node#*:}
      per_node=${per_node%%:*}
      ip netns add "$space"
      ip -n "$space" link set lo up
      # Frames as of a network, not of 64 KiB.
      ip -n "$space" link set lo mtu 1500
      ip netns exec "$space" tc qdisc add dev lo root tbf rate "$rate" burst 5kb latency 100ms
      # shellcheck disable=SC2086
      ip netns exec "$space" mpirun -n "$ranks" --mca btl tcp,self --mca btl_tcp_if_include lo \
        "$build/tests/bench/stripe_check" "$folder" "$per_node" $cells
      ip netns del "$space"
      ;;
    *)
      # shellcheck disable=SC2086
      mpirun -n "$ranks" "$build/tests/bench/stripe_check" "$folder" 0 $cells
      ;;
  esac
done
