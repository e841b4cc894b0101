"""The shared experts of a mixture, which all tokens pass through."""

from __future__ import annotations

from typing import NamedTuple

from mla_router.worker.kernels.weight import Weight


class SharedWeights(NamedTuple):
    """The weights of S shared experts, joined to one layer."""

    gate_up: Weight  # [2SI, N], all gates first
    down: Weight  # [N, SI]
