"""The exchange of rows among DP ranks, over gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mla_router.worker.kernels.comm.group import Group
from mla_router.worker.kernels.weight import PLAIN_ROWS, RowForm
from mla_router.worker.model.exchange import Exchange
from support.exchanged_experts import FORM, both_ways, sent_quantized
from support.ranks import ranks
from support.tiny_model import CONFIGS, raw_config, write_tiny_model


@pytest.mark.parametrize("counts", [(4, 4), (7, 2), (0, 8)])
def test_experts_get_the_quantized_rows_of_all_ranks(
    tmp_path: Path, counts: tuple[int, int]
) -> None:
    """The gate chooses by rows that are not rounded."""
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    for result, expected in ranks(2).call(sent_quantized, tmp_path, counts):
        assert result.shape == expected.shape
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_other_rows_are_sent_plain() -> None:
    rows = torch.ones(5, 8)
    exchange = Exchange(None, Group.alone(), (5,))
    assert exchange.sends_quantized(rows, FORM)
    for form in (PLAIN_ROWS, RowForm(plain=True, quantized=torch.float8_e4m3fn)):
        assert not exchange.sends_quantized(rows, form)


@pytest.mark.parametrize("form", [PLAIN_ROWS, FORM])
def test_rows_that_go_to_the_ranks_of_their_experts(tmp_path: Path, form: RowForm) -> None:
    """They have the results of rows that are gathered, plain or quantized."""
    (tmp_path / "config.json").write_text(json.dumps(raw_config(CONFIGS["v3"])))
    processes = ranks(2)
    for counts in ((5, 3), (4, 4)):
        found = processes.call(both_ways, tmp_path, counts, torch.float32, form)
        for gathered, sent, was_quantized in found:
            assert was_quantized == (form.quantized is not None)
            torch.testing.assert_close(sent, gathered, rtol=1e-5, atol=1e-6)
