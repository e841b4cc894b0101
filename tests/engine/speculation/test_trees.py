"""Trees of drafts give the tokens of the same engine without drafts, and are those of EAGLE-2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mla_router.worker.engine.engine import Engine
from mla_router.worker.generation import SamplingParams
from mla_router.worker.messages import Abort, Generate, ToScheduler
from mla_router.worker.step.plan import Admitted, PrefillChunk, StepPlan
from support.drafted_runs import NOISE_ALONE, Outcome, engine_of, mixed_script, outcome_of
from support.forcing_grammars import FORCING
from support.tiny_drafter import write_tiny_drafter
from support.tiny_eagle import PaperEagle
from support.tiny_mtp import PaperMtp


@pytest.fixture(scope="module", params=["llama_gqa", "v3"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a head for it, or with a model that has a layer of its own."""
    path = tmp_path_factory.mktemp("trees")
    write_tiny_drafter(path, request.param)
    return path


def engine_with_trees(
    folders: Path, shape: tuple[int, int, int], pages: int = 120, **settings: Any
) -> Engine:
    topk, depth, nodes = shape
    if (folders / "eagle").exists():
        settings["speculative_algorithm"] = "EAGLE"
        settings["speculative_draft_model_path"] = str(folders / "eagle")
    return engine_of(
        folders / "model",
        depth,
        pages,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=nodes,
        **settings,
    )


@pytest.mark.parametrize(
    ("shape", "overlap", "pages"),
    [
        pytest.param((4, 3, 8), True, 120, marks=pytest.mark.slow),
        ((4, 3, 16), False, 13),
        ((3, 4, 16), True, 13),
    ],
    ids=["8 nodes", "16 nodes, no overlap, little memory", "depth 4, little memory"],
)
def test_every_request_has_the_same_tokens(
    folders: Path, shape: tuple[int, int, int], overlap: bool, pages: int
) -> None:
    seed = shape[2]
    expected = outcome_of(mixed_script(seed, 16), engine_of(folders / "model", 0))
    got = outcome_of(
        mixed_script(seed, 16),
        engine_with_trees(folders, shape, pages),
        overlap=overlap,
        chunk_size=24,
        schedule_conservativeness=0.01,
    )
    _check_same(got, expected)
    assert got.stats.accepted_tokens > 20, got.stats
    assert (got.stats.retracted > 0) == (pages < 100), got.stats


def test_drafts_are_accepted_under_a_grammar(folders: Path) -> None:
    """Of a tree the chain of its best nodes, where the grammar forces no token."""
    sampling = SamplingParams(41, temperature=NOISE_ALONE, seed=3)
    request = Generate("a", [5, 6, 7], sampling, grammar=FORCING)
    expected = outcome_of({0: [request]}, engine_of(folders / "model", 0))
    got = outcome_of({0: [request]}, engine_with_trees(folders, (4, 3, 8)))
    assert got.tokens == expected.tokens
    assert got.stats.accepted_tokens > 2, got.stats
    assert got.stats.steps < expected.stats.steps


def test_aborts(folders: Path) -> None:
    """Requests beside aborted ones, which leave their slot in any step, have the same tokens."""

    def script() -> dict[int, list[ToScheduler]]:
        messages = mixed_script(3, 12)
        for at, rid in enumerate([m.rid for some in messages.values() for m in some][::3]):
            messages.setdefault(4 + 3 * at, []).append(Abort(rid))
        return messages

    expected = outcome_of(script(), engine_of(folders / "model", 0))
    got = outcome_of(script(), engine_with_trees(folders, (4, 3, 8)), chunk_size=24)
    for rid, tokens in expected.tokens.items():
        shared = min(len(tokens), len(got.tokens[rid]))
        assert got.tokens[rid][:shared] == tokens[:shared]
    assert "abort" in got.reasons.values()


