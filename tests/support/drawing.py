"""Calls `sample` for rows, each of which gets a slot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mla_router.worker.step.result import NO_TOKEN

SPARE = 3  # unused slots
UNTOUCHED = -7


def with_slots(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    threshold: Tensor | None,
    *,
    out_on_host: bool = False,
) -> tuple[Any, ...]:
    """Returns the arguments of `sample` for rows of these temperatures, seeds and positions, all [R]. With `out_on_host`
    tokens go to pinned memory."""
    rows, device = len(logits), logits.device
    slots = torch.randperm(rows + SPARE, generator=torch.Generator().manual_seed(rows))
    slots = slots[:rows].to(device)
    temperatures = temperature.new_full((rows + SPARE,), 9.0)
    seeds = seed.new_full((rows + SPARE,), 99)
    lengths = torch.full((rows + SPARE,), UNTOUCHED, dtype=torch.int32, device=device)
    temperatures[slots], seeds[slots], lengths[slots] = temperature, seed, position.int()
    last_token = torch.full((rows + SPARE,), UNTOUCHED, device=device)
    where: dict[str, Any] = {"pin_memory": True} if out_on_host else {"device": device}
    out = torch.full((rows,), UNTOUCHED, dtype=torch.int32, **where)
    return logits, slots, lengths, temperatures, seeds, threshold, last_token, out


def drawn(arguments: tuple[Any, ...]) -> Tensor:
    """Waits for the device and returns the tokens [R] int64 that `sample` wrote. Asserts that both outputs agree and that
    no other slot was written."""
    slots, lengths, last_token, out = arguments[1], arguments[2], arguments[-2], arguments[-1]
    tokens: Tensor = out.to(slots.device).long()
    assert torch.equal(last_token[slots], tokens.clamp_min(0))
    assert ((tokens >= 0) | (tokens == NO_TOKEN)).all()
    assert (last_token == UNTOUCHED).sum() == (lengths == UNTOUCHED).sum() == SPARE
    return tokens


def draw(op: Any, *row_inputs: Any) -> Tensor:
    """Returns [R] int64: the tokens of `op`, a form of `sample`."""
    arguments = with_slots(*row_inputs)
    lengths, slots = arguments[2].clone(), arguments[1]
    op(*arguments)
    lengths[slots] += 1
    assert torch.equal(arguments[2], lengths)
    return drawn(arguments)
