"""bench/accuracy/formats.py: the small model with quantized weights answers as in float32."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import formats
import pytest

from mla_router.worker.model.quantization.choose import ONLINE


@pytest.mark.parametrize(
    "quantized",
    # FP8 caches alone have tests of their own.
    [["w8a8_int8"], pytest.param([*ONLINE, "fp8_kv_fp8_e4m3"], marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_formats_of_the_small_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quantized: list[str]
) -> None:
    """Random weights show that a loss would be seen."""
    monkeypatch.setitem(formats.FORMATS, "random", {"load_format": "dummy"})
    sizes = ["--num-questions=8", "--num-shots=1", "--num-samples=2", "--new-tokens=48"]
    names = [formats.PLAIN, *quantized, "random"]
    words = ["formats.py", "--formats", *names, *sizes, f"--out={tmp_path / 'out'}"]
    monkeypatch.setattr(sys, "argv", words)
    assert formats.main() == 1
    lines = map(json.loads, (tmp_path / "out").read_text().splitlines())
    found = {line["config"]["format"]: line for line in lines}
    assert list(found) == names
    plain, random = found.pop(formats.PLAIN), found.pop("random")
    assert plain["accuracy"] == 1.0 and plain["kl"] < 1e-8
    assert random["accuracy"] == 0.0 and random["kl"] > 1
    for line in found.values():
        assert line["accuracy"] >= 7 / 8
        assert 1e-6 < line["kl"] < 0.05, line
