"""The model's tokenizer on the client's side: prompts of a wanted length, and tokens of answers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

# Tokens that are drawn one by one may merge when they are read again as one text.
MAX_TRIES = 8


class TokenizerError(Exception):
    """There is no tokenizer to be had; the message says what to give."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The same prompt as text and as token ids, without a BOS token."""

    text: str
    ids: list[int]


class Vocabulary:
    """What the tokenizer of a model folder can write. Its `tokenizer.json` alone is read: importing
    transformers takes longer than a short run."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"--tokenizer: {path} is no file; name a model's folder")
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower type
            raise TokenizerError(f"--tokenizer: {path}: {error}") from error
        self._words = self._plain_ids()
        if not self._words:
            raise TokenizerError(f"--tokenizer: {path} has no token of plain letters")

    def encode(self, text: str) -> Prompt:
        return Prompt(text, self._tokenizer.encode(text, add_special_tokens=False).ids)

    def prompt_of(self, ids: list[int]) -> Prompt:
        return Prompt(self._tokenizer.decode(ids), ids)

    def count(self, texts: list[str]) -> int:
        """Tokens of all texts together."""
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return sum(len(encoding.ids) for encoding in encoded)

    def draw(self, rng: random.Random, tokens: int) -> Prompt:
        """Random text that is read as exactly `tokens` tokens, or, in an odd vocabulary, nearly."""
        ids = rng.choices(self._words, k=tokens)
        for _ in range(MAX_TRIES):
            prompt = self.encode(self._tokenizer.decode(ids))
            if len(prompt.ids) == tokens:
                break
            missing = max(0, tokens - len(prompt.ids))
            ids = prompt.ids[:tokens] + rng.choices(self._words, k=missing)
        return prompt

    def _plain_ids(self) -> list[int]:
        """Tokens of ASCII letters and blanks alone: no special ones, no parts of characters."""
        added = self._tokenizer.get_added_tokens_decoder()
        candidates = sorted(set(self._tokenizer.get_vocab().values()) - set(added))
        texts = self._tokenizer.decode_batch([[token] for token in candidates])
        return [
            token
            for token, text in zip(candidates, texts, strict=True)
            if text.isascii() and text.strip().isalpha() and "\n" not in text
        ]
