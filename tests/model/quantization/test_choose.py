"""--quantization and the format of the checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mla_router.worker.config import SMALL_MODEL, ConfigError, WorkerConfig
from mla_router.worker.model.config.read import read_config
from mla_router.worker.model.quantization.choose import choose_quantization
from mla_router.worker.model.quantization.spec import FP8, INT8, Quantization

BLOCKS = Quantization("fp8", FP8, (128, 128), "weight_scale_inv")
CHANNELS = Quantization("compressed-tensors", FP8, (1, None))
INTEGERS = Quantization("compressed-tensors", INT8, (1, None))


def chosen(flag: str, checkpoint: Quantization | None) -> Quantization | None:
    model = replace(read_config(SMALL_MODEL), quantization=checkpoint)
    return choose_quantization(WorkerConfig(quantization=flag), model)


@pytest.mark.parametrize(
    ("flag", "dtype", "block"),
    [
        ("fp8", FP8, (128, 128)),
        ("w8a8_fp8", FP8, (1, None)),
        ("w8a8_int8", INT8, (1, None)),
    ],
)
def test_plain_checkpoints(flag: str, dtype: str, block: Any) -> None:
    found = chosen(flag, None)
    assert found is not None and found.online
    assert (found.dtype, found.block, found.ignored) == (dtype, block, ())
    assert chosen("auto", None) is None


@pytest.mark.parametrize(
    ("flag", "checkpoint"),
    [
        ("auto", BLOCKS),
        ("auto", INTEGERS),
        ("fp8", BLOCKS),
        ("compressed-tensors", CHANNELS),
        ("compressed-tensors", INTEGERS),
        ("w8a8_fp8", CHANNELS),
        ("w8a8_int8", INTEGERS),
    ],
)
def test_quantized_checkpoints_keep_their_format(flag: str, checkpoint: Quantization) -> None:
    assert chosen(flag, checkpoint) == checkpoint


@pytest.mark.parametrize(
    ("flag", "checkpoint", "message"),
    [
        ("fp8", CHANNELS, "float8_e4m3fn weights of quant_method compressed-tensors"),
        ("w8a8_fp8", BLOCKS, "float8_e4m3fn weights of quant_method fp8; leave the flag out"),
        ("w8a8_int8", BLOCKS, "quantized already"),
        ("w8a8_int8", CHANNELS, "quantized already"),
        ("w8a8_fp8", INTEGERS, "int8 weights of quant_method compressed-tensors"),
        ("compressed-tensors", BLOCKS, "quantized already"),
        ("compressed-tensors", None, "not quantized; use one of fp8, w8a8_fp8, w8a8_int8"),
    ],
)
def test_contradictions(flag: str, checkpoint: Quantization | None, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^--quantization {flag}: .*{message}"):
        chosen(flag, checkpoint)


def test_other_methods_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="awq"):
        WorkerConfig(quantization="awq")
