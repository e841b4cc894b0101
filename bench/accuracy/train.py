"""Trains the shipped small model, on one H200 in 8 minutes:

    python bench/accuracy/train.py --minutes 7.5 --out OUT_DIR

All training text is generated during the run (`tasks/`). The learning rate follows the clock, so that the run ends in
time. At the end the saved weights are tested with held-out problems: an answer is right if each of its tokens is the
most likely one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import small_model
import torch
from batches import encode
from first_questions import FIRST_QUESTIONS, TAUGHT, FirstQuestion
from network import Experts, Network, checkpoint
from safetensors.torch import save_file
from tasks import MEASURED
from tasks.example import EOS
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from training import (
    WARM_UP_STEPS,
    add_flags,
    add_text_flags,
    prepare,
    runs,
    text,
    weighted,
)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from record import record

OUT_DIR = ROOT / "worker" / "model" / "small"
AHEAD_WEIGHT = 0.3  # of the MTP layer's loss, as in DeepSeek-V3
BALANCE_STEP = 1e-3  # as in DeepSeek-V3


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=8.0)
    add_text_flags(parser, rows=32, length=4096, examples=300)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT_DIR, help="folder of the model")
    parser.add_argument("--curve", type=Path, help="file for the loss curve, one JSON line a point")
    add_flags(parser, seed=small_model.SEED)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    begin = time.monotonic()
    device = prepare(args.seed)
    small_model.write_files(args.out)
    network = Network(small_model.CONFIG).to(device)
    initialize(network)
    count = sum(parameter.numel() for parameter in network.parameters())
    print(f"{count:,} parameters on {device}", flush=True)

    curve = train(network, args, begin)
    tensors = checkpoint(network, small_model.CONFIG)
    save_file(tensors, args.out / "model.safetensors", metadata={"format": "pt"})
    if args.curve:
        args.curve.write_text("".join(json.dumps(point) + "\n" for point in curve))
    round_as_saved(network)
    scores = evaluate(network, args)
    print(f"\n{'task':14}{'right':>8}{'accepted':>10}")
    for name, (right, accepted) in scores.items():
        print(f"{name:14}{right:>8.1%}{accepted:>10.1%}")
    held_out = first_answers(network, FIRST_QUESTIONS, args.out)
    taught = first_answers(network, TAUGHT, args.out)
    print(
        f"first questions: {sum(held_out) / len(held_out):.1%}, taught: {sum(taught) / len(taught):.1%}"
    )
    for question, right in zip((*FIRST_QUESTIONS, *TAUGHT), (*held_out, *taught), strict=True):
        if not right:
            print(f"wrong: {question.text!r}")
    result = {
        "minutes": args.minutes,
        "parameters": count,
        "tokens": curve[-1]["tokens"],
        "loss": curve[-1]["loss"],
        "right": {name: round(right, 4) for name, (right, _) in scores.items()},
        "first_questions": {
            "held_out": round(sum(held_out) / len(held_out), 4),
            "taught": round(sum(taught) / len(taught), 4),
        },
        "mtp_accepted": {name: round(accepted, 4) for name, (_, accepted) in scores.items()},
    }
    record("train_small_model", result, args.results)


def initialize(network: Network) -> None:
    for name, parameter in network.named_parameters():
        if parameter.ndim == 2:
            # The projections into the residual begin small.
            leads_out = "o_proj" in name or "down_proj" in name
            deviation = 0.02 if "embed" in name else (0.3 if leads_out else 1.0)
            scale = 1.0 if "embed" in name else parameter.shape[1] ** -0.5
            torch.nn.init.normal_(parameter, std=deviation * scale)


def train(network: Network, args: argparse.Namespace, begin: float) -> list[dict[str, float]]:
    """Returns the loss curve."""
    device = next(network.parameters()).device
    on_gpu = device.type == "cuda"
    data = text(args, args.out / "tokenizer.json", device, ahead=2)
    matrices = [p for p in network.parameters() if p.ndim == 2]
    vectors = [p for p in network.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.learning_rate,
        betas=(0.9, 0.98),
        fused=on_gpu,
    )
    experts = [module for module in network.modules() if isinstance(module, Experts)]
    step_loss = losses if args.no_compile else torch.compile(losses)
    curve: list[dict[str, float]] = []
    step, first, total = 0, time.monotonic(), args.minutes * 60
    while (elapsed := time.monotonic() - begin) < total:
        tokens, weights = next(data)
        share = (elapsed - (first - begin)) / max(1e-9, total - (first - begin))
        rate = args.learning_rate * min((step + 1) / WARM_UP_STEPS, max(0.01, 1 - share))
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu):
            loss, ahead = step_loss(network, tokens, weights)
        (loss + AHEAD_WEIGHT * ahead).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for module in experts:
                module.balance(BALANCE_STEP)
        step += 1
        if step == 5:
            first = time.monotonic()  # compiled by now
        if step % 50 == 0 or step < 3:
            count = step * args.rows * args.length
            point = {
                "step": step,
                "tokens": count,
                "seconds": round(time.monotonic() - begin, 1),
                "loss": round(loss.item(), 4),
                "ahead_loss": round(ahead.item(), 4),
                "busiest_expert": round(max(float(e.load.max()) for e in experts), 3),
            }
            curve.append(point)
            if step % 200 == 0 or step < 3:
                print(json.dumps(point), flush=True)
    return curve


def losses(network: Network, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean cross-entropy of the next token and of the token after it."""
    logits, ahead = network(tokens[:, :-1])
    return (
        weighted(logits, tokens[:, 1:-1], weights[:, 1:-1]),
        weighted(ahead, tokens[:, 2:], weights[:, 2:]),
    )


