"""Random configs: a seed determines each size and rule of a tiny model."""

from __future__ import annotations

from random import Random
from typing import Any

from support.tiny_model import llama3, yarn

FAMILIES = ("deepseek_v2", "deepseek_v3", "llama", "qwen2", "gemma2")


def random_config(seed: int) -> dict[str, Any]:
    """Returns a config for `write_tiny_model`. The families alternate."""
    draw = Random(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    common = {
        "model_type": family,
        "num_hidden_layers": draw.randint(1, 3),
        "intermediate_size": draw.randint(9, 128),
        "rms_norm_eps": draw.choice([1e-5, 1e-6]),
        "tie_word_embeddings": draw.random() < 0.3,
    }
    if family == "qwen2":
        return common | _qwen2(draw)
    common["attention_bias"] = draw.random() < 0.3
    if family == "gemma2":
        return common | _gemma2(draw, common["num_hidden_layers"])
    return common | (_llama(draw) if family == "llama" else _deepseek(draw, family))


def _llama(draw: Random) -> dict[str, Any]:
    return _heads(draw) | {
        "mlp_bias": draw.random() < 0.3,
        "rope_parameters": draw.choice([_plain(draw), _stretched(draw)]),
    }


def _qwen2(draw: Random) -> dict[str, Any]:
    return _heads(draw) | {
        "rope_parameters": draw.choice([_plain(draw), _yarn(draw)]),
        "use_sliding_window": draw.random() < 0.5,
        "sliding_window": draw.randint(1, 40),
        "max_window_layers": draw.randint(0, 2),
    }


def _gemma2(draw: Random, layers: int) -> dict[str, Any]:
    kinds = [draw.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    return _heads(draw) | {
        "rope_parameters": _plain(draw),
        "query_pre_attn_scalar": draw.randint(4, 40),
        "sliding_window": draw.randint(1, 40),
        "attn_logit_softcapping": draw.choice([None, 2.0, 50.0]),
        "final_logit_softcapping": draw.choice([None, 5.0, 30.0]),
        # Without them: every other layer has a window
        **({"layer_types": kinds} if draw.random() < 0.3 else {}),
    }


def _heads(draw: Random) -> dict[str, Any]:
    num_kv_heads, share = draw.randint(1, 4), draw.randint(1, 4)
    heads = num_kv_heads * share
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": num_kv_heads,
        "hidden_size": heads * draw.choice([8, 16]),
        # Without it: hidden_size / heads
        **({"head_dim": draw.randrange(4, 40, 2)} if draw.random() < 0.5 else {}),
    }


def _stretched(draw: Random) -> dict[str, Any]:
    low = draw.uniform(0.5, 2)
    return llama3(
        rope_theta=draw.choice([5000.0, 500000.0]),
        factor=draw.uniform(1, 32),
        low_freq_factor=low,
        high_freq_factor=low + draw.uniform(0.5, 8),
        original_max_position_embeddings=draw.choice([32, 256, 1000]),
    )


def _deepseek(draw: Random, family: str) -> dict[str, Any]:
    groups, of_group = draw.choice([1, 2, 3, 4]), draw.randint(2, 4)
    top_groups = draw.randint(1, groups)
    heads = draw.randint(1, 6)
    even = 2 if family == "deepseek_v2" else 1  # transformers cannot do V2 with odd widths
    rules = (
        {"topk_method": draw.choice(["greedy", "group_limited_greedy"])}
        if family == "deepseek_v2"
        else {"norm_topk_prob": draw.random() < 0.5, "rope_interleave": draw.random() < 0.7}
    )
    return {
        "hidden_size": heads * draw.randint(5, 30),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": draw.choice([None, draw.randint(8, 40)]),
        "kv_lora_rank": draw.randint(4, 24) * even,
        "qk_nope_head_dim": draw.randint(2, 12) * even,
        "qk_rope_head_dim": draw.randrange(2, 18, 2),
        "v_head_dim": draw.randint(4, 24),
        "first_k_dense_replace": draw.randint(0, 3),
        "n_routed_experts": groups * of_group,
        "n_shared_experts": draw.randint(0, 2),
        "num_experts_per_tok": draw.randint(1, top_groups * of_group),
        "moe_intermediate_size": draw.randint(5, 40),
        "n_group": groups,
        "topk_group": top_groups,
        "routed_scaling_factor": draw.uniform(0.5, 2.5),
        "rope_parameters": draw.choice([_plain(draw), _yarn(draw)]),
        **rules,
    }


def _plain(draw: Random) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": draw.choice([1000.0, 10000.0, 500000.0])}


def _yarn(draw: Random) -> dict[str, Any]:
    slow = draw.uniform(0.5, 2)
    mscales = draw.choice([{}, {"mscale": draw.random(), "mscale_all_dim": draw.random()}])
    return yarn(**mscales) | {
        "factor": draw.uniform(2, 40),
        "beta_slow": slow,
        "beta_fast": slow + draw.uniform(1, 30),
        "original_max_position_embeddings": draw.choice([64, 128, 500]),
    }
