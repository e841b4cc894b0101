"""The small model as a torch module for training: DeepSeek-V3 (arXiv:2412.19437), section 2.

It computes the same function as `worker/model/mla.py` and `moe.py`, for long batches with gradients: multi-head attention over
the whole text, and all experts for all tokens, which is one matrix product at this size. It includes the multi-token
prediction module of section 2.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mla_router.worker.kernels.moe.routing import RoutingRule, moe_routing_torch

Config = dict[str, Any]


class Network(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], hidden)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(layers))
        self.norm = nn.RMSNorm(hidden, config["rms_norm_eps"])
        self.lm_head = nn.Linear(hidden, config["vocab_size"], bias=False)
        self.mtp = MultiTokenPrediction(config)
        self.register_buffer("angles", rotations(config), persistent=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [B, T + 1] int64 -> logits [B, T, V] of the next token, and [B, T, V] of the one
        after it, which the prediction module computes knowing the next."""
        angles = self.angles[: tokens.shape[1] - 1]
        hidden = self.embed_tokens(tokens[:, :-1])
        for layer in self.layers:
            hidden = layer(hidden, angles)
        hidden = self.norm(hidden)
        ahead = self.mtp(hidden, self.embed_tokens(tokens[:, 1:]), angles)
        return self.lm_head(hidden), self.lm_head(ahead)


