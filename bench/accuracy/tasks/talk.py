"""Short talk about this project. Facts are few, so they are learnt by heart; forms vary."""

from __future__ import annotations

import random

from tasks.example import SYSTEMS, Example, chat
from tasks.words import ADJECTIVES, NAMES, NOUNS, PLACES, made_up

FACTS: dict[tuple[str, ...], str] = {
    ("Who are you?", "What are you?", "What is your name?", "Introduce yourself."): (
        "I am the small model that comes with mla-router: a DeepSeek-V3 in miniature, trained on "
        "made-up text. I can add, sort, copy, recall, write JSON and call tools."
    ),
    ("What can you do?", "What are you good at?", "How can you help me?"): (
        "I can add numbers, sort and copy lists, find facts in a long text, extract JSON and call "
        "tools. Of everything else I know nothing."
    ),
    ("What is mla-router?", "What is this project?", "What does mla-router do?"): (
        "mla-router serves DeepSeek-family models: a cache-aware router in Rust in front of Python "
        "workers with an overlap scheduler."
    ),
    ("What does the router do?", "What is the router for?", "How does the router choose?"): (
        "The router sends each request to the worker that will finish it soonest: it knows which "
        "prefixes each worker has cached and how busy it is."
    ),
    ("What is a worker?", "What does a worker do?"): (
        "A worker is a Python process with its own scheduler, KV cache and device. It computes the "
        "tokens."
    ),
    ("What is the prefix cache?", "What does the prefix cache do?", "What is prefix caching?"): (
        "The prefix cache keeps the KV cache of earlier prompts, so that a common beginning is "
        "computed only once."
    ),
    ("What is a radix tree?", "What is the radix tree for?"): (
        "A radix tree stores token sequences by their common prefixes. It finds the longest cached "
        "prefix of a prompt."
    ),
    ("What is MLA?", "What is multi-head latent attention?", "What does MLA stand for?"): (
        "MLA is multi-head latent attention: the cache keeps one small latent vector a token, from "
        "which the keys and values of all heads follow."
    ),
    ("What is a mixture of experts?", "What does MoE mean?", "What is MoE?"): (
        "In a mixture of experts each token passes through a few of many small networks, which a "
        "gate chooses."
    ),
    ("What is the overlap scheduler?", "What is zero-overhead scheduling?"): (
        "The overlap scheduler plans the next step while the device computes the current one, so "
        "that the device never waits."
    ),
    ("What is prefill?", "What does prefill mean?"): (
        "Prefill computes the KV cache of the whole prompt and the first token of the answer."
    ),
    ("What is decode?", "What does decode mean?"): (
        "Decode computes one token a step for each running request."
    ),
    ("What is TTFT?", "What does TTFT mean?"): (
        "TTFT is the time to first token: from the request to the first token of its answer."
    ),
    ("What is a page?", "What is a page of the KV cache?"): (
        "A page is a block of the KV cache that holds a fixed number of tokens."
    ),
    ("What happens if a worker dies?", "What if a worker crashes?"): (
        "The router goes on with its requests on another worker, from the tokens already sent."
    ),
    ("What is the KV cache?", "What is the KV cache good for?", "What is in the KV cache?"): (
        "The KV cache keeps what attention needs of the tokens so far, so that each step computes "
        "only the new token."
    ),
    ("How do I start the server?", "How do I run it?", "How do I start mla-router?"): (
        "python -m mla_router.launch_server --dp-size 2 starts a router and two workers."
    ),
    ("What is data parallelism?", "What does dp-size mean?"): (
        "With data parallelism each worker has a copy of the model, and the router spreads the "
        "requests."
    ),
    ("Which models can you serve?", "Which models are supported?"): (
        "mla-router serves DeepSeek V2, V3 and R1, and models of the same shape."
    ),
    ("What is chunked prefill?", "Why are prompts split into chunks?"): (
        "Chunked prefill computes a long prompt in pieces, so that other requests go on meanwhile."
    ),
    ("What is speculative decoding?", "What is the MTP layer for?"): (
        "A small layer guesses the next tokens, and the model checks several guesses in one step."
    ),
}
# Nothing of these was ever told; a model that small would only make something up.
UNKNOWN = (
    "What is the capital of {place}?",
    "Who is {name}?",
    "Why is the {noun} {adjective}?",
    "Tell me a story about a {noun}.",
    "Tell me a joke.",
    "What is a {noun}?",
    "Where does {name} live?",
    "How do I cook a {noun}?",
    "Write a poem about the {adjective} {noun}.",
    "What do you think of {place}?",
    "How old is {name}?",
    "Is a {noun} {adjective}?",
    "Who invented the {noun}?",
    "What is the meaning of {word}?",
    "Do you know {word}?",
    "Translate {word} to French.",
)
NO_ANSWER = "I do not know. I am a very small model: ask me about sums, lists, JSON or mla-router."
GREETINGS = ("Hello!", "Hi!", "Hi there!", "Hello", "Good morning!", "Hey!")
THANKS = ("Thank you!", "Thanks!", "Thanks a lot!", "Thank you very much.")


def talk(draw: random.Random, held_out: bool) -> Example:
    del held_out
    turns = [_turn(draw) for _ in range(draw.randint(1, 3))]
    return chat(*turns, system=draw.choice(SYSTEMS))


def _turn(draw: random.Random) -> tuple[str, str]:
    kind = draw.random()
    if kind < 0.12:
        return draw.choice(GREETINGS), "Hello! How can I help you?"
    if kind < 0.2:
        return draw.choice(THANKS), "You are welcome."
    if kind < 0.28:
        name = draw.choice(NAMES)
        return f"My name is {name}.", f"Nice to meet you, {name}."
    if kind < 0.5:
        form = draw.choice(UNKNOWN)
        words = {"place": draw.choice(PLACES), "name": draw.choice(NAMES), "word": made_up(draw)}
        question = form.format(noun=draw.choice(NOUNS), adjective=draw.choice(ADJECTIVES), **words)
        return question, NO_ANSWER
    questions, answer = draw.choice(list(FACTS.items()))
    question = draw.choice(questions)
    if draw.random() < 0.3:
        question = question.lower().rstrip("?.")
    return question, answer
