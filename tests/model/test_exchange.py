"""The exchange of rows among DP ranks, over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mla_router.worker.kernels.comm.group import Group
from mla_router.worker.kernels.weight import PLAIN_ROWS, RowForm
from mla_router.worker.model.exchange import Exchange
from support.exchanged_experts import FORM, sent_quantized
from support.ranks import ranks
from support.tiny_model import CONFIGS, write_tiny_model


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
