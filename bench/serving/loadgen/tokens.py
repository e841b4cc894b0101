"""The tokenizer of the client: prompts of a given length, and token counts of answers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

# Random tokens may merge when their text is tokenized again.
MAX_TRIES = 8


class TokenizerError(Exception):
    """There is no tokenizer. The message names the option for it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text and as token ids, without a BOS token."""

    text: str
    ids: list[int]


class Vocabulary:
    """The tokenizer of a model folder, from its `tokenizer.json`: the import of transformers takes longer than a short
    run."""

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
        """Returns the number of tokens of all texts."""
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return sum(len(encoding.ids) for encoding in encoded)

    def draw(self, rng: random.Random, tokens: int) -> Prompt:
        """Returns random text of `tokens` tokens; in some vocabularies of nearly as many."""
        ids = rng.choices(self._words, k=tokens)
        for _ in range(MAX_TRIES):
            prompt = self.encode(self._tokenizer.decode(ids))
            if len(prompt.ids) == tokens:
                break
            missing = max(0, tokens - len(prompt.ids))
            ids = prompt.ids[:tokens] + rng.choices(self._words, k=missing)
        return prompt

    def _plain_ids(self) -> list[int]:
        """Returns the tokens that consist of ASCII letters and blanks."""
        added = self._tokenizer.get_added_tokens_decoder()
        candidates = sorted(set(self._tokenizer.get_vocab().values()) - set(added))
        texts = self._tokenizer.decode_batch([[token] for token in candidates])
        return [
            token
            for token, text in zip(candidates, texts, strict=True)
            if text.isascii() and text.strip().isalpha() and "\n" not in text
        ]
