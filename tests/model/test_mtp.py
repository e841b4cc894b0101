"""Multi-token prediction against the paper's equations in float64, and the loading of its weights."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.config.read import read_config
from mla_router.worker.model.loader import load_model, load_mtp
from mla_router.worker.model.mtp import MultiTokenPrediction
from mla_router.worker.model.quantization.choose import ONLINE
from support.forward_driver import ForwardDriver, nan_caches
from support.quantized_folders import Format, quantize_folder, write_dequantized
from support.tiny_model import CONFIGS, VOCAB_SIZE, edit_tensors, write_tiny_model
from support.tiny_mtp import PaperMtp, export_nextn, write_tiny_mtp

TOKENS = random.Random(5).choices(range(VOCAB_SIZE), k=100)
# Chunks, then single tokens, each of them a decode step
WHOLE, IN_PIECES = [99], [40, 1, 30, 20, *[1] * 8]
DENSE = CONFIGS["v3_halves"] | {"first_k_dense_replace": 9}


def load(folder: Path) -> tuple[CausalLM, MultiTokenPrediction]:
    model = load_model(folder, device="cpu", dtype=torch.float32)
    return model, load_mtp(model, folder)


def guesses(model: CausalLM, mtp: MultiTokenPrediction, cuts: list[int]) -> list[Tensor]:
    """Returns the tensors of `PaperMtp.logprobs(TOKENS)`, with steps of `cuts` tokens."""
    driver = ForwardDriver(model, page_size=16)
    pages, page_size = driver.caches[0].shape[:2]
    specs = mtp.kv_cache_specs(torch.float32)
    caches = nan_caches(specs, pages - 1, page_size, driver.device)
    depths = mtp.config.num_mtp_layers
    found: list[list[Tensor]] = [[] for _ in range(depths)]
    begin = 0
    for size in cuts:
        run = TOKENS[begin : begin + size]
        batch = driver.batch({0: run[0]}) if size == 1 else driver.batch(chunks=[(0, run)])
        hidden = model(batch, driver.caches)
        for depth in range(depths):
            ahead = TOKENS[begin + 1 + depth : begin + 1 + depth + size]
            padded = torch.tensor(ahead + [0] * (size - len(ahead)))  # rows that are not read
            hidden = mtp(batch, hidden, model.embed(padded), caches, depth)
            found[depth].append(model.logits(hidden[: len(ahead)]).log_softmax(dim=-1))
        begin += size
    return [torch.cat(rows) for rows in found]


@pytest.mark.parametrize("cuts", [WHOLE, IN_PIECES], ids=["whole", "in pieces"])
@pytest.mark.parametrize(
    ("config", "depths"),
    [(CONFIGS["v3"], 1), (CONFIGS["v3"], 3), (CONFIGS["v3_halves"], 2), (DENSE, 1)],
    ids=["v3", "v3 of three depths", "v3_halves", "dense"],
)
def test_guesses_are_those_of_the_paper(
    tmp_path: Path, config: dict[str, object], depths: int, cuts: list[int]
) -> None:
    write_tiny_mtp(tmp_path / "model", depths, **config)
    expected = PaperMtp(tmp_path / "model", tmp_path / "deeper").logprobs(TOKENS)
    got = guesses(*load(tmp_path / "model"), cuts)
    assert [len(rows) for rows in got] == [99 - depth for depth in range(depths)]
    for depth in range(depths):
        difference = (got[depth] - expected[depth]).abs().max().item()
        assert difference <= 1e-4, (depth, difference)


def test_fp8_layers_but_for_the_projection_that_joins(tmp_path: Path) -> None:
    """DeepSeek's checkpoints do not quantize eh_proj, and do not list it as left out."""
    kind = Format("block", (16, 24))
    write_tiny_mtp(tmp_path / "source", 1, **CONFIGS["v3"])
    quantize_folder(tmp_path / "source", tmp_path / "fp8", kind)
    write_dequantized(tmp_path / "fp8", tmp_path / "plain", kind)
    model, mtp = load(tmp_path / "fp8")
    assert mtp.depths[0].eh_proj.weight.dtype == torch.float32
    assert mtp.depths[0].self_attn.o_proj.weight.dtype == torch.float8_e4m3fn
    (got,) = guesses(model, mtp, WHOLE)
    (expected,) = guesses(*load(tmp_path / "plain"), WHOLE)
    assert (got - expected).abs().max().item() <= 1e-5


