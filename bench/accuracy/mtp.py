"""The acceptance rate of the small model's layer for multi-token prediction.

    python bench/accuracy/mtp.py --examples 50

The model answers held-out problems of every task greedily. The MTP layer drafts each token of an answer except the
first, from the state two tokens before it. The draft is accepted if it equals the model's token. This is the
acceptance rate of speculative decoding with one draft token.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import torch
from batches import encode
from tasks import MEASURED
from tokenizers import Tokenizer
from tqdm import tqdm
from training import runs

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]
from record import record

from mla_router.worker.config import SMALL_MODEL
from mla_router.worker.kv_cache.pool import KVCachePool
from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.loader import load_model, load_mtp
from mla_router.worker.model.mtp import MultiTokenPrediction
from support.forward_driver import ForwardDriver


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-path", type=Path, default=SMALL_MODEL)
    parser.add_argument("--examples", type=int, default=50, help="of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file to append the JSON line to")
    return parser.parse_args()


def drafted(
    model: CausalLM, mtp: MultiTokenPrediction, prompt: list[int], new_tokens: int
) -> tuple[list[int], list[int]]:
    """Returns the `new_tokens` tokens of `model` after `prompt`, and the draft of each except the first."""
    driver = ForwardDriver(model, page_size=16, num_slots=1, max_length=len(prompt) + new_tokens)
    pages, page_size = driver.caches[0].shape[:2]
    specs = mtp.kv_cache_specs(torch.float32)
    caches = KVCachePool(specs, pages - 1, page_size, driver.device).layers
    said, guesses = list[int](), list[int]()
    batch, following = driver.batch(chunks=[(0, prompt)]), prompt[1:]
    while True:
        hidden = model(batch, driver.caches)
        said.append(int(model.logits(hidden[-1:]).argmax()))
        if len(said) == new_tokens:
            return said, guesses
        embedded = model.embed(torch.tensor([*following, said[-1]]))
        ahead = mtp(batch, hidden, embedded, caches)
        guesses.append(int(model.logits(ahead[-1:]).argmax()))
        batch, following = driver.batch({0: said[-1]}), []


def main() -> None:
    args = parse_args()
    model = load_model(args.model_path, device="cpu", dtype=torch.float32)
    mtp = load_mtp(model, args.model_path)
    tokenizer = Tokenizer.from_file(str(args.model_path / "tokenizer.json"))
    accepted, guessed = dict.fromkeys(MEASURED, 0), dict.fromkeys(MEASURED, 0)
    for name, maker in tqdm(MEASURED.items(), desc="Answering", unit="task", disable=None):
        draw = random.Random(f"{args.seed} {name}")
        examples = [maker(draw, True) for _ in range(args.examples)]
        for tokens, weights in encode(tokenizer, examples):
            start, end = runs((weights == 1).tolist())[-1]
            said, guesses = drafted(model, mtp, tokens[:start].tolist(), end - start)
            accepted[name] += sum(a == b for a, b in zip(said[1:], guesses, strict=True))
            guessed[name] += len(guesses)
    rates = {name: round(accepted[name] / max(1, guessed[name]), 4) for name in MEASURED}
    for name, rate in rates.items():
        print(f"{name:14}{rate:>8.1%} of {guessed[name]}")
    total = round(sum(accepted.values()) / sum(guessed.values()), 4)
    result = {"accepted": rates, "guessed": guessed, "accepted_of_all": total}
    record("mtp_accept", {"config": {"examples": args.examples}, **result}, args.out)


if __name__ == "__main__":
    main()
