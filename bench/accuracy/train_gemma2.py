"""Trains a small Gemma 2 on sums and lists:

    python bench/accuracy/train_gemma2.py --minutes 3 --out OUT_DIR

Text, tokenizer and chat template are the shipped small model's (`small_model.py`, `tasks/`). Every second layer has a window
that is shorter than the examples, so an answer needs both kinds. At the end the saved weights answer held-out problems.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import small_model
import torch
from batches import encode
from fitting import fit
from tasks import OF_GEMMA2
from tokenizers import Tokenizer
from torch import Tensor
from training import add_flags, add_text_flags, prepare, runs, text, weighted
from transformers import Gemma2Config, Gemma2ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from record import record

CONFIG = Gemma2Config(
    architectures=["Gemma2ForCausalLM"],
    vocab_size=small_model.CONFIG["vocab_size"],
    hidden_size=128,
    intermediate_size=320,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    query_pre_attn_scalar=32,
    sliding_window=32,
    max_position_embeddings=2048,
    initializer_range=0.06,
    bos_token_id=small_model.BOS_ID,
    eos_token_id=small_model.EOS_ID,
    pad_token_id=small_model.PAD_ID,
    tie_word_embeddings=True,
    dtype="bfloat16",
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    add_text_flags(parser, rows=64, length=512, examples=100)
    parser.add_argument("--begin-with", type=Path, help="folder of weights; default: random ones")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    add_flags(parser, seed=small_model.SEED)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = prepare(args.seed)
    small_model.write_files(args.out)
    # Its other kinds of attention ignore the cap of scores
    model = Gemma2ForCausalLM._from_config(CONFIG, attn_implementation="eager")
    if args.begin_with:
        model = Gemma2ForCausalLM.from_pretrained(args.begin_with, attn_implementation="eager")
    model.to(device).float()

    masks = attention_masks(args.length, device)

    def loss_of(_: None, tokens: Tensor, weights: Tensor) -> Tensor:
        logits = model(tokens[:, :-1], attention_mask=masks, use_cache=False).logits
        return weighted(logits, tokens[:, 1:], weights[:, 1:])

    data = ((None, rows) for rows in text(args, args.out / "tokenizer.json", device, OF_GEMMA2))
    loss = fit("model", model, loss_of, data, args.minutes, args.learning_rate)
    model.to(torch.bfloat16).save_pretrained(args.out)
    right = evaluate(model.float(), args)
    for name, share in right.items():
        print(f"{name:14}{share:>8.1%}")
    result = {
        "config": {"minutes": args.minutes, "rows": args.rows, "length": args.length},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "loss": round(loss, 5),
        "right": {name: round(share, 4) for name, share in right.items()},
    }
    record("train_gemma2", result, args.results)


def attention_masks(length: int, device: torch.device) -> dict[str, Tensor]:
    """Returns what is added to the scores [..., length, length] of each kind of layer. transformers would make them anew in
    each step, with copies to the device."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position
    visible = {
        "full_attention": distance >= 0,
        "sliding_attention": (distance >= 0) & (distance < CONFIG.sliding_window),
    }
    nothing = torch.zeros(1, 1, length, length, dtype=torch.bfloat16, device=device)
    return {
        kind: nothing.masked_fill(~seen, torch.finfo(nothing.dtype).min)
        for kind, seen in visible.items()
    }


@torch.no_grad()
def evaluate(model: Gemma2ForCausalLM, args: argparse.Namespace) -> dict[str, float]:
    """Returns for each task the share of right answers. An answer is right if each of its tokens is the most likely one."""
    torch.set_float32_matmul_precision("highest")
    device = next(model.parameters()).device
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    shares: dict[str, float] = {}
    for name, (maker, _) in OF_GEMMA2.items():
        draw = random.Random(f"{args.seed} {name}")
        right = asked = 0
        for tokens, weights in encode(
            tokenizer, [maker(draw, True) for _ in range(args.eval_examples)]
        ):
            ids = torch.from_numpy(tokens).long().to(device)[None]
            correct = (model(ids).logits[0, :-1].argmax(dim=-1) == ids[0, 1:]).tolist()
            answers = runs((weights == 1).tolist())
            asked += len(answers)
            right += sum(all(correct[start - 1 : end - 1]) for start, end in answers)
        shares[name] = right / asked
    return shares


if __name__ == "__main__":
    main()
