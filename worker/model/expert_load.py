"""The load of routed experts: the token-expert pairs of each one, counted on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.moe import Gate
from mla_router.worker.model.parallel.placement import Placement, balancedness


def count_experts(model: CausalLM) -> Tensor:
    """Lets the gates of `model` count. Returns the counts [layers, experts] int64 on its device, to which each step adds;
    layers without experts have zeros. Must run before graphs are captured, for a model with routed experts."""
    gates = {
        index: gate
        for index, layer in enumerate(model.model.layers)
        for gate in layer.modules()
        if isinstance(gate, Gate)
    }
    weight = next(iter(gates.values())).weight
    counts = torch.zeros(
        len(model.model.layers), len(weight), dtype=torch.int64, device=weight.device
    )
    for index, gate in gates.items():
        gate.counts = counts[index]
    model.expert_counts = counts
    return counts


class ExpertLoad:
    """Reads the counts of a model."""

    def __init__(self, counts: Tensor, placement: Placement) -> None:
        """`counts`: of `count_experts`, which begin at zero again."""
        counts.zero_()
        self._counts = counts
        self._placement = placement
        self._host = torch.zeros_like(counts, device="cpu", pin_memory=counts.is_cuda)
        self._before = self._host.clone()
        self._copied: torch.cuda.Event | None = None
        self._balancedness = 0.0

    def read(self) -> list[list[int]]:
        """Returns the counts [layers][experts] since the start. Waits for the steps that are launched."""
        counts: list[list[int]] = self._counts.tolist()
        return counts

    def balancedness(self) -> float:
        """Returns the `balancedness` of the ranks between two earlier calls; 0 before it is known. Does not wait for the
        device: a call starts a copy of the counts, which a later one reads."""
        if self._copied is not None and not self._copied.query():  # type: ignore[no-untyped-call]
            return self._balancedness
        pairs = self._host - self._before
        if pairs.any():
            self._balancedness = balancedness(self._placement.loads(pairs))
            self._before = self._host.clone()
        self._host.copy_(self._counts, non_blocking=True)
        if self._counts.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        return self._balancedness
