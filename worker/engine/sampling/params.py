"""The numbers of each request's `SamplingParams` on the device, indexed by request slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from mla_router.worker.engine.upload import Upload
from mla_router.worker.step.plan import Admitted

_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
_INTS = ("top_k", "seed")


@dataclass(frozen=True, slots=True)
class RowSamplingParams:
    """The parameters of R rows: each [R] float32, but top_k and seed int64."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    frequency_penalty: Tensor
    presence_penalty: Tensor
    top_k: Tensor
    seed: Tensor


class SlotSamplingParams:
    """The parameters of all S slots."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._floats = torch.zeros(len(_FLOATS), num_slots, dtype=torch.float32, device=device)
        self._ints = torch.zeros(len(_INTS), num_slots, dtype=torch.int64, device=device)
        self._upload = Upload(device)

    @property
    def temperature(self) -> Tensor:
        """[S] float32."""
        return self._floats[_FLOATS.index("temperature")]

    @property
    def seed(self) -> Tensor:
        """[S] int64."""
        return self._ints[_INTS.index("seed")]

    def admit(self, requests: Sequence[Admitted]) -> None:
        floats, ints = attrgetter(*_FLOATS), attrgetter(*_INTS)
        slots, new_floats, new_ints = self._upload(
            [
                np.array([r.slot for r in requests], dtype=np.int64),
                np.array([floats(r.sampling) for r in requests], dtype=np.float32).T,
                np.array([ints(r.sampling) for r in requests], dtype=np.int64).T,
            ]
        )
        self._floats.index_copy_(1, slots, new_floats)
        self._ints.index_copy_(1, slots, new_ints)

    def of(self, slots: Tensor) -> RowSamplingParams:
        """Returns the parameters of `slots` [R] int64."""
        return RowSamplingParams(
            *self._floats.index_select(1, slots).unbind(),
            *self._ints.index_select(1, slots).unbind(),
        )
