"""Speculative decoding gives the tokens of the same engine without drafts, for every kind of request in one batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from mla_router.worker.config import SMALL_MODEL
from mla_router.worker.generation import SamplingParams
from mla_router.worker.messages import Generate, ToScheduler
from support.drafted_runs import NOISE_ALONE, engine_of, mixed_script, outcome_of
from support.forcing_grammars import FORCING
from support.tiny_drafter import write_tiny_drafter
from support.tiny_model import CONFIGS, VOCAB_SIZE
from support.tiny_mtp import export_nextn, write_tiny_mtp


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mtp") / "model"
    write_tiny_mtp(path, 1, **CONFIGS["v3"])
    return path


@pytest.mark.parametrize(
    ("drafts", "overlap", "pages"),
    [(1, True, 120), pytest.param(2, False, 14, marks=pytest.mark.slow), (3, True, 13)],
    ids=["1 draft", "2 drafts, no overlap, little memory", "3 drafts, little memory"],
)
def test_every_request_has_the_same_tokens(
    folder: Path, drafts: int, overlap: bool, pages: int
) -> None:
    expected = outcome_of(mixed_script(drafts, 16), engine_of(folder, 0))
    got = outcome_of(
        mixed_script(drafts, 16),
        engine_of(folder, drafts, pages),
        overlap=overlap,
        chunk_size=24,
        schedule_conservativeness=0.01,
    )
    assert got.tokens == expected.tokens
    assert got.reasons == expected.reasons
    for rid, numbers in expected.logprobs.items():
        assert got.logprobs[rid] == pytest.approx(numbers, abs=1e-4), rid
    assert got.stats.accepted_tokens > 20, got.stats
    assert (got.stats.retracted > 0) == (pages < 100), got.stats
    assert expected.stats.draft_steps == 0


def test_noise_alone_is_drafted_right(folder: Path) -> None:
    """A draft is drawn with the noise of the token that it stands for."""
    script: dict[int, list[ToScheduler]] = {0: [], 4: []}
    for at, rid in ((0, "a"), (0, "b"), (4, "c")):
        sampling = SamplingParams(41, temperature=NOISE_ALONE, seed=ord(rid))
        script[at].append(Generate(rid, [5, 6, 7, ord(rid) % VOCAB_SIZE], sampling))
    found = outcome_of(script, engine_of(folder, 3))
    # The first token is of the prompt; ten steps of four tokens follow
    assert (found.stats.draft_steps, found.stats.draft_tokens) == (3 * 10, 3 * 30)
    assert found.stats.accepted_tokens == 3 * 30


@pytest.mark.parametrize("overlap", [True, False])
def test_drafts_are_accepted_under_a_grammar(folder: Path, overlap: bool) -> None:
    """Where it forces no token, as those of any other request."""
    sampling = SamplingParams(41, temperature=NOISE_ALONE, seed=3)
    request = Generate("a", [5, 6, 7], sampling, grammar=FORCING)
    expected = outcome_of({0: [request]}, engine_of(folder, 0))
    got = outcome_of({0: [request]}, engine_of(folder, 3), overlap=overlap)
    assert got.tokens == expected.tokens
    assert got.stats.accepted_tokens > 2, got.stats
    assert got.stats.steps < expected.stats.steps


@pytest.mark.parametrize("name", ["llama_gqa", "llama_mha"])
def test_eagle(tmp_path: Path, name: str) -> None:
    eagle = {"speculative_draft_model_path": str(write_tiny_drafter(tmp_path, name))}
    expected = outcome_of(mixed_script(5, 16), engine_of(tmp_path / "model", 0))
    drafting = engine_of(tmp_path / "model", 3, speculative_algorithm="EAGLE", **eagle)
    got = outcome_of(mixed_script(5, 16), drafting, chunk_size=24)
    assert (got.tokens, got.reasons) == (expected.tokens, expected.reasons)
    assert got.stats.accepted_tokens > 20, got.stats


def test_a_layer_in_a_folder_of_its_own_drafts_the_same(folder: Path, tmp_path: Path) -> None:
    nextn = {"speculative_draft_model_path": str(export_nextn(folder, tmp_path / "nextn"))}
    expected = outcome_of(mixed_script(5, 8), engine_of(folder, 2))
    got = outcome_of(mixed_script(5, 8), engine_of(folder, 2, **nextn))
    assert got == expected


def test_the_shipped_model_accepts_its_own_drafts() -> None:
    """The first draft of its trained layer is accepted more often than not, and no token changes."""
    tokenizer = Tokenizer.from_file(str(SMALL_MODEL / "tokenizer.json"))

    def script() -> dict[int, list[ToScheduler]]:
        requests: list[ToScheduler] = []
        for n in range(4):
            prompt = tokenizer.encode(f"Question: What is {17 + n} + {25 + 3 * n}? Answer:").ids
            requests.append(Generate(f"r{n}", prompt, SamplingParams(32)))
        return {0: requests}

    expected = outcome_of(script(), engine_of(SMALL_MODEL, 0))
    got = outcome_of(script(), engine_of(SMALL_MODEL, 2))
    assert got.tokens == expected.tokens
    assert got.stats.accepted_tokens > got.stats.draft_steps / 2, got.stats
