"""The rows of drafts are sampled as steps of one token would be."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from mla_router.worker.engine.sampling.drafted_rows import DraftedRows, SlotTokens
from mla_router.worker.engine.sampling.sampler import Sampler
from mla_router.worker.generation import SamplingParams
from mla_router.worker.kernels.kv_cache.tree_rows import Trees
from mla_router.worker.step.plan import Admitted, StepPlan
from mla_router.worker.step.result import UNUSED

V, SLOTS, DRAFTS, STEPS = 24, 3, 3, 8
# Penalties that change most draws of a vocabulary so small, and a greedy request
SAMPLING = (
    SamplingParams(99, temperature=1.0, seed=5, frequency_penalty=1.5, presence_penalty=0.5),
    SamplingParams(99, temperature=0.7, seed=6, repetition_penalty=3.0, top_k=9),
    SamplingParams(99, repetition_penalty=2.0, logit_bias=((3, 2.5),)),
)
PROMPTS = ([1, 2, 3], [4, 4], [5])


class State:
    """A sampler with the state of its slots."""

    def __init__(self) -> None:
        self.sampler = Sampler(SLOTS, V, torch.device("cpu"), DRAFTS)
        rows = zip(SAMPLING, PROMPTS, strict=True)
        self.sampler.admit(
            tuple(Admitted(n, some, prompt) for n, (some, prompt) in enumerate(rows))
        )
        self.lengths = torch.tensor([len(prompt) for prompt in PROMPTS], dtype=torch.int32)
        self.last_token = torch.zeros(SLOTS, dtype=torch.int64)

    def step(self, model: Tensor, drafts: list[list[int]] | None = None) -> list[list[int]]:
        """Returns the tokens that each slot gains. `model` [slots, positions, V]: logits by the position of the token."""
        each = 1 + (DRAFTS if drafts else 0)
        slots = torch.arange(SLOTS)
        positions = self.lengths[:, None] + torch.arange(each)
        logits = model[slots[:, None], positions].reshape(-1, V)
        bounds = tuple((self.lengths + each - 1).tolist())
        plan = StepPlan(tuple(range(SLOTS)), bounds, (), (), (), num_drafts=each - 1)
        out = torch.empty(SLOTS, each, dtype=torch.int32)
        self.sampler.sample(
            logits,
            slots,
            plan,
            None,
            tokens=SlotTokens(
                self.lengths,
                self.last_token,
                torch.tensor(drafts or [[0] * DRAFTS] * SLOTS),
            ),
            out=out,
        )
        return [[token for token in row if token != UNUSED] for row in out.tolist()]


@pytest.mark.parametrize("seed", range(4))
def test_penalties_count_the_drafts_in_front_of_a_row(seed: int) -> None:
    rng = random.Random(seed)
    longest = max(map(len, PROMPTS)) + STEPS * (1 + DRAFTS)
    model = 2 * torch.randn(SLOTS, longest, V, generator=torch.Generator().manual_seed(seed))
    single, given = State(), [list[int]() for _ in range(SLOTS)]
    for _ in range(STEPS * (1 + DRAFTS) - DRAFTS):
        for text, tokens in zip(given, single.step(model), strict=True):
            text += tokens
    drafting, got = State(), [list[int]() for _ in range(SLOTS)]
    sizes = set()
    for _ in range(STEPS - 1):
        drafts = []
        for text, so_far in zip(given, got, strict=True):
            right = rng.randint(0, DRAFTS)
            following = text[len(so_far) : len(so_far) + right]
            wrong = [(text[len(so_far) + i] + 1) % V for i in range(right, DRAFTS)]
            drafts.append(following + wrong)
        for text, tokens in zip(got, drafting.step(model, drafts), strict=True):
            text += tokens
            sizes.add(len(tokens))
    assert sizes == set(range(1, 2 + DRAFTS))
    for text, drafted in zip(given, got, strict=True):
        assert drafted == text[: len(drafted)]
    # The counts are those of the text: steps without drafts go on with it
    for _ in range(2):
        for slot, tokens in enumerate(drafting.step(model)):
            got[slot] += tokens
    for text, drafted in zip(given, got, strict=True):
        assert drafted == text[: len(drafted)]


def test_the_drafts_in_front_of_a_node_are_its_path_from_the_root() -> None:
    parents = [[0, 0, 0, 1, 3], [0, 0, 1, 1, 2]]
    drafts = torch.arange(8).reshape(2, 4)

    def path(slot: int, node: int) -> list[int]:
        return [*path(slot, parents[slot][node]), node] if node else []

    nodes = [(slot, node) for slot in range(2) for node in range(5)]
    paths = [path(*node) for node in nodes]
    depths = torch.tensor([len(one) for one in paths])
    ancestors = torch.tensor([1 + sum(1 << node for node in one) for one in paths])
    trees = Trees(torch.tensor(parents), depths.reshape(2, 5), ancestors.reshape(2, 5))
    slots, numbers = torch.tensor(nodes).T
    rows = DraftedRows(slots, numbers, depths, depths, slots, drafts, trees)
    ahead = rows.ahead(torch.arange(10))
    counted = [t[n > 0].tolist() for t, n in zip(ahead.tokens, ahead.counts, strict=True)]
    assert counted == [
        [int(drafts[slot, node - 1]) for node in one]
        for (slot, _), one in zip(nodes, paths, strict=True)
    ]
