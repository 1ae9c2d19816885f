"""The shape of the tiny model, and how its optimisers share its parameters."""

import math

import torch
from bpe import BOS_ID, EOS_ID, VOCABULARY_SIZE
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

MAX_LENGTH = 1024  # tokens; YaRN stretches the first 128 of them
MAX_PARAMETERS = 4_000_000


def make_model() -> DeepseekV2ForCausalLM:
    """DeepSeek-V2-Lite, small. Six heads and eight experts do not divide by every rank count."""
    config = DeepseekV2Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=6,
        q_lora_rank=None,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=112,
        topk_method="greedy",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        tie_word_embeddings=False,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    model = DeepseekV2ForCausalLM(config)
    assert sum(p.numel() for p in model.parameters()) <= MAX_PARAMETERS
    return model


class Muon(torch.optim.Optimizer):
    """Momentum whose update of each matrix is brought near the closest orthogonal one.

    Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); its
    Newton-Schulz coefficients. A parameter of three dimensions is a stack of matrices.
    """

    COEFFICIENTS = (3.4445, -4.7750, 2.0315)
    STEPS = 5

    def __init__(self, parameters, lr: float, momentum: float, weight_decay: float):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @classmethod
    def orthogonalize(cls, matrix: torch.Tensor) -> torch.Tensor:
        a, b, c = cls.COEFFICIENTS
        tall = matrix.size(-2) > matrix.size(-1)
        x = matrix.mT if tall else matrix
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(cls.STEPS):
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.mT if tall else x

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                average = state["average"].lerp_(parameter.grad, 1 - group["momentum"])
                update = self.orthogonalize(parameter.grad.lerp(average, group["momentum"]))
                rows, columns = parameter.shape[-2:]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * max(1, rows / columns) ** 0.5)


def make_optimizers(model) -> list:
    """Muon for the matrices of the layers; AdamW for embedding, head, router and norms."""
    matrices, embeddings, rest = [], [], []
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name or "lm_head" in name:
            embeddings.append(parameter)
        elif parameter.ndim >= 2 and not name.endswith("mlp.gate.weight"):
            matrices.append(parameter)
        else:
            rest.append(parameter)
    return [
        Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.1),
        torch.optim.AdamW(
            [
                {"params": embeddings, "lr": 4e-3, "weight_decay": 0.05},
                {"params": rest, "lr": 3e-3, "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
            fused=True,
        ),
    ]


class LoadBalance:
    """The routers' auxiliary loss: experts * sum(share of tokens * mean score), averaged over the
    layers. Source: W. Fedus et al., "Switch Transformers" (2021), equation 4, for top-k."""

    def __init__(self, model):
        self.losses, self.shares = [], []
        self.handles = [
            layer.mlp.gate.register_forward_hook(self.note)
            for layer in model.model.layers
            if hasattr(layer.mlp, "gate")
        ]

    def note(self, gate, _, output) -> None:
        logits, _, chosen = output
        shares = torch.bincount(chosen.flatten(), minlength=gate.num_experts) / chosen.numel()
        self.shares.append(shares)
        self.losses.append(gate.num_experts * (shares * logits.softmax(-1).mean(0)).sum())

    def take(self) -> tuple:
        """The loss, and the least share of tokens an expert had, since the last call."""
        loss = torch.stack(self.losses).mean()
        least = float(torch.stack(self.shares).min())
        self.losses, self.shares = [], []
        return loss, least


def bits(nats: float) -> float:
    return nats / math.log(2)
