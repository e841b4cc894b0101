"""Drafts by look-up in the tokens of a request, or in its prediction, without a layer (`kernels/sampling/ngram.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mla_router.worker.engine.runners.decode_graph import DecodeGraph
from mla_router.worker.engine.runners.forward_pass import ForwardPass
from mla_router.worker.engine.speculation.drafter import DraftStep, NewDraws
from mla_router.worker.engine.upload import Upload
from mla_router.worker.generation import MAX_PREDICTION
from mla_router.worker.kernels.kv_cache.out_cache_loc import LookedUp
from mla_router.worker.kernels.sampling.ngram import draft_ngrams
from mla_router.worker.kv_cache.spec import KVCacheSpec
from mla_router.worker.step.plan import Admitted


@dataclass(frozen=True, slots=True)
class NewNgram:
    """Implements `NewDrafter`."""

    num_drafts: int
    reads_rows: bool = False

    def kv_cache_specs(self, dtype: torch.dtype) -> tuple[KVCacheSpec, ...]:
        del dtype
        return ()

    def __call__(
        self, forward_pass: ForwardPass, caches: Sequence[Tensor], draws: NewDraws
    ) -> Ngram:
        del caches, draws
        return Ngram(self.num_drafts, forward_pass)


class Ngram:
    """Implements `Drafter`. Keeps the tokens of all slots on the device: 4 bytes a token of the context length, and of
    the longest prediction."""

    follows_all_steps = True  # each step adds tokens

    def __init__(self, num_drafts: int, forward_pass: ForwardPass) -> None:
        capacity, device = forward_pass.capacity, forward_pass.device
        self._slots = forward_pass.slots
        slots = self._slots.idle_slot + 1
        self._history = capacity.context_length + num_drafts + 1
        self._most = min(capacity.context_length, MAX_PREDICTION)
        width = self._history + self._most
        self._text = torch.zeros(slots, width, dtype=torch.int32, device=device)
        self._starts, self._predicted = torch.zeros(2, slots, dtype=torch.int32, device=device)
        self._upload = Upload(device)

    def admit(self, requests: Sequence[Admitted]) -> None:
        numbers = [(r.slot, len(r.prompt), min(len(r.prediction), self._most)) for r in requests]
        owners, starts, predicted = np.array(numbers, dtype=np.int64).T
        texts = [np.array([*r.prompt, *r.output], dtype=np.int32) for r in requests]
        predictions = [np.array(r.prediction[: self._most], dtype=np.int32) for r in requests]
        on_device = self._upload(
            [owners, starts.astype(np.int32), predicted.astype(np.int32), *texts, *predictions]
        )
        slots, *own = on_device[:3]
        self._starts.index_copy_(0, slots, own[0])
        self._predicted.index_copy_(0, slots, own[1])
        count = len(requests)
        for request, text, prediction in zip(
            requests, on_device[3 : 3 + count], on_device[3 + count :], strict=True
        ):
            row = self._text[request.slot]
            row[: len(text)].copy_(text)
            if len(prediction):
                row[self._history : self._history + len(prediction)].copy_(prediction)

    def capture(self, decode_graphs: Sequence[DecodeGraph], sizes: Sequence[int]) -> None:
        del decode_graphs, sizes  # one kernel needs no graph

    def launch(self, rows: LookedUp, hidden_states: Tensor, queries: int) -> None:
        del rows, hidden_states, queries  # sampled steps at the start launch it

    def draft(self, step: DraftStep) -> None:
        draft_ngrams(
            step.tokens,
            step.forward.slots,
            step.sampled.last,
            self._slots.lengths,
            self._starts,
            self._predicted,
            self._text,
            self._slots.drafts,
            decodes=len(step.plan.decode_slots),
            rows=step.plan.rows_per_decode,
            history=self._history,
        )
