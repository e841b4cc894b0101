"""Safetensors folders: loaded, skipped and refused tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mla_router.worker.model import weights
from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.loader import load_model
from support.forward_driver import ForwardDriver
from support.tiny_model import CONFIGS, edit_tensors, write_tiny_model

PROMPT = list(range(7, 107))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(folder, device="cpu", dtype=dtype)


def answers(model: CausalLM) -> Tensor:
    return ForwardDriver(model, page_size=16).step(chunks=[(0, PROMPT)])


def test_shards_with_an_index_equal_one_file(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "one", **CONFIGS["v3"])
    write_tiny_model(tmp_path / "many", shard_size="100KB", **CONFIGS["v3"])
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert torch.equal(answers(load(tmp_path / "many")), answers(load(tmp_path / "one")))


def test_parameters_are_frozen_and_filled(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    model, file = load(tmp_path), load_file(tmp_path / "model.safetensors")
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == sum(t.numel() for t in file.values())
    experts = dict(model.named_parameters())["model.layers.2.mlp.experts.gate_up_proj.weight"]
    gate, up = experts[5].chunk(2)
    assert torch.equal(gate, file["model.layers.2.mlp.experts.5.gate_proj.weight"])
    assert torch.equal(up, file["model.layers.2.mlp.experts.5.up_proj.weight"])


def test_tied_embeddings_need_no_head_and_ignore_one(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **CONFIGS["v3_flat"])
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    before = answers(load(tmp_path))
    edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(320, 64)}))
    assert torch.equal(answers(load(tmp_path)), before)


def test_nextn_layers_are_skipped(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **CONFIGS["v3"])  # 3 layers, num_nextn_predict_layers 1
    before = answers(load(tmp_path))
    edit_tensors(
        tmp_path, lambda t: t.update({"model.layers.3.eh_proj.weight": torch.zeros(64, 128)})
    )
    assert torch.equal(answers(load(tmp_path)), before)
    edit_tensors(
        tmp_path, lambda t: t.update({"model.layers.4.eh_proj.weight": torch.zeros(64, 128)})
    )
    with pytest.raises(ModelError, match=r"1 unknown: model\.layers\.4\.eh_proj\.weight"):
        load(tmp_path)


def test_every_mistake_is_in_one_error(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **CONFIGS["v3"])

    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["model.norm.weight"]
        del tensors["model.layers.1.mlp.experts.3.down_proj.weight"]
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)
        tensors["lm_head.weight"] = torch.zeros(321, 64)

    edit_tensors(tmp_path, spoil)
    with pytest.raises(ModelError) as error:
        load(tmp_path)
    message = str(error.value)
    assert "2 missing: model.layers.1.mlp.experts.3.down_proj.weight, model.norm.weight" in message
    assert "1 unknown: model.layers.0.self_attn.q_norm.weight [8] in model.safetensors" in message
    assert "1 misshaped: lm_head.weight [321, 64] in model.safetensors: not [320, 64]" in message


def test_long_lists_are_cut(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    edit_tensors(tmp_path, lambda tensors: tensors.clear() or tensors.update(x=torch.ones(1)))
    with pytest.raises(ModelError, match=r"missing: .*, \.\.\.\n") as error:
        load(tmp_path)
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize("name", ["v2_lite", "v3", "llama_gqa", "llama_mqa"])
def test_bfloat16(tmp_path: Path, name: str) -> None:
    """The difference to transformers, which rounds at other places, is within bfloat16's rounding."""
    write_tiny_model(tmp_path, **CONFIGS[name])
    model = load(tmp_path, torch.bfloat16)
    kept_wide = {n for n, p in model.named_parameters() if p.dtype == torch.float32}
    biases = {n for n, _ in model.named_parameters() if n.endswith("e_score_correction_bias")}
    assert kept_wide == biases  # biases of the choice of experts, which is in float32
    assert all(p.dtype == torch.bfloat16 for n, p in model.named_parameters() if n not in kept_wide)

    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT])).logits[0].float()
    got, expected = answers(model), logits.log_softmax(dim=-1)
    divergence = (expected.exp() * (expected - got)).sum(dim=-1)
    assert divergence.median() < 2e-3
    assert (got.argmax(dim=-1) == expected.argmax(dim=-1)).float().mean() > 0.8


def test_a_long_load_logs_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    caplog.set_level("INFO")
    load(tmp_path)
    assert "Loading weights: " not in caplog.text
    monkeypatch.setattr(weights, "PROGRESS_S", 0.0)
    load(tmp_path)
    assert "Loading weights: 0.0 of 0.0 GB" in caplog.text


def test_folder_without_weights(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor model\.safetensors\.ind"):
        load(tmp_path)


def test_shard_that_is_not_there(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, shard_size="100KB", **CONFIGS["v3"])
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelError, match=f"not there: .*{gone.name}"):
        load(tmp_path)


def test_broken_file_and_broken_index(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(tmp_path)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1000\n")
    with pytest.raises(ModelError, match=r"model\.safetensors: a pointer of Git LFS; run `git lfs"):
        load(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for malformed in ({"weights": {}}, [], {"weight_map": {"a": 5}}):
        index.write_text(json.dumps(malformed))
        with pytest.raises(ModelError, match="not an index"):
            load(tmp_path)
    index.write_text('{"weight_map": {}, "a": ' + "[" * 100_000)
    with pytest.raises(ModelError, match="not an index"):
        load(tmp_path)
    index.write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(ModelError, match="names no safetensors files"):
        load(tmp_path)
