"""bench/accuracy/mtp.py: guesses are of tokens that are not known yet, and trained weights matter."""

from __future__ import annotations

import torch
from mtp import drafted
from tokenizers import Tokenizer

from mla_router.worker.config import SMALL_MODEL
from mla_router.worker.model.dummy import fill_dummy
from mla_router.worker.model.loader import load_model, load_mtp

QUESTION = (
    "<｜begin▁of▁sentence｜><｜User｜>Sort these words: tiger, apple, rocket, anchor<｜Assistant｜>"
)
ANSWER = "anchor, apple, rocket, tiger<｜end▁of▁sentence｜>"


def test_the_mtp_layer_of_the_small_model_agrees_with_it_and_random_weights_do_not() -> None:
    tokenizer = Tokenizer.from_file(str(SMALL_MODEL / "tokenizer.json"))
    prompt, answer = (
        tokenizer.encode(text, add_special_tokens=False).ids for text in (QUESTION, ANSWER)
    )
    model = load_model(SMALL_MODEL, device="cpu", dtype=torch.float32)
    mtp = load_mtp(model, SMALL_MODEL)
    said, guesses = drafted(model, mtp, prompt, len(answer))
    assert said == answer
    assert len(guesses) == len(answer) - 1
    accepted = sum(a == b for a, b in zip(said[1:], guesses, strict=True))
    assert accepted >= 0.7 * len(guesses), (said, guesses)

    fill_dummy(mtp)
    said, guesses = drafted(model, mtp, prompt, len(answer))
    assert said == answer
    accepted = sum(a == b for a, b in zip(said[1:], guesses, strict=True))
    assert accepted <= 0.3 * len(guesses), (said, guesses)
