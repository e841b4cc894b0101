"""EAGLE heads against the paper's equations in float64, and the loading of their weights."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.eagle import EagleHead
from mla_router.worker.model.loader import load_eagle, load_model
from support.forward_driver import ForwardDriver, nan_caches
from support.tiny_eagle import PaperEagle, write_tiny_eagle
from support.tiny_model import CONFIGS, VOCAB_SIZE, write_tiny_model

TOKENS = random.Random(5).choices(range(VOCAB_SIZE), k=100)
WHOLE, IN_PIECES = [99], [40, 1, 30, 20, *[1] * 8]


def load(tmp_path: Path, *, bias: bool = False) -> tuple[CausalLM, EagleHead]:
    write_tiny_model(tmp_path / "model", **CONFIGS["llama_gqa"])
    write_tiny_eagle(tmp_path / "eagle", tmp_path / "model", bias=bias)
    model = load_model(tmp_path / "model", device="cpu", dtype=torch.float32)
    return model, load_eagle(model, tmp_path / "eagle")


def drafts(model: CausalLM, head: EagleHead, cuts: list[int]) -> list[Tensor]:
    """Returns the tensors of `PaperEagle.logprobs(TOKENS)`, with steps of `cuts` tokens."""
    driver = ForwardDriver(model, page_size=16)
    pages, page_size = driver.caches[0].shape[:2]
    specs = head.kv_cache_specs(torch.float32)
    caches = [nan_caches(specs, pages - 1, page_size, driver.device) for _ in range(2)]
    found: list[list[Tensor]] = [[], []]
    begin = 0
    for size in cuts:
        run = TOKENS[begin : begin + size]
        batch = driver.batch({0: run[0]}) if size == 1 else driver.batch(chunks=[(0, run)])
        hidden = model(batch, driver.caches)
        for depth in range(2):
            ahead = TOKENS[begin + 1 + depth : begin + 1 + depth + size]
            padded = torch.tensor(ahead + [0] * (size - len(ahead)))  # rows that are not read
            hidden = head(batch, hidden, model.embed(padded), caches[depth])
            found[depth].append(model.logits(hidden[: len(ahead)]).log_softmax(dim=-1))
        begin += size
    return [torch.cat(rows) for rows in found]


@pytest.mark.parametrize("cuts", [WHOLE, IN_PIECES], ids=["whole", "in pieces"])
@pytest.mark.parametrize("bias", [False, True])
def test_drafts_are_those_of_the_paper(tmp_path: Path, bias: bool, cuts: list[int]) -> None:
    model, head = load(tmp_path, bias=bias)
    expected = PaperEagle(tmp_path / "eagle", tmp_path / "model").logprobs(TOKENS)
    for depth, got in enumerate(drafts(model, head, cuts)):
        difference = (got - expected[depth]).abs().max().item()
        assert difference <= 1e-4, (depth, difference)


def test_the_head_has_no_embedding_and_no_rotations_of_its_own(tmp_path: Path) -> None:
    model, head = load(tmp_path)
    assert head.rotations.data_ptr() == model.model.rotations.data_ptr()
    hidden, vocabulary = model.config.hidden_size, model.config.vocab_size
    assert all(parameter.shape != (vocabulary, hidden) for parameter in head.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "a draft head has one layer, not 2"),
        ({"vocab_size": 100}, f"vocab_size is 100, but {VOCAB_SIZE} in the model"),
        ({"num_key_value_heads": 4}, "num_kv_heads is 4, but 2 in the model"),
        ({"draft_vocab_size": 100}, "EAGLE-3"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE-3"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    model, _ = load(tmp_path)
    path = tmp_path / "eagle" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=message):
        load_eagle(model, tmp_path / "eagle")


def test_heads_of_deepseek_models_are_refused(tmp_path: Path) -> None:
    load(tmp_path)
    write_tiny_model(tmp_path / "v3", **CONFIGS["v3"])
    model = load_model(tmp_path / "v3", device="cpu", dtype=torch.float32)
    with pytest.raises(ModelError, match="EAGLE heads are supported for Llama models"):
        load_eagle(model, tmp_path / "eagle")
