"""One rank of several without the others: the loopback group, and the bench on a small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loopback import Link, LoopbackGroup, random_rows
from simulated_rank import Depths
from support.processes import ROOT
from support.tiny_model import CONFIGS, write_tiny_model

LINK = Link(bytes_per_s=100e9, latency_s=5e-6)


def test_each_byte_of_other_ranks_passes_the_link_once() -> None:
    assert LINK.gather_s(8_000_000, 8) == pytest.approx(5e-6 + 70e-6)
    assert LINK.all_reduce_s(8_000_000, 8) == pytest.approx(5e-6 + 140e-6)


def test_rows_of_other_ranks_are_random_and_have_their_sizes() -> None:
    group = LoopbackGroup(4, LINK, random_rows(4, 6, 32, torch.float32, torch.device("cpu")))
    for counts in ((3, 3, 3, 3), (2, 0, 6, 1), (6, 6, 6, 6), (0, 5, 1, 2)):
        own = torch.full((counts[0], 32), 7.0)
        rows = group.gather_rows(own, counts)
        assert rows.shape == (sum(counts), 32)
        assert torch.equal(rows[: counts[0]], own)
        others = rows[counts[0] :]
        assert len(torch.unique(others)) == others.numel(), "own rows of an earlier call"
        assert 0.5 < others.std() < 1.5
        assert torch.equal(group.scatter_rows(rows, counts), own)


def test_other_collectives_repeat_what_this_rank_has() -> None:
    group = LoopbackGroup(3, LINK, torch.empty(3, 2))
    x = torch.arange(4.0).view(2, 2)
    assert torch.equal(group.all_reduce(x), torch.arange(4.0).view(2, 2))
    assert torch.equal(group.all_gather(x, 0), x.repeat(3, 1))
    assert group.all_gather(x[0, :1], 0).is_contiguous(), "kernels expect the layout of real ones"
    assert torch.equal(group.all_gather(x, 1), x.repeat(1, 3))
    assert group.waited_s == pytest.approx(
        15e-6 + (4 / 3 + 2 * 2) * 16 / 100e9 + 5e-6 + 2 / 3 * 12 / 100e9
    )


def test_layers_that_are_not_there_cost_as_much_as_the_last_ones() -> None:
    whole, layer = Depths(measured=9, left=5, whole=61).extrapolate(10.0, 6.0)
    assert (whole, layer) == (62.0, 1.0)


@pytest.mark.slow
def test_one_rank_of_four_of_a_small_model(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", **CONFIGS["v3"])
    command = [sys.executable, ROOT / "bench" / "serving" / "simulated_rank.py"]
    command += ["--model-path", tmp_path / "model", "--device", "cpu", "--out", tmp_path / "out"]
    command += ["--ranks", "4", "--layers", "2", "--attention", "dp", "tp", "--cpu-threads", "1"]
    command += ["--batch-size", "3", "--input-len", "20", "--prefill-tokens", "40"]
    done = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True)
    assert "simulated: DP attention against TP attention, 3 requests a rank: " in done.stdout
    assert "simulated: 2 of 3 layers measured, the others extrapolated" in done.stdout
    line = json.loads((tmp_path / "out").read_text())
    assert line["simulated"] is True
    steps = [(row["attention"], row["step"], row["requests_a_rank"]) for row in line["rows"]]
    of_one = [("decode", 3), ("prefill", 0)]
    assert steps == [(attention, *step) for attention in ("dp", "tp") for step in of_one]
