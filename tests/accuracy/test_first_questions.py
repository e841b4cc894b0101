"""bench/accuracy/first_questions.py: training never sees these questions, and the shipped model knows them."""

from __future__ import annotations

import random

import pytest
import torch
from batches import Rows
from first_questions import (
    FIRST_QUESTIONS,
    FRESH_QUESTIONS,
    HELD_OUT,
    TAUGHT,
    FirstQuestion,
    asks_held_out,
    normalized,
)
from tasks.example import chat, completion
from tasks.facts import CAPITAL_FORMS, CAPITALS, FACTS
from tokenizers import Tokenizer

from mla_router.worker.config import SMALL_MODEL
from mla_router.worker.model.loader import load_model
from support.forward_driver import ForwardDriver

EOS_ID = 1
SHARE = 0.95  # at least; the shipped weights know 192 of 200, and 28 of the 29 fresh ones


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(SMALL_MODEL / "tokenizer.json"))


def test_each_is_recognized_in_any_case_and_punctuation() -> None:
    assert (len(FIRST_QUESTIONS), len(HELD_OUT)) == (200, 229)
    for question in (*FIRST_QUESTIONS, *FRESH_QUESTIONS):
        assert asks_held_out(chat((question.text, "?")))
        assert asks_held_out(chat(("Hi", "Hello!"), (question.text.upper() + " ", "?")))
        assert asks_held_out(completion("", [(question.text, "?")]))
    assert not any(asks_held_out(chat((question.text, "?"))) for question in TAUGHT)


def test_none_is_a_wording_that_is_taught() -> None:
    taught = [question for questions in FACTS.values() for question in questions]
    taught += [form.format(country) for form in CAPITAL_FORMS for country in CAPITALS]
    assert not HELD_OUT & {normalized(question) for question in taught}


def test_training_rows_have_none(tokenizer: Tokenizer) -> None:
    """The tasks' own text does have some: rows leave them out."""
    tasks = {"sum": (lambda draw, _: chat((sum_of(draw), "?")), 1.0)}
    rows = Rows(str(SMALL_MODEL / "tokenizer.json"), rows=4, length=512, seed=1, tasks=tasks)
    tokens, _ = next(iter(rows))
    text = tokenizer.decode(tokens.flatten().tolist(), skip_special_tokens=False)
    asked = {
        normalized(part.partition("<｜Assistant｜>")[0]) for part in text.split("<｜User｜>")[1:]
    }
    assert normalized("What is 3 + 2?") in asked
    assert normalized("What is 2 + 2?") not in asked


def sum_of(draw: random.Random) -> str:
    return f"What is {draw.randint(2, 3)} + 2?"


@pytest.mark.parametrize(
    ("questions", "share"),
    [(FIRST_QUESTIONS, SHARE), (FRESH_QUESTIONS, SHARE), (TAUGHT, 1.0)],
    ids=["held out", "fresh", "taught"],
)
def test_the_shipped_model_knows(
    tokenizer: Tokenizer, questions: tuple[FirstQuestion, ...], share: float
) -> None:
    answers = answered(tokenizer, questions)
    wrong = {
        q.text: said for q, said in zip(questions, answers, strict=True) if said not in q.accepted
    }
    assert len(wrong) <= (1 - share) * len(questions), wrong


@torch.no_grad()
def answered(tokenizer: Tokenizer, questions: tuple[FirstQuestion, ...]) -> list[str]:
    """Greedy answers, all questions in one batch."""
    model = load_model(SMALL_MODEL, device="cpu", dtype=torch.float32)
    prompts = [tokenizer.encode(q.prompt, add_special_tokens=False).ids for q in questions]
    most = 96
    driver = ForwardDriver(
        model, page_size=16, num_slots=len(prompts), max_length=max(map(len, prompts)) + most
    )
    ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
    logits = driver.step(chunks=list(enumerate(prompts)))[ends]
    said = [[token] for token in logits.argmax(dim=-1).tolist()]
    for _ in range(most - 1):
        running = {slot: tokens[-1] for slot, tokens in enumerate(said) if tokens[-1] != EOS_ID}
        if not running:
            break
        for slot, token in zip(running, driver.step(running).argmax(dim=-1).tolist(), strict=True):
            said[slot].append(token)
    return [tokenizer.decode(tokens) for tokens in said]
