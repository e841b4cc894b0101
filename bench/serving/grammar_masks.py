"""What grammars cost a step: the masks of a batch, from the scheduler's call until they are there.

    python bench/serving/grammar_masks.py --out bench/results/grammar_masks.jsonl

The vocabulary is byte-level BPE of DeepSeek-V3's size (129,280 tokens), trained on this repository's
dependencies. All rows follow random sentences of one schema, or of a schema each; a random sentence
spends its time in strings, where the masks are the widest. The baseline is what one would write
first: each token's bytes are tried against the same matcher, in Python.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xgrammar
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from record import record

from mla_router.worker.grammar.pool import Grammars, start
from mla_router.worker.grammar.vocabulary import read_vocabulary
from mla_router.worker.messages import Grammar

VOCAB_SIZE = 129_280
STEP_S = 0.002
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string"},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                "kind": {"enum": ["home", "work", "other"]},
            },
            "required": ["street", "zip", "kind"],
        },
    },
    "required": ["name", "age", "tags", "address"],
}


def write_tokenizer(folder: Path) -> None:
    """Train on the Python sources that are installed: text enough for so many merges."""
    installed = sorted(Path(torch.__file__).parents[1].rglob("*.py"))
    texts = (path.read_text(errors="replace") for path in installed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"eos_token_id": 0}')


def open_all(pool: Grammars, rows: int, distinct: bool) -> tuple[list[int], float]:
    """Keys of open requests, and the seconds until all were open."""
    begun = time.perf_counter()
    keys = []
    for row in range(rows):
        schema = {**SCHEMA, "title": str(row) if distinct else ""}
        keys.append(pool.open(Grammar("json_schema", json.dumps(schema)), []))
    waiting = set(keys)
    while waiting:
        for key, reason in pool.poll():
            assert not reason, reason
            waiting.remove(key)
        time.sleep(0.0005)
    return keys, time.perf_counter() - begun


def drive(pool: Grammars, keys: list[int], steps: int) -> list[float]:
    """Seconds of each `fill`, while all rows go on by a random allowed token."""
    choose = random.Random(0)
    new: list[list[int]] = [[] for _ in keys]
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        failed = pool.fill(list(zip(keys, new, strict=True)))
        times.append(time.perf_counter() - begun)
        assert not failed, failed
        for row in range(len(keys)):
            bits = np.unpackbits(pool.masks[row].view(np.uint8), bitorder="little")
            choices = np.flatnonzero(bits)
            inner = choices[choices != 0]  # not the end, as long as there is another way
            new[row] = [int(choose.choice(inner))] if len(inner) else []
    return times


def cpu_seconds(pool: Grammars) -> float:
    """CPU time of all grammars' processes so far: they are children of one nursery."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pool.nursery_pid:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / 100


def python_mask(folder: Path, samples: int) -> float:
    """Seconds of one mask token by token: extrapolated from `samples` tokens of the vocabulary."""
    vocabulary = read_vocabulary(folder, VOCAB_SIZE)
    info = xgrammar.TokenizerInfo(
        vocabulary.pieces, xgrammar.VocabType.RAW, vocab_size=VOCAB_SIZE, stop_token_ids=[0]
    )
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA))
    matcher = xgrammar.GrammarMatcher(compiled)
    matcher.accept_string('{"name": "A')
    tokens = random.Random(0).sample(range(1, VOCAB_SIZE), samples)
    begun = time.perf_counter()
    for token in tokens:
        if matcher.accept_token(token):
            matcher.rollback(1)
    return (time.perf_counter() - begun) / samples * VOCAB_SIZE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder)
        baseline = python_mask(folder, 5000)
        pool = start(folder, vocab_size=VOCAB_SIZE, max_rows=arguments.rows)
        try:
            open_all(pool, 1, distinct=False)  # the nursery has loaded
            results: dict[str, Any] = {}
            for case, distinct in (("one_schema", False), ("a_schema_each", True)):
                keys, open_s = open_all(pool, arguments.rows, distinct)
                drive(pool, keys, 5)
                cpu = cpu_seconds(pool)
                times = drive(pool, keys, arguments.steps)
                cpu = (cpu_seconds(pool) - cpu) / arguments.steps
                for key in keys:
                    pool.close(key)
                results[case] = {
                    "open_all_s": round(open_s, 3),
                    "fill_p50_us": round(statistics.median(times) * 1e6),
                    "fill_p99_us": round(np.quantile(times, 0.99) * 1e6),
                    "cpu_us_per_step": round(cpu * 1e6),
                    "cpu_us_per_row": round(cpu * 1e6 / arguments.rows, 1),
                    "fill_share_of_2ms_step": round(statistics.median(times) / STEP_S, 3),
                    "times_faster_than_python": round(
                        baseline * arguments.rows / statistics.median(times), 1
                    ),
                }
        finally:
            pool.shut_down()
    results["python_mask_us"] = round(baseline * 1e6)
    print(f"{'':16}{'p50':>9}{'p99':>9}{'CPU/step':>10}{'open all':>10}{'vs Python':>11}")
    for case in ("one_schema", "a_schema_each"):
        row = results[case]
        print(
            f"{case:16}{row['fill_p50_us']:>6} us{row['fill_p99_us']:>6} us"
            f"{row['cpu_us_per_step']:>7} us{row['open_all_s']:>8} s"
            f"{row['times_faster_than_python']:>10}x"
        )
    record("grammar_masks", results, arguments.out)


if __name__ == "__main__":
    main()
