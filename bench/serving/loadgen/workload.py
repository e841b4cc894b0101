"""What is sent: conversations of one turn or several, with the lengths that were asked for."""

from __future__ import annotations

import random
from dataclasses import dataclass

from loadgen.tokens import Prompt, Vocabulary


class WorkloadError(Exception):
    """The data set cannot be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user says, and how many tokens of answer are asked for."""

    prompt: Prompt
    output_tokens: int


# The turns of one user in order; each is sent when the one before has been answered.
Conversation = tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Input and output lengths in tokens, each uniform between `ratio` times the most and the most."""

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
    """Random tokens; or those of `texts` in turn, repeated or cut to length, as SGLang takes them
    from ShareGPT."""
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
    """`groups` system prompts, each with `prompts_per_group` questions of its own, shuffled."""
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
    """`count` conversations that begin with the same system prompt and have `rounds` turns each."""
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
