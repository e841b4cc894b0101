"""The files of the small model besides its weights: configuration, tokenizer and chat template.

It has the layout of DeepSeek-V3 (MLA with query compression, fine-grained experts with sigmoid
routing in groups, a shared expert, a dense first layer, one multi-token prediction layer) at a size
that a laptop CPU serves, and DeepSeek-V3.1's marks of roles and tool calls. The tokenizer is a
byte-level BPE trained on the tasks' own text, so that nothing is downloaded. The same versions of
the libraries give the same bytes.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks import TASKS, tools
from tasks.example import ASSISTANT, BOS, EOS, PAD, USER
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SEED = 20261121
BOS_ID, EOS_ID, PAD_ID = range(3)
# Marks that the text of an answer never shows, and those that it must show, for its reader to parse.
HIDDEN = [BOS, EOS, PAD, USER, ASSISTANT]
SHOWN = [
    tools.CALLS_BEGIN,
    tools.CALLS_END,
    tools.CALL_BEGIN,
    tools.CALL_END,
    tools.SEPARATOR,
    tools.OUTPUT_BEGIN,
    tools.OUTPUT_END,
]

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages if message['role'] == 'system' -%}
  {{- message['content'] -}}
{%- endfor -%}
{%- if tools -%}
  {{- '## Tools\\n' -}}
  {%- for tool in tools -%}
    {{- '### ' + tool['function']['name'] + '\\n' + (tool['function']['description'] or '') -}}
    {{- '\\nParameters: ' + (tool['function']['parameters'] | tojson) + '\\n' -}}
  {%- endfor -%}
{%- endif -%}
{%- for message in messages -%}
  {%- if message['role'] == 'user' -%}
    {{- '<｜User｜>' + message['content'] -}}
  {%- elif message['role'] == 'tool' -%}
    {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' -}}
  {%- elif message['role'] == 'assistant' -%}
    {{- '<｜Assistant｜>' + (message['content'] or '') -}}
    {%- if message['tool_calls'] -%}
      {{- '<｜tool▁calls▁begin｜>' -}}
      {%- for call in message['tool_calls'] -%}
        {%- set arguments = call['function']['arguments'] -%}
        {{- '<｜tool▁call▁begin｜>' + call['function']['name'] + '<｜tool▁sep｜>' -}}
        {{- arguments if arguments is string else arguments | tojson -}}
        {{- '<｜tool▁call▁end｜>' -}}
      {%- endfor -%}
      {{- '<｜tool▁calls▁end｜>' -}}
    {%- endif -%}
    {{- eos_token -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<｜Assistant｜>' -}}{%- endif -%}
"""

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "vocab_size": 1024,
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
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
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


def write_files(out: Path) -> None:
    """Everything of the folder but the weights."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", CONFIG)
    write_json(out / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID})
    write_tokenizer(out)


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


def corpus() -> Iterator[str]:
    """The tasks' text without marks, which are tokens anyway."""
    draw = random.Random(SEED)
    for maker, weight in TASKS.values():
        for _ in range(round(100 * weight)):
            text = "".join(part.text for part in maker(draw, False))
            yield from filter(None, re.split("<｜[^｜]*｜>", text[:2000]))


def write_tokenizer(out: Path) -> None:
    tokenizer = byte_level_bpe(corpus(), CONFIG["vocab_size"], HIDDEN + SHOWN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    assert tokenizer.get_vocab_size() == CONFIG["vocab_size"], tokenizer.get_vocab_size()
    written = json.loads(tokenizer.to_str())
    for token in written["added_tokens"]:
        token["special"] = token["content"] in HIDDEN
    write_json(out / "tokenizer.json", written)
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONFIG["max_position_embeddings"],
        },
    )


def byte_level_bpe(texts: Iterator[str], vocab_size: int, marks: list[str]) -> Tokenizer:
    """Trains a tokenizer on `texts`. `marks` are its first tokens."""
    tokenizer = Tokenizer(models.BPE())
    # Digits stay single, so that numbers of any length look alike to the model; and line ends, so
    # that an answer's last token does not depend on what follows.
    pattern = Regex(
        r"\p{N}|[\r\n]|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+|[^\S\r\n]+(?!\S)|[^\S\r\n]+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=marks,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
