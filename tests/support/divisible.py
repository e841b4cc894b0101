"""Random configs whose sizes a number of ranks can divide."""

from __future__ import annotations

from random import Random
from typing import Any

from support.random_configs import random_config


def divisible_config(seed: int, ranks: int) -> dict[str, Any]:
    """Returns a config for `write_tiny_model`: `random_config` with heads, columns and experts for `ranks` ranks. Some
    models of Llama's, Qwen2's and Gemma 2's families have fewer KV heads than ranks."""
    config, draw = random_config(seed), Random(seed)
    for name in ("intermediate_size", "moe_intermediate_size", "n_routed_experts"):
        if name in config:
            config[name] = -(-config[name] // ranks) * ranks
    heads = ranks * draw.randint(1, 2)
    if config["model_type"] in ("llama", "qwen2", "gemma2"):
        config["head_dim"] = draw.randrange(4, 20, 2)
        kv_heads = draw.choice([n for n in (1, 2, ranks, heads) if heads % n == 0])
    else:
        kv_heads = heads
        config["n_group"] = config["topk_group"] = 1
        config["num_experts_per_tok"] = min(config["num_experts_per_tok"], 4)
    # transformers wants heads to divide it, though DeepSeek's heads have sizes of their own
    config["hidden_size"] = -(-config["hidden_size"] // heads) * heads
    return config | {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
