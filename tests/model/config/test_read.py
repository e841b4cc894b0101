"""The architecture of a folder, and errors that name its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.config.read import ARCHITECTURES, parse_config, read_config
from support.tiny_model import CONFIGS, raw_config

V3 = raw_config(CONFIGS["v3"])


@pytest.mark.parametrize("name", CONFIGS)
def test_architecture_or_model_type_names_the_model(name: str) -> None:
    raw = raw_config(CONFIGS[name])
    config = parse_config(raw)
    assert ARCHITECTURES[config.architecture].model_type == raw["model_type"]
    assert parse_config(raw | {"architectures": [config.architecture]}) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel is not supported; supported are DeepseekV2ForCausalLM, Deep",
        ),
        ({"model_type": "gpt2"}, "gpt2 is not supported"),
        # The architecture decides, not the other fields.
        ({"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"}, "LlamaForS"),
    ],
)
def test_unknown_architectures(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config(V3 | change)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "no architecture at all"),
        (json.dumps(V3 | {"rope_parameters": "yarn"}), "malformed"),
        (json.dumps(V3 | {"architectures": {"a": 1}}), "malformed"),
        (json.dumps(V3 | {"num_hidden_layers": 10**9}), "num_hidden_layers 10{9} is more than"),
        (json.dumps(V3 | {"hidden_size": True}), "hidden_size True is not a positive integer"),
        (json.dumps(V3 | {"n_group": []}), r"n_group \[\] is not a positive integer"),
    ],
)
def test_unreadable_file_names_itself(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message) as error:
        read_config(tmp_path)
    assert "config.json" in str(error.value)


def test_absent_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: No such file"):
        read_config(tmp_path)


YARN = {"rope_type": "yarn", "factor": 40.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_NUMBERS = ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
NUMBERS = {
    "v3": ("rope_theta", "rms_norm_eps", "routed_scaling_factor", "n_group", "topk_group"),
    "gemma2": ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
}


@pytest.mark.parametrize("value", ["1e308", "NaN", "-1", "true", '"x"', "1" + "0" * 400])
def test_a_number_that_arithmetic_cannot_take_is_named(tmp_path: Path, value: str) -> None:
    changes = [(model, name, {name: "?"}) for model, names in NUMBERS.items() for name in names]
    changes += [("v3", name, {"rope_scaling": YARN | {name: "?"}}) for name in YARN_NUMBERS]
    changes += [
        ("llama_gqa", name, {"rope_scaling": LLAMA3 | {name: "?"}}) for name in list(LLAMA3)[1:]
    ]
    path = tmp_path / "config.json"
    for model, name, change in changes:
        raw = raw_config(CONFIGS[model]) | {"rope_parameters": None} | change
        path.write_text(json.dumps(raw).replace('"?"', value))
        with pytest.raises(ModelError, match=rf"config\.json: {name} \S+ is (not a|more than)"):
            read_config(tmp_path)


def test_the_context_of_a_factor_is_limited() -> None:
    raw = V3 | {"max_position_embeddings": 4096, "rope_parameters": YARN | {"factor": 1e6}}
    with pytest.raises(ModelError, match=r"factor 1e\+06 makes a context of more than"):
        parse_config(raw)