def test_layers_are_quantized_online_as_the_model_is(tmp_path: Path) -> None:
    write_tiny_mtp(tmp_path, 1, **CONFIGS["v3"])
    config = replace(read_config(tmp_path), quantization=ONLINE["fp8"])
    model = load_model(tmp_path, device="cpu", dtype=torch.float32, config=config)
    layer = load_mtp(model, tmp_path).depths[0]
    assert layer.eh_proj.operand.is_plain and layer.self_attn.kv_b_proj.operand.is_plain
    assert layer.self_attn.o_proj.weight.dtype == torch.float8_e4m3fn


def test_embedding_head_and_rotations_take_no_memory_of_their_own(tmp_path: Path) -> None:
    write_tiny_mtp(tmp_path, 1, **CONFIGS["v3"])
    model, mtp = load(tmp_path)
    assert mtp.rotations.data_ptr() == model.model.rotations.data_ptr()
    tensors = load_file(tmp_path / "model.safetensors")
    layer = {name: t for name, t in tensors.items() if name.startswith("model.layers.3.")}
    shared = 2 * VOCAB_SIZE * model.config.hidden_size
    count = sum(parameter.numel() for parameter in mtp.parameters())
    assert count == sum(tensor.numel() for tensor in layer.values()) - shared
    assert not any(parameter.requires_grad for parameter in mtp.parameters())


def test_a_layer_in_a_folder_of_its_own(tmp_path: Path) -> None:
    write_tiny_mtp(tmp_path / "model", 1, **CONFIGS["v3"])
    model, mtp = load(tmp_path / "model")
    apart = load_mtp(
        model, tmp_path / "model", draft_folder=export_nextn(tmp_path / "model", tmp_path / "nextn")
    )
    torch.testing.assert_close(guesses(model, apart, WHOLE), guesses(model, mtp, WHOLE))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "is not a NextN layer"),
        ({"architectures": {"name": 1}}, r"architectures {'name': 1} is not a list of names"),
        ({"hidden_size": 128}, "hidden_size is 128, but 64 in the model"),
        ({"kv_lora_rank": 16}, "kv_lora_rank is 16, but 32 in the model"),
    ],
)
def test_layers_that_do_not_fit_the_model(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    write_tiny_mtp(tmp_path / "model", 1, **CONFIGS["v3"])
    model, _ = load(tmp_path / "model")
    out = export_nextn(tmp_path / "model", tmp_path / "nextn")
    raw = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(ModelError, match=message):
        load_mtp(model, tmp_path / "model", draft_folder=out)


def test_every_mistake_is_in_one_error(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.3.hnorm.weight"]
        tensors["model.layers.3.eh_proj.weight"] = torch.ones(64, 64)
        tensors["model.layers.3.enorm.bias"] = torch.ones(64)

    write_tiny_mtp(tmp_path, 1, **CONFIGS["v3"])
    edit_tensors(tmp_path, spoil)
    model = load_model(tmp_path, device="cpu", dtype=torch.float32)  # does not read that layer
    with pytest.raises(ModelError) as error:
        load_mtp(model, tmp_path)
    message, at = str(error.value), "in model.safetensors"
    assert "1 missing: model.layers.3.hnorm.weight" in message
    assert f"1 unknown: model.layers.3.enorm.bias [64] {at}" in message
    assert f"1 misshaped: model.layers.3.eh_proj.weight [64, 64] {at}: not [64, 128]" in message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v2_grouped", "no layers for multi-token prediction"),
        ("llama_gqa", "DeepSeek's models alone have NextN layers"),
    ],
)
def test_a_checkpoint_without_such_layers_is_refused(
    tmp_path: Path, name: str, message: str
) -> None:
    write_tiny_model(tmp_path, **CONFIGS[name])
    model = load_model(tmp_path, device="cpu", dtype=torch.float32)
    with pytest.raises(ModelError, match=message):
        load_mtp(model, tmp_path)


def test_random_weights(tmp_path: Path) -> None:
    write_tiny_mtp(tmp_path, 2, **CONFIGS["v3"])
    (tmp_path / "model.safetensors").unlink()
    model = load_model(tmp_path, device="cpu", dtype=torch.float32, dummy=True)
    for rows in guesses(model, load_mtp(model, tmp_path, dummy=True), WHOLE):
        assert torch.isfinite(rows).all()
        assert len(rows.argmax(dim=-1).unique()) > 5