class MultiTokenPrediction(nn.Module):
    """The MTP layer: it predicts the token after the next. Embedding and head are the model's."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, epsilon = config["hidden_size"], config["rms_norm_eps"]
        self.enorm = nn.RMSNorm(hidden, epsilon)
        self.hnorm = nn.RMSNorm(hidden, epsilon)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = Layer(config, config["num_hidden_layers"])
        self.norm = nn.RMSNorm(hidden, epsilon)

    def forward(self, hidden: Tensor, embedded: Tensor, angles: Tensor) -> Tensor:
        joined = torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1)
        out: Tensor = self.norm(self.layer(self.eh_proj(joined), angles))
        return out


class Layer(nn.Module):
    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        hidden, epsilon = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(hidden, epsilon)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(hidden, epsilon)
        is_dense = index < config["first_k_dense_replace"]
        self.mlp = MLP(hidden, config["intermediate_size"]) if is_dense else Experts(config)

    def forward(self, hidden: Tensor, angles: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), angles)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config["num_attention_heads"]
        self.nope, self.rope, self.value = (
            config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v")
        )
        hidden, queries, latent = (
            config[name] for name in ("hidden_size", "q_lora_rank", "kv_lora_rank")
        )
        self.latent = latent
        self.q_a_proj = nn.Linear(hidden, queries, bias=False)
        self.q_a_layernorm = nn.RMSNorm(queries, 1e-6)
        self.q_b_proj = nn.Linear(queries, self.heads * (self.nope + self.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, latent + self.rope, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(latent, 1e-6)
        self.kv_b_proj = nn.Linear(latent, self.heads * (self.nope + self.value), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, hidden, bias=False)

    def forward(self, hidden: Tensor, angles: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        q_nope, q_pe = q.view(batch, length, self.heads, -1).split((self.nope, self.rope), -1)
        latent, k_pe = self.kv_a_proj_with_mqa(hidden).split((self.latent, self.rope), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, self.heads, -1)
        k_nope, value = kv.split((self.nope, self.value), -1)
        k_pe = rotate(k_pe[:, :, None], angles).expand(-1, -1, self.heads, -1)
        q = torch.cat((q_nope, rotate(q_pe, angles).to(q_nope.dtype)), -1)
        k = torch.cat((k_nope, k_pe.to(k_nope.dtype)), -1)
        # The fast kernels need values with the head_dim of keys.
        value = functional.pad(value, (0, self.nope + self.rope - self.value))
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        projected: Tensor = self.o_proj(out.transpose(1, 2)[..., : self.value].flatten(2))
        return projected


class MLP(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden)
        out: Tensor = self.down_proj(inner)
        return out


class Experts(nn.Module):
    """Routed and shared experts. The routed ones form one wide MLP, in which each token scales the part of every
    expert by its weight, which is 0 for most."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.rule = RoutingRule(
            top_k=config["num_experts_per_tok"],
            scoring="sigmoid",
            num_groups=config["n_group"],
            top_groups=config["topk_group"],
            normalize=config["norm_topk_prob"],
            scale=config["routed_scaling_factor"],
        )
        hidden, self.count = config["hidden_size"], config["n_routed_experts"]
        width = config["moe_intermediate_size"]
        self.gate = nn.Linear(hidden, self.count, bias=False)
        self.routed = MLP(hidden, self.count * width)
        self.shared_experts = MLP(hidden, config["n_shared_experts"] * width)
        self.register_buffer("bias", torch.zeros(self.count))
        self.register_buffer("load", torch.zeros(self.count), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.flatten(0, 1)
        with torch.autocast(flat.device.type, enabled=False):
            logits = functional.linear(flat.float(), self.gate.weight)
            weights, ids = moe_routing_torch(logits, self.rule, self.bias)
        spread = torch.zeros(len(flat), self.count, device=flat.device, dtype=weights.dtype)
        spread = spread.scatter(1, ids.long(), weights)
        if self.training:
            self.load.copy_((spread.detach() > 0).float().mean(dim=0))
        inner = functional.silu(self.routed.gate_proj(flat)) * self.routed.up_proj(flat)
        scaled = inner.view(len(flat), self.count, -1) * spread.to(inner.dtype)[..., None]
        out: Tensor = self.routed.down_proj(scaled.flatten(1)) + self.shared_experts(flat)
        return out.view_as(hidden)

    def balance(self, step: float) -> None:
        """Lowers the selection bias of busy experts and raises that of idle ones (section 2.1.2)."""
        self.bias.add_(step * torch.sign(self.load.mean() - self.load))


def rotations(config: Config) -> Tensor:
    """[max positions, rope / 2, 2] cosine and sine."""
    half = config["qk_rope_head_dim"] // 2
    frequencies = config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(config["max_position_embeddings"])[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=-1).float()


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates x [B, T, H, rope], in pairs of adjacent elements."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles[:, None].unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


def checkpoint(network: Network, config: Config) -> dict[str, Tensor]:
    """Returns the weights under DeepSeek's names, in bfloat16 except the selection bias."""
    tensors: dict[str, Tensor] = {
        "model.embed_tokens.weight": network.embed_tokens.weight,
        "model.norm.weight": network.norm.weight,
        "lm_head.weight": network.lm_head.weight,
    }
    for index, layer in enumerate([*network.layers, network.mtp.layer]):
        tensors |= _layer_tensors(f"model.layers.{index}", layer, config)
    mtp, prefix = network.mtp, f"model.layers.{len(network.layers)}"
    tensors |= {
        f"{prefix}.embed_tokens.weight": network.embed_tokens.weight,
        f"{prefix}.enorm.weight": mtp.enorm.weight,
        f"{prefix}.hnorm.weight": mtp.hnorm.weight,
        f"{prefix}.eh_proj.weight": mtp.eh_proj.weight,
        f"{prefix}.shared_head.norm.weight": mtp.norm.weight,
        f"{prefix}.shared_head.head.weight": network.lm_head.weight,
    }
    return {
        name: tensor.detach()
        .to("cpu", copy=True)
        .to(torch.float32 if name.endswith("bias") else torch.bfloat16)
        for name, tensor in tensors.items()
    }


def _layer_tensors(prefix: str, layer: nn.Module, config: Config) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, tensor in layer.state_dict().items():
        if name == "mlp.bias":
            tensors[f"{prefix}.mlp.gate.e_score_correction_bias"] = tensor
        elif name.startswith("mlp.routed."):
            # The experts are adjacent: rows of the input projections, columns of the output projection.
            part = name.removeprefix("mlp.routed.")
            pieces = tensor.chunk(config["n_routed_experts"], dim=1 if "down" in part else 0)
            for expert, piece in enumerate(pieces):
                tensors[f"{prefix}.mlp.experts.{expert}.{part}"] = piece
        else:
            tensors[f"{prefix}.{name}"] = tensor
    return tensors
