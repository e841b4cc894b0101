"""Trains a small LLaVA-OneVision to answer questions about drawn pictures:

    python bench/accuracy/train_llava.py --minutes 3 --out OUT_DIR

The problems are those of `pictures/tasks.py`. Tower, projector and language model are transformers' classes, trained together
from random weights, or from those of an earlier run (--begin-with). At the end the saved weights answer held-out problems. An
answer is right if each of its tokens is the most likely one. Needs Pillow.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import small_llava
import torch
from fitting import fit
from pictures.batches import Batch, Batches, Layout, batch
from pictures.tasks import SINGLE, SIZES, TASKS
from tokenizers import Tokenizer
from torch import Tensor, nn
from training import add_flags, loaded, prepare, weighted
from transformers import LlavaOnevisionForConditionalGeneration

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from record import record


class Trained(nn.Module):
    """transformers' model, with the pictures of a batch put in order at once."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: begins with its weights; None: random ones."""
        super().__init__()
        self.whole: Any = (
            LlavaOnevisionForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
            if folder
            else LlavaOnevisionForConditionalGeneration(small_llava.config())
        )
        self._orders: dict[tuple[int, int], Tensor] = {}

    def forward(self, asked: Batch) -> Tensor:
        """Returns logits [B, T - before, V] for the tokens from `before` + 1 on, and for the one behind the last."""
        model = self.whole.model
        embedded = model.language_model.embed_tokens(asked.tokens)
        pictures = self._rows(asked)
        parts = (embedded[:, : asked.layout.before], pictures, embedded[:, asked.layout.before :])
        inputs = torch.cat([part.to(embedded.dtype) for part in parts], dim=1)
        # No mask: all rows are causal, and padding is behind them. transformers would look at the positions on the device
        hidden = model.language_model(
            inputs_embeds=inputs, attention_mask={"full_attention": None}, use_cache=False
        ).last_hidden_state
        logits: Tensor = self.whole.lm_head(hidden[:, asked.layout.before + pictures.shape[1] :])
        return logits

    def _rows(self, asked: Batch) -> Tensor:
        """Returns the embeddings [B, rows, hidden] of the pictures of each problem."""
        model = self.whole.model
        problems, tiles = asked.tiles.shape[:2]
        # Mean and deviation 0.5, as in SigLIP's config
        pixels = asked.tiles.flatten(0, 1).float() / 127.5 - 1
        tower = model.vision_tower(pixels, output_hidden_states=True)
        features = model.multi_modal_projector(tower.hidden_states[-1])
        newline = model.image_newline.to(features.dtype).expand(problems, 1, -1)
        if asked.layout.kind == "frames":
            return torch.cat(
                (model.apply_pooling(features).reshape(problems, -1, newline.shape[-1]), newline), 1
            )
        if asked.layout.kind == "several":
            ends = newline[:, None].expand(-1, tiles, -1, -1)
            return torch.cat((features.unflatten(0, (problems, tiles)), ends), 2).flatten(1, 2)
        known = torch.cat((features.unflatten(0, (problems, tiles)).flatten(1, 2), newline), 1)
        return known[:, self._order(asked.layout.size, tiles, features.shape[1])]

    def _order(self, size: tuple[int, int], tiles: int, rows: int) -> Tensor:
        """Returns the places of the rows of a picture among those of its tiles; -1 for a newline. Sizes here are multiples
        of a tile's, so that transformers' function only moves rows."""
        if size not in self._orders:
            places = torch.arange(tiles * rows).view(tiles, rows, 1).float()
            packed, _ = self.whole.model.pack_image_features(
                [places],
                [list(size)],
                image_newline=torch.tensor([-1.0]),
                vision_aspect_ratio=self.whole.config.vision_aspect_ratio,
            )
            self._orders[size] = packed[0][:, 0].long().to(self.whole.device)
        return self._orders[size]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--problems", type=int, default=256, help="in each step")
    parser.add_argument("--eval-problems", type=int, default=400, help="of each task")
    parser.add_argument("--begin-with", type=Path, help="folder of weights; default: random ones")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    add_flags(parser, seed=small_llava.SEED)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = prepare(args.seed)
    small_llava.write_tokenizer(args.out)
    small_llava.write_processor(args.out)
    network = Trained(args.begin_with).to(device)

    def loss_of(layout: Layout, tiles: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
        asked = Batch(layout, tiles, tokens, weights)
        logits = network(asked)[:, :-1]
        after = layout.before + 1
        return weighted(logits, tokens[:, after:], weights[:, after:])

    problems = Batches(args.out / "tokenizer.json", args.problems, args.seed)
    data = ((asked.layout, asked.to(device).tensors) for asked in loaded(problems, args, device))
    loss = fit("model", network, loss_of, data, args.minutes, args.learning_rate)
    network.whole.to(torch.bfloat16).save_pretrained(args.out)
    right = evaluate(network.float(), args)
    for name, share in right.items():
        print(f"{name:20}{share:>8.1%}")
    result = {
        "config": {"minutes": args.minutes, "problems": args.problems},
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "loss": round(loss, 5),
        "right": {name: round(share, 4) for name, share in right.items()},
    }
    record("train_llava", result, args.results)


@torch.no_grad()
def evaluate(network: Trained, args: argparse.Namespace) -> dict[str, float]:
    """Returns for each task and size the share of right answers."""
    torch.set_float32_matmul_precision("highest")
    device = next(network.parameters()).device
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    right: dict[str, float] = {}
    for name, maker in TASKS.items():
        for size in SIZES if name in SINGLE else SIZES[:1]:
            draw = random.Random(f"{args.seed} {name}")
            correct = 0
            for _ in range(args.eval_problems):
                asked = batch(tokenizer, name, [maker(draw, size, True)]).to(device)
                after = asked.layout.before + 1
                said = network(asked)[:, :-1].argmax(dim=-1)
                is_answer = asked.weights[:, after:] == 1
                correct += bool((said == asked.tokens[:, after:])[is_answer].all())
            height, width = size
            right[f"{name} {width} x {height}"] = correct / args.eval_problems
    return right


if __name__ == "__main__":
    main()