def round_as_saved(network: Network) -> None:
    for parameter in network.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()


@torch.no_grad()
def evaluate(network: Network, args: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Returns, for each task, the share of right answers, and the share of the MTP layer's drafts that equal the
    model's own tokens."""
    network.eval()
    torch.set_float32_matmul_precision("highest")
    device = next(network.parameters()).device
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    scores: dict[str, tuple[float, float]] = {}
    for name, maker in MEASURED.items():
        draw = random.Random(f"{args.seed} {name}")
        right, asked, accepted, guessed = 0, 0, 0, 0
        for tokens, weights in encode(
            tokenizer, [maker(draw, True) for _ in range(args.eval_examples)]
        ):
            ids = torch.from_numpy(tokens).long().to(device)[None]
            said, ahead = (logits.argmax(dim=-1)[0] for logits in network(ids))
            correct = (said == ids[0, 1:]).tolist()
            agrees = (ahead[:-1] == said[1:]).tolist()
            is_answer: list[bool] = (weights == 1).tolist()
            for start, end in runs(is_answer):
                asked += 1
                right += all(correct[start - 1 : end - 1])
                accepted += sum(agrees[start - 1 : end - 2])
                guessed += end - 1 - start
        scores[name] = (right / asked, accepted / max(1, guessed))
    return scores


@torch.no_grad()
def first_answers(
    network: Network, questions: tuple[FirstQuestion, ...], folder: Path
) -> list[bool]:
    """Returns, for each question, whether the greedy answer is one of the right ones."""
    device = next(network.parameters()).device
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def says(prompt: str, answer: str) -> bool:
        given, said = (
            tokenizer.encode(text, add_special_tokens=False).ids for text in (prompt, answer + EOS)
        )
        ids = torch.tensor([given + said], device=device)
        # The network drops the last token, which only the MTP layer would need.
        likeliest = network(functional.pad(ids, (0, 1)))[0].argmax(dim=-1)[0]
        return likeliest[len(given) - 1 : -1].tolist() == said

    return [
        any(says(question.prompt, text) for text in question.accepted) for question in questions
    ]


if __name__ == "__main__":
    main()
