"""What of a step's rows goes through the last layer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from mla_router.worker.model.loader import load_model
from support.forward_driver import ForwardDriver
from support.tiny_model import CONFIGS, VOCAB_SIZE, write_tiny_model

TOKENS = random.Random(3).choices(range(VOCAB_SIZE), k=60)


@pytest.mark.parametrize("rows", [[59], [0, 17, 39, 40, 59], []], ids=str)
@pytest.mark.parametrize("name", ["v2_lite", "v3", "llama_gqa"])
def test_only_rows_whose_output_is_wanted_are_fed_forward_at_last(
    tmp_path: Path, name: str, rows: list[int]
) -> None:
    """They come out as when all are, and so does what attends to all of them later."""
    write_tiny_model(tmp_path, **CONFIGS[name])
    model = load_model(tmp_path, device="cpu", dtype=torch.float32)
    fed: list[int] = []

    model.model.last.mlp.register_forward_hook(lambda _layer, _given, out: fed.append(len(out)))
    drivers = [ForwardDriver(model, page_size=16) for _ in range(2)]
    chunks = [(1, TOKENS[:40]), (0, TOKENS[40:])]
    of_all, of_some = (driver.batch(chunks=chunks) for driver in drivers)
    expected = model(of_all, drivers[0].cache)[rows]
    with torch.inference_mode():
        launched = model.model.run_layers(of_some, drivers[1].cache)
        got = model.model.finish(*launched, torch.tensor(rows).long())
    assert fed == [60, *([len(rows)] if rows else [])]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    after = [driver.step({0: 5, 1: 7}) for driver in drivers]
    torch.testing.assert_close(after[1], after[0], rtol=0, atol=0)
