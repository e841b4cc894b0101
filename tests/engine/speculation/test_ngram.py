"""Drafts by look-up give the tokens of the same engine without drafts, and a right prediction is accepted."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from mla_router.worker.config import ConfigError
from mla_router.worker.generation import SamplingParams
from mla_router.worker.messages import Generate, ToScheduler
from support.drafted_runs import engine_of, mixed_script, outcome_of
from support.tiny_model import CONFIGS, VOCAB_SIZE, write_tiny_model

NGRAM = {"speculative_algorithm": "NGRAM"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ngram") / "model"
    write_tiny_model(path, **CONFIGS["v3"])
    return path


@pytest.mark.parametrize(("drafts", "overlap", "pages"), [(1, True, 120), (3, False, 14)])
def test_every_request_has_the_same_tokens(
    folder: Path, drafts: int, overlap: bool, pages: int
) -> None:
    """With little memory requests are retracted, and their tokens are taken again."""
    script = mixed_script(drafts, 16)
    for messages in script.values():
        for at, message in enumerate(messages[::2]):
            assert isinstance(message, Generate)
            prediction = [(7 * n) % VOCAB_SIZE for n in range(9)]
            messages[2 * at] = msgspec.structs.replace(message, prediction=prediction)
    expected = outcome_of(mixed_script(drafts, 16), engine_of(folder, 0))
    got = outcome_of(
        script,
        engine_of(folder, drafts, pages, **NGRAM),
        overlap=overlap,
        chunk_size=24,
        schedule_conservativeness=0.01,
    )
    assert (got.tokens, got.reasons) == (expected.tokens, expected.reasons)
    assert got.stats.draft_tokens > 0
    assert (got.stats.retracted > 0) == (pages < 100), got.stats


def test_predictions(folder: Path) -> None:
    """A right prediction is accepted whole. Behind a wrong token, and after left-out ones, it is found again."""

    def script(*predictions: list[int]) -> dict[int, list[ToScheduler]]:
        sampling = SamplingParams(41, temperature=1.0, seed=5)
        return {
            2 * n: [Generate(f"r{n}", [5, 6, 7], sampling, prediction=prediction)]
            for n, prediction in enumerate(predictions)
        }

    (answer,) = outcome_of(script([]), engine_of(folder, 0)).tokens.values()
    assert len(answer) == 41 and len(set(answer)) > 20  # its tokens are told apart
    engine = engine_of(folder, 3, **NGRAM)
    right = outcome_of(script(answer), engine)
    assert right.tokens == {"r0": answer}
    # The first token is of the prompt; ten steps of four tokens follow
    assert (right.stats.draft_steps, right.stats.accepted_tokens) == (10, 30)
    spoilt = [*answer[:10], (answer[10] + 1) % VOCAB_SIZE, *answer[11:20], *answer[24:]]
    both = outcome_of(script(spoilt, answer), engine)
    assert both.tokens == {"r0": answer, "r1": answer}
    assert 40 < both.stats.accepted_tokens < 60, both.stats


def test_models_with_window_pages_are_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **CONFIGS["gemma2"])
    with pytest.raises(ConfigError, match="NGRAM: not for models"):
        engine_of(tmp_path, 1, **NGRAM)
