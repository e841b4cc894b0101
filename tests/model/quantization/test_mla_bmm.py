"""--mla-bmm-dtype: kv_b_proj stays quantized; queries and attended latents are rounded to FP8 in decode alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.engine.choose import choose_config
from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.config.deepseek import DeepseekConfig
from mla_router.worker.model.config.read import read_config
from mla_router.worker.model.loader import load_model
from mla_router.worker.model.mla import LatentAttention
from support.forward_driver import ForwardDriver
from support.quantized_folders import Format, quantize_folder
from support.tiny_model import CONFIGS, write_tiny_model

PROMPT = list(range(7, 60))


def quantized(folder: Path, name: str = "v3", kind: str = "block") -> Path:
    write_tiny_model(folder / "source", **CONFIGS[name])
    quantize_folder(folder / "source", folder / "quantized", Format(kind))
    return folder / "quantized"


def load(folder: Path, mla_bmm_dtype: str) -> CausalLM:
    config = read_config(folder)
    assert isinstance(config, DeepseekConfig)
    config = replace(config, mla_bmm_dtype=mla_bmm_dtype)
    return load_model(folder, device="cpu", dtype=torch.float32, config=config)


def answers(folder: Path, mla_bmm_dtype: str) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities by prefill and by three decode steps."""
    driver = ForwardDriver(load(folder, mla_bmm_dtype), page_size=16)
    prefilled = driver.step(chunks=[(0, PROMPT)])
    return prefilled, torch.cat([driver.step({0: token}) for token in (5, 6, 7)])


def test_only_decode_is_rounded(tmp_path: Path) -> None:
    folder = quantized(tmp_path)
    prefilled, exact = answers(folder, "cast")
    errors = []
    for dtype in ("fp8_e4m3", "fp8_e5m2"):
        own, rounded = answers(folder, dtype)
        assert torch.equal(own, prefilled)
        errors.append(float((rounded - exact).abs().mean()))
    # E4M3 has 3 bits, E5M2 2
    assert 0 < errors[0] < errors[1] < 0.5


def test_heads_of_whole_blocks_stay_quantized_on_request(tmp_path: Path) -> None:
    """One token is not rounded: decode has the numbers of the dequantized weight."""
    heads = {"qk_nope_head_dim": 128, "v_head_dim": 128, "kv_lora_rank": 128}
    write_tiny_model(tmp_path / "source", **CONFIGS["v3"] | heads)
    quantize_folder(tmp_path / "source", tmp_path / "quantized", Format("block"))
    answers = []
    for mla_bmm_dtype in ("cast", "auto"):
        model = load(tmp_path / "quantized", mla_bmm_dtype)
        absorbed = [m for m in model.modules() if isinstance(m, LatentAttention)]
        is_plain = mla_bmm_dtype == "auto"
        assert absorbed and all(m.kv_b_proj.operand.is_plain == is_plain for m in absorbed)
        driver = ForwardDriver(model, page_size=16)
        prefilled = driver.step(chunks=[(0, PROMPT[:1])])
        answers.append(torch.cat([prefilled, *(driver.step({0: token}) for token in (5, 6, 7))]))
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "kind", "settings", "reason"),
    [
        ("llama_gqa", None, {}, "LlamaForCausalLM has no MLA"),
        ("v3", None, {}, "no FP8 kv_b_proj"),
        ("v3", None, {"quantization": "fp8"}, "no FP8 kv_b_proj"),
        ("v3", "int8", {}, "no FP8 kv_b_proj"),
        ("v3", "block", {"disable_mla": True}, "with --disable-mla there are no such products"),
    ],
)
def test_refused(
    tmp_path: Path, name: str, kind: str | None, settings: dict[str, Any], reason: str
) -> None:
    folder = tmp_path / "source"
    if kind is None:
        write_tiny_model(folder, **CONFIGS[name])
    else:
        folder = quantized(tmp_path, name, kind)
    config = WorkerConfig(model_path=str(folder), mla_bmm_dtype="fp8_e4m3", **settings)
    with pytest.raises(ConfigError, match=f"--mla-bmm-dtype.*{reason}"):
        choose_config(config)
