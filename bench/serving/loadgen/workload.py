"""The workload: conversations of one or several turns, with given lengths."""

from __future__ import annotations

import random
from dataclasses import dataclass

from loadgen.tokens import Prompt, Vocabulary


class WorkloadError(Exception):
    """The data set is not usable. The message gives the cause and the mend."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of the user, and the number of tokens of its answer."""

    prompt: Prompt
    output_tokens: int


# The turns of one user in order; each is sent after the answer to the one before.
Conversation = tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Draws input and output lengths in tokens, uniformly between `ratio` times the maximum and the maximum."""

    input: int
    output: int
    ratio: float

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return self._one(rng, self.input), self._one(rng, self.output)

    def _one(self, rng: random.Random, most: int) -> int:
        return rng.randint(max(1, int(most * self.ratio)), most)


def random_prompts(
    vocabulary: Vocabulary,
    rng: random.Random,
    count: int,
    lengths: Lengths,
    texts: list[list[int]] | None = None,
) -> list[Conversation]:
    """Makes prompts of random tokens, or of the tokens of `texts` in turn, repeated or cut, as SGLang does with
    ShareGPT."""
    conversations: list[Conversation] = []
    for number in range(count):
        tokens, output = lengths.draw(rng)
        if texts:
            ids = texts[number % len(texts)]
            prompt = vocabulary.prompt_of((ids * (tokens // len(ids) + 1))[:tokens])
        else:
            prompt = vocabulary.draw(rng, tokens)
        conversations.append((Turn(prompt, output),))
    return conversations


def shared_prefix(
    vocabulary: Vocabulary,
    rng: random.Random,
    *,
    groups: int,
    prompts_per_group: int,
    system_tokens: int,
    question_tokens: int,
    output_tokens: int,
) -> list[Conversation]:
    """Makes `groups` system prompts with `prompts_per_group` questions each, shuffled."""
    conversations: list[Conversation] = []
    for _ in range(groups):
        system = vocabulary.draw(rng, system_tokens)
        for _ in range(prompts_per_group):
            question = vocabulary.draw(rng, question_tokens)
            prompt = vocabulary.encode(f"{system.text}\n\n{question.text}")
            conversations.append((Turn(prompt, output_tokens),))
    rng.shuffle(conversations)
    return conversations


def multi_turn(
    vocabulary: Vocabulary,
    rng: random.Random,
    count: int,
    *,
    rounds: int,
    system_tokens: int,
    input_tokens: int,
    output_tokens: int,
) -> list[Conversation]:
    """Makes `count` conversations of `rounds` turns with the same system prompt."""
    system = vocabulary.draw(rng, system_tokens).text + "\n\n" if system_tokens else ""
    conversations: list[Conversation] = []
    for _ in range(count):
        turns = []
        for number in range(rounds):
            prompt = vocabulary.draw(rng, input_tokens)
            if system and number == 0:
                prompt = vocabulary.encode(system + prompt.text)
            turns.append(Turn(prompt, output_tokens))
        conversations.append(tuple(turns))
    return conversations