def test_a_tree_is_that_of_the_paper(folders: Path, tmp_path: Path) -> None:
    """Behind a prompt, the tree of the largest joint confidence of the drafter in float64."""
    topk, depth, nodes = shape = (3, 3, 12)
    engine = engine_with_trees(folders, shape)
    prompt = tuple(range(5, 30))
    chunk = PrefillChunk(0, 0, prompt, is_last=True)
    pages = tuple((0, index, index + 1) for index in range(4))
    admitted = (Admitted(0, SamplingParams(20), prompt),)
    plan = StepPlan((), (), (chunk,), pages, admitted, feeds_drafter=True, draft_bounds=(60,))
    ((first,),) = engine.sample(engine.forward(plan)).wait().tokens
    paper: PaperEagle | PaperMtp
    if (folders / "eagle").exists():
        paper = PaperEagle(folders / "eagle", folders / "model")
    else:
        paper = PaperMtp(folders / "model", tmp_path / "deeper")
    confidences: dict[tuple[int, ...], float] = {}
    beam: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        grown = dict[tuple[int, ...], float]()
        for path in beam:
            best = paper.behind([*prompt, first], path).topk(topk)
            for token, share in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                grown[(*path, token)] = confidences.get(path, 0.0) + share
        confidences |= grown
        beam = sorted(grown, key=grown.__getitem__, reverse=True)[:topk]
    expected = sorted(confidences, key=confidences.__getitem__, reverse=True)[: nodes - 1]
    assert sorted(paths_of(engine, 0)) == sorted(expected)


def paths_of(engine: Engine, slot: int) -> list[tuple[int, ...]]:
    """Returns the tokens from the root to each node of the tree of a slot."""
    assert engine.slots.tree is not None
    parents = engine.slots.tree.trees.parents[slot].tolist()
    paths: list[tuple[int, ...]] = [()]
    for parent, token in zip(parents[1:], engine.slots.drafts[slot].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_any_path_is_accepted(folders: Path, kv_cache_dtype: str) -> None:
    """Each path of a tree whose tokens are the model's is accepted, wherever its nodes are, and the steps behind it go on."""
    shape = (3, 3, 12)
    plain = engine_of(folders / "model", 0, kv_cache_dtype=kv_cache_dtype)
    prompt, length = tuple(range(5, 30)), 25
    pages = tuple((0, index, index + 1) for index in range(4))
    admitted = (Admitted(0, SamplingParams(30), prompt),)
    chunk = PrefillChunk(0, 0, prompt, is_last=True)
    start = StepPlan((), (), (chunk,), pages, admitted)
    expected = [plain.sample(plain.forward(start)).wait().tokens[0][0]]
    for bound in range(length + 1, length + 20):
        result = plain.sample(plain.forward(StepPlan((0,), (bound,), (), (), ()))).wait()
        expected += result.tokens[0]
    for places in ([1, 2, 3], [11, 4, 9], [6, 5]):
        engine = engine_with_trees(folders, shape, kv_cache_dtype=kv_cache_dtype)
        got = engine.sample(engine.forward(start)).wait().tokens[0]
        while len(got) < 12:
            bound = min(length + len(got) + 3, 60)
            _plant(engine, expected[len(got) :], places)
            plan = StepPlan((0,), (bound,), (), (), (), num_drafts=3, tree_nodes=12)
            found = engine.sample(engine.forward(plan)).wait().tokens[0]
            assert len(found) == len(places) + 1
            got += found
        assert got == expected[: len(got)]


def _plant(engine: Engine, tokens: list[int], places: list[int]) -> None:
    """Writes a tree to slot 0 of which the nodes at `places` are a path of `tokens`, all others being wrong."""
    assert engine.slots.tree is not None
    trees, vocab = engine.slots.tree.trees, engine.model.config.vocab_size
    wrong = [token for token in range(vocab) if token not in tokens]
    engine.slots.drafts[0] = torch.tensor(wrong[: engine.slots.drafts.shape[1]])
    trees.parents[0], trees.depths[0, 1:] = 0, 1
    bits: list[int] = [1 | 1 << node for node in range(trees.parents.shape[1])]
    parent = 0
    for depth, (place, token) in enumerate(zip(places, tokens, strict=False), 1):
        engine.slots.drafts[0, place - 1] = token
        trees.parents[0, place], trees.depths[0, place] = parent, depth
        bits[place] = bits[parent] | 1 << place
        parent = place
    trees.ancestors[0] = torch.tensor(bits)


def _check_same(got: Outcome, expected: Outcome) -> None:
    assert (got.tokens, got.reasons) == (expected.tokens, expected.reasons)
    for rid, numbers in expected.logprobs.items():
        assert got.logprobs[rid] == pytest.approx(numbers, abs=1e-4), rid
