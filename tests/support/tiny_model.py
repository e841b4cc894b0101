"""Small random checkpoints with a tokenizer, written by transformers' classes.

`CONFIGS` covers DeepSeek's family (V2 and V3 routing, with and without q_lora, YaRN on and off, one
and several expert groups, tied embeddings, both layouts of the rotary pairs), Llama's (multi-head,
grouped and multi-query attention, a head_dim of its own, biases, stretched and plain rotary angles), Qwen2's (tied
or not, with YaRN or without, with windows in some layers) and Gemma 2's (windows in every other layer, with soft caps and without).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCAB_SIZE = 320
BOS, EOS = "<bos>", "<eos>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOKENIZER_TEXT = [
    "The quick brown fox jumps over the lazy dog, and then the other one.",
    'user: what is 12 + 34? assistant: the answer is 46. {"name": "value", "number": 1}',
]

TRANSFORMERS: dict[str, tuple[Any, Any]] = {
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
}

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
DEEPSEEK: dict[str, Any] = COMMON | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
# Short windows, and caps that change most scores
GEMMA: dict[str, Any] = COMMON | {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 24,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 8.0,
}
DEFAULTS = {
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "gemma2": GEMMA,
    "llama": COMMON,
    "qwen2": COMMON,
}


def yarn(**mscales: float) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 8.0,
        "beta_slow": 1.0,
        **mscales,
    }


def llama3(**changes: float) -> dict[str, Any]:
    """Rotary scaling with all three kinds of pairs: unchanged, interpolated, and slowed down."""
    return {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
        **changes,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "v2_lite": {
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "topk_method": "greedy",
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "rope_parameters": yarn(mscale=0.707, mscale_all_dim=0.707),
    },
    "v2_grouped": {
        "model_type": "deepseek_v2",
        "q_lora_rank": 24,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 4.0,
        "first_k_dense_replace": 1,
    },
    "v2_tied": {
        "model_type": "deepseek_v2",
        "q_lora_rank": 24,
        "topk_method": "greedy",
        "first_k_dense_replace": 0,
        "rope_parameters": yarn(mscale=1.0, mscale_all_dim=0.5),
        "tie_word_embeddings": True,
    },
    "v3": {
        "model_type": "deepseek_v3",
        "q_lora_rank": 24,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "rope_parameters": yarn(mscale=1.0, mscale_all_dim=1.0),
    },
    "v3_flat": {
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "tie_word_embeddings": True,
    },
    "v3_halves": {
        "model_type": "deepseek_v3",
        "q_lora_rank": 24,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 2,
        "rope_interleave": False,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_parameters": yarn(),
    },
    "llama_mha": {"model_type": "llama", "tie_word_embeddings": True},
    "llama_gqa": {
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_parameters": llama3(),
    },
    "llama_mqa": {
        "model_type": "llama",
        "num_key_value_heads": 1,
        "head_dim": 24,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "llama_biased": {
        "model_type": "llama",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": llama3(factor=32.0, high_freq_factor=2.0),
    },
    "qwen2": {
        "model_type": "qwen2",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "qwen2_windows": {
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 1,
    },
    "gemma2": {"model_type": "gemma2", "num_hidden_layers": 4},
    "gemma2_uncapped": {
        "model_type": "gemma2",
        "num_key_value_heads": 1,
        "sliding_window": 7,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "qwen2_tied": {
        "model_type": "qwen2",
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rope_parameters": yarn(),
    },
}


def raw_config(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json with the fields that matter: `raw_config(CONFIGS["v3"])`."""
    return DEFAULTS[config["model_type"]] | config


def write_tiny_model(
    folder: Path, *, seed: int = 0, shard_size: str = "1GB", **config: Any
) -> None:
    """Writes a random float32 checkpoint with a tokenizer to `folder`.

    `config` overrides the defaults of its `model_type`: `**CONFIGS["v3"]`.
    """
    values = raw_config(config)
    of_config, of_model = TRANSFORMERS[values.pop("model_type")]
    torch.manual_seed(seed)
    model = of_model(of_config(**values))
    _spread(model)
    model.save_pretrained(folder, max_shard_size=shard_size)
    tiny_tokenizer().save_pretrained(folder)


def _spread(model: torch.nn.Module) -> None:
    """Draws the weights so that each part of the model has an effect."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                # From 1, or from Gemma's 0
                weight.add_(torch.empty_like(weight).uniform_(-0.5, 0.5))
            else:
                weight.normal_(std=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer: each text has tokens, each token sequence has a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TOKENIZER_TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Applies `change` to the tensors of the checkpoint in `folder`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
