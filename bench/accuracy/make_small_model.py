"""Make the small model that the package ships, with seeded random weights.

    python bench/accuracy/make_small_model.py [OUT_DIR]      # default: worker/model/small

It has the layout of DeepSeek-V3 (MLA with query compression, fine-grained experts with sigmoid
routing in groups, a shared expert, a dense first layer, one multi-token prediction layer) at a
size that a laptop CPU serves. The tokenizer is a byte-level BPE trained on text that this script
makes up, so that nothing is downloaded. The same versions give the same bytes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizer_text import corpus
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

OUT_DIR = Path(__file__).resolve().parents[2] / "worker" / "model" / "small"
SEED = 20261120

SPECIAL_TOKENS = ["<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
SPECIAL_TOKENS += ["<|tool|>", "<|tool_call|>"]  # for the tool calls that it will be trained on
BOS, EOS, PAD = range(3)

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
  {{- '<|' + message['role'] + '|>' + (message['content'] or '') -}}
  {%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "vocab_size": 2048,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 5,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
}


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", CONFIG)
    write_json(out / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS})
    write_tokenizer(out)
    save_file(weights(CONFIG), out / "model.safetensors", metadata={"format": "pt"})
    for file in sorted(out.iterdir()):
        print(f"{file.stat().st_size:>10,}  {file}")


# -- weights --------------------------------------------------------------------------------------


def weights(config: dict[str, Any]) -> dict[str, Tensor]:
    """Random tensors that keep the size of what passes through them, so that logits spread."""
    generator = torch.Generator().manual_seed(SEED)
    tensors: dict[str, Tensor] = {}
    for name, shape in tensor_shapes(config).items():
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        elif name.endswith("e_score_correction_bias"):
            # float32 as in DeepSeek's checkpoints: it moves in steps below bfloat16's precision
            tensors[name] = torch.randn(shape, generator=generator) * 0.05
        else:
            std = 1.0 if "embed_tokens" in name else shape[1] ** -0.5
            if name == "lm_head.weight":
                std *= 3  # apart enough that rounding seldom changes the best token
            drawn = torch.randn(shape, generator=generator) * std
            tensors[name] = drawn.to(torch.bfloat16)
    # The prediction layer shares embedding and head with the model; the files hold them twice.
    mtp = f"model.layers.{config['num_hidden_layers']}"
    tensors[f"{mtp}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{mtp}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return tensors


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint, in DeepSeek's naming."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    layers = config["num_hidden_layers"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for index in range(layers + config["num_nextn_predict_layers"]):
        shapes |= layer_shapes(config, index)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    for index in range(layers, layers + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{index}"
        shapes |= {
            f"{prefix}.embed_tokens.weight": (vocabulary, hidden),
            f"{prefix}.enorm.weight": (hidden,),
            f"{prefix}.hnorm.weight": (hidden,),
            f"{prefix}.eh_proj.weight": (hidden, 2 * hidden),
            f"{prefix}.shared_head.norm.weight": (hidden,),
            f"{prefix}.shared_head.head.weight": (vocabulary, hidden),
        }
    return shapes


def layer_shapes(config: dict[str, Any], index: int) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = (config[f"{n}_head_dim"] for n in ("qk_nope", "qk_rope", "v"))
    experts, expert_width = config["n_routed_experts"], config["moe_intermediate_size"]
    prefix = f"model.layers.{index}"
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        f"{prefix}.self_attn.q_a_proj.weight": (q_rank, hidden),
        f"{prefix}.self_attn.q_a_layernorm.weight": (q_rank,),
        f"{prefix}.self_attn.q_b_proj.weight": (heads * (nope + rope), q_rank),
        f"{prefix}.self_attn.kv_a_proj_with_mqa.weight": (kv_rank + rope, hidden),
        f"{prefix}.self_attn.kv_a_layernorm.weight": (kv_rank,),
        f"{prefix}.self_attn.kv_b_proj.weight": (heads * (nope + value), kv_rank),
        f"{prefix}.self_attn.o_proj.weight": (hidden, heads * value),
    }

    def feed_forward(name: str, width: int) -> None:
        shapes[f"{prefix}.{name}.gate_proj.weight"] = (width, hidden)
        shapes[f"{prefix}.{name}.up_proj.weight"] = (width, hidden)
        shapes[f"{prefix}.{name}.down_proj.weight"] = (hidden, width)

    if index < config["first_k_dense_replace"]:
        feed_forward("mlp", config["intermediate_size"])
    else:
        shapes[f"{prefix}.mlp.gate.weight"] = (experts, hidden)
        shapes[f"{prefix}.mlp.gate.e_score_correction_bias"] = (experts,)
        for expert in range(experts):
            feed_forward(f"mlp.experts.{expert}", expert_width)
        feed_forward("mlp.shared_experts", config["n_shared_experts"] * expert_width)
    return shapes


# -- tokenizer ------------------------------------------------------------------------------------


def write_tokenizer(out: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    # Digits stay single, so that numbers of any length look alike to the model.
    pattern = Regex(r"\p{N}|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(SEED), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL_TOKENS[BOS]} $A",
        pair=f"{SPECIAL_TOKENS[BOS]} $A $B",
        special_tokens=[(SPECIAL_TOKENS[BOS], BOS)],
    )
    assert tokenizer.get_vocab_size() == CONFIG["vocab_size"], tokenizer.get_vocab_size()
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[BOS],
            "eos_token": SPECIAL_TOKENS[EOS],
            "pad_token": SPECIAL_TOKENS[PAD],
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONFIG["max_position_embeddings"],
        },
    )


def write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else OUT_DIR)
