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
        (json.dumps(V3 | {"hidden_size": True}), "hidden_size True is not a positive integer"),
        (json.dumps(V3 | {"rope_parameters": {"rope_type": "yarn", "factor": 1e308}}), "malformed"),
        (json.dumps(V3 | {"rope_parameters": {"rope_type": "yarn", "mscale": "x"}}), "malformed"),
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
