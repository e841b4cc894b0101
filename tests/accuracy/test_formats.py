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
    [["w8a8_int8"], pytest.param([*ONLINE, "fp8_kv_fp8_e4m3", "random"], marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_formats_of_the_small_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quantized: list[str]
) -> None:
    """Random weights, in the slow case, show that a loss would be seen."""
    monkeypatch.setitem(formats.FORMATS, "random", {"load_format": "dummy"})
    sizes = ["--num-questions=8", "--num-shots=1", "--num-samples=2", "--new-tokens=48"]
    names = [formats.PLAIN, *quantized]
    words = ["formats.py", "--formats", *names, *sizes, f"--out={tmp_path / 'out'}"]
    monkeypatch.setattr(sys, "argv", words)
    assert formats.main() == ("random" in quantized)
    lines = map(json.loads, (tmp_path / "out").read_text().splitlines())
    found = {line["config"]["format"]: line for line in lines}
    assert list(found) == names
    plain = found.pop(formats.PLAIN)
    assert plain["accuracy"] == 1.0 and plain["kl"] < 1e-8
    if random := found.pop("random", None):
        assert random["accuracy"] == 0.0 and random["kl"] > 1
    for line in found.values():
        assert line["accuracy"] >= 7 / 8
        assert 1e-6 < line["kl"] < 0.05, line
