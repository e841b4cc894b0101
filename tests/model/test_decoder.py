"""The rows of a step that go through the last layer, and through experts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_router.worker.kernels.moe.routing import moe_routing
from mla_router.worker.model import moe
from mla_router.worker.model.config.deepseek import DeepseekConfig
from mla_router.worker.model.loader import load_model
from support.forward_driver import ForwardDriver
from support.tiny_model import CONFIGS, VOCAB_SIZE, write_tiny_model

TOKENS = random.Random(3).choices(range(VOCAB_SIZE), k=60)


@pytest.mark.parametrize("rows", [[59], [0, 17, 39, 40, 59], []], ids=str)
@pytest.mark.parametrize("name", ["v2_lite", "v3", "llama_gqa"])
def test_only_rows_whose_output_is_wanted_are_fed_forward_at_last(
    tmp_path: Path, name: str, rows: list[int]
) -> None:
    """Their hidden states are the same as if all rows were computed, and so are later tokens that attend to all rows."""
    write_tiny_model(tmp_path, **CONFIGS[name])
    model = load_model(tmp_path, device="cpu", dtype=torch.float32)
    fed: list[int] = []

    model.model.last.mlp.register_forward_hook(lambda _layer, _given, out: fed.append(len(out)))
    drivers = [ForwardDriver(model, page_size=16) for _ in range(2)]
    chunks = [(1, TOKENS[:40]), (0, TOKENS[40:])]
    of_all, of_some = (driver.batch(chunks=chunks) for driver in drivers)
    expected = model(of_all, drivers[0].caches)[rows]
    with torch.inference_mode():
        launched = model.model.run_layers(of_some, drivers[1].caches)
        got = model.model.finish(*launched, torch.tensor(rows).long())
    assert fed == [60, *([len(rows)] if rows else [])]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    after = [driver.step({0: 5, 1: 7}) for driver in drivers]
    torch.testing.assert_close(after[1], after[0], rtol=0, atol=0)


def test_idle_rows_are_not_routed_in_any_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A padding row of a captured step, in page 0, does not change the two decode rows beside it."""
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    model = load_model(tmp_path, device="cpu", dtype=torch.float32)
    drivers = [ForwardDriver(model, page_size=16) for _ in range(2)]
    for driver in drivers:
        for cache in driver.caches:
            cache[0] = 0.0
        driver.page_table[3] = 0  # the idle slot's
        driver.step(chunks=[(0, TOKENS[:20]), (1, TOKENS[20:50])])
    expected = drivers[0].step({0: 5, 1: 7})

    chosen: list[torch.Tensor] = []

    def spy(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = moe_routing(*given, **named)
        chosen.append(ids)
        return weights, ids

    monkeypatch.setattr(moe, "moe_routing", spy)
    batch = drivers[1].batch({0: 5, 1: 7, 3: 0})
    assert batch.out_cache_loc.tolist()[2] == 0
    with torch.inference_mode():
        got = model.logits(model(batch, drivers[1].caches)).log_softmax(dim=-1)
    torch.testing.assert_close(got[:2], expected, rtol=1e-5, atol=1e-6)
    config = model.config
    assert isinstance(config, DeepseekConfig)
    assert len(chosen) == config.num_layers - config.num_dense_layers > 0
    for ids in chosen:
        assert (ids[2] == -1).all() and (ids[:2] >= 0).all()
