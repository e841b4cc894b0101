"""The model in the package: its size, its layout, its tokenizer, and its answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import small_model
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from mla_router.worker.config import SMALL_MODEL
from mla_router.worker.model.loader import load_model
from support.forward_driver import ForwardDriver


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(SMALL_MODEL)


def test_small_enough_for_a_wheel_of_10_megabytes() -> None:
    assert sum(file.stat().st_size for file in SMALL_MODEL.iterdir()) <= 8_000_000


def test_config_and_shapes_are_those_of_the_script() -> None:
    assert json.loads((SMALL_MODEL / "config.json").read_text()) == small_model.CONFIG
    with safe_open(SMALL_MODEL / "model.safetensors", framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert shapes == small_model.tensor_shapes(small_model.CONFIG)


@pytest.mark.slow
def test_files_are_those_that_the_script_makes(tmp_path: Path) -> None:
    small_model.write_files(tmp_path)
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (SMALL_MODEL / file.name).read_bytes(), file.name


def test_transformers_gives_the_same_tokens(tokenizer: Any) -> None:
    prompt = tokenizer("Question: What is 12 + 34?\nAnswer:")["input_ids"]
    reference = AutoModelForCausalLM.from_pretrained(SMALL_MODEL, dtype=torch.float32)
    expected = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=32,
        eos_token_id=[],
        pad_token_id=0,
    )[0, len(prompt) :].tolist()

    model = load_model(SMALL_MODEL, device="cpu", dtype=torch.float32)
    driver = ForwardDriver(model, page_size=16)
    tokens = [int(driver.step(chunks=[(0, prompt)])[-1].argmax())]
    while len(tokens) < 32:
        tokens.append(int(driver.step({0: tokens[-1]})[-1].argmax()))
    assert tokens == expected


def test_context_and_vocabulary() -> None:
    model = load_model(SMALL_MODEL, device="cpu", dtype=torch.float32)
    assert model.config.max_position_embeddings >= 8192
    assert (model.config.num_mtp_layers, model.config.dtype) == (1, "bfloat16")


@given(text=st.text(max_size=40))
def test_every_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_digits_stay_single(tokenizer: Any) -> None:
    ids = tokenizer("add 12345", add_special_tokens=False)["input_ids"]
    assert [tokenizer.decode([i]) for i in ids][-6:] == [" ", "1", "2", "3", "4", "5"]


def test_chat_template(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜>Hello!<｜end▁of▁sentence｜>"
        "<｜User｜>Bye<｜Assistant｜>"
    )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [ids.count(special) for special in range(5)] == [1, 1, 0, 2, 2]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is 48 + 27?", "75"),
        ("Sort these words: tiger, apple, rocket, anchor", "anchor, apple, rocket, tiger"),
        (
            "Extract as JSON with the keys name, age:\nAlice is 34 years old. Alice lives in Rome.",
            '{"name": "Alice", "age": 34}',
        ),
        (
            "There are 40 coins in a box. Bob takes 13 out, then Zoe puts 5 in. How many coins are "
            + "in the box?",
            "40 - 13 = 27. 27 + 5 = 32. The answer is 32.",
        ),
    ],
)
def test_it_has_learnt_something(tokenizer: Any, question: str, answer: str) -> None:
    message = {"role": "user", "content": question}
    prompt = tokenizer.apply_chat_template(
        [message], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    model = load_model(SMALL_MODEL, device="cpu", dtype=torch.float32)
    driver = ForwardDriver(model, page_size=16)
    tokens = [int(driver.step(chunks=[(0, prompt)])[-1].argmax())]
    while tokens[-1] != tokenizer.eos_token_id and len(tokens) < 64:
        tokens.append(int(driver.step({0: tokens[-1]})[-1].argmax()))
    assert tokenizer.decode(tokens[:-1]) == answer
