"""Trains a small Llama and an EAGLE draft head for it, on one H100 in 7 minutes:

    python bench/accuracy/train_eagle.py --minutes 4 2 --out OUT_DIR

OUT_DIR/llama and OUT_DIR/eagle are folders in the published layouts: Llama's, and EAGLE's for it (arXiv:2401.15077: one
layer without input norm behind a projection `fc`; embedding and head are the target's). The text is that of `train.py`.
The head learns from the target: its features by a smooth L1 loss, its distribution by cross-entropy (section 3.2). At
the end both answer held-out problems. A draft counts as accepted if it equals the target's token.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import small_model
import torch
from batches import encode
from fitting import fit
from safetensors.torch import save_file
from tasks import MEASURED
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm
from training import add_flags, add_text_flags, prepare, runs, text, weighted
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from record import record

CONFIG = LlamaConfig(
    vocab_size=small_model.CONFIG["vocab_size"],
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=6,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=small_model.CONFIG["max_position_embeddings"],
    rms_norm_eps=1e-6,
    bos_token_id=small_model.BOS_ID,
    eos_token_id=small_model.EOS_ID,
    pad_token_id=small_model.PAD_ID,
    tie_word_embeddings=False,
    dtype="bfloat16",
)
TOKEN_WEIGHT = 0.1  # of the cross-entropy beside the features' loss, as in EAGLE
NOISE = 0.1  # half the width of the uniform noise on the features, against drift of repeated drafts; EAGLE has 0.1


class EagleHead(nn.Module):
    """Drafts the token after the next from the target's features, which are normalized hidden states."""

    def __init__(self, target: LlamaForCausalLM) -> None:
        super().__init__()
        config = target.config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        layer = LlamaDecoderLayer(config, 0)
        layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])

    def forward(self, target: LlamaForCausalLM, tokens: Tensor, features: Tensor) -> Tensor:
        """Returns the features [B, T, hidden] that follow `features` [B, T, hidden], given the next `tokens` [B, T]."""
        joined = torch.cat((target.model.embed_tokens(tokens), features), dim=-1)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        hidden = self.fc(joined)
        rotations = target.model.rotary_emb(hidden, positions)
        out: Tensor = self.layers[0](hidden, position_embeddings=rotations, position_ids=positions)
        return out


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, nargs=2, default=(4.0, 2.0), help="target, head")
    add_text_flags(parser, rows=32, length=2048, examples=200)
    parser.add_argument("--out", type=Path, required=True, help="folder of the two models")
    add_flags(parser, seed=small_model.SEED)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = prepare(args.seed)
    folder = args.out / "llama"
    small_model.write_files(folder)
    target = LlamaForCausalLM(CONFIG).to(device).float()
    head = EagleHead(target).to(device)

    def target_loss(_: None, tokens: Tensor, weights: Tensor) -> Tensor:
        return weighted(target(tokens[:, :-1]).logits, tokens[:, 1:], weights[:, 1:])

    def head_loss(_: None, tokens: Tensor, weights: Tensor) -> Tensor:
        with torch.no_grad():
            features = target.model(tokens[:, :-1]).last_hidden_state
            wanted = features[:, 1:]
            likely = target.lm_head(wanted).float().softmax(dim=-1)
        noise = (torch.rand_like(features[:, :-1]) - 0.5) * 2 * NOISE
        drafted = head(target, tokens[:, 1:-1], features[:, :-1] + noise)
        each = (
            functional.cross_entropy(
                target.lm_head(drafted).flatten(0, 1).float(),
                likely.flatten(0, 1),
                reduction="none",
            )
            * TOKEN_WEIGHT
            + functional.smooth_l1_loss(drafted.float(), wanted.float(), reduction="none")
            .mean(dim=-1)
            .flatten()
        )
        share = weights[:, 2:].flatten()
        return (each * share).sum() / share.sum()

    data = ((None, rows) for rows in text(args, folder / "tokenizer.json", device))
    minutes = args.minutes
    losses = [
        fit("target", target, target_loss, data, minutes[0], args.learning_rate, captures=False),
        fit("EAGLE head", head, head_loss, data, minutes[1], args.learning_rate, captures=False),
    ]
    target.to(torch.bfloat16).save_pretrained(folder)
    save_head(head.to(torch.bfloat16), target, args.out / "eagle")
    scores = evaluate(target.float(), head.float(), args, folder / "tokenizer.json")
    print(f"\n{'task':14}{'right':>8}{'accepted: draft 1':>20}{'2':>8}{'3':>8}")
    for name, (right, accepted) in scores.items():
        shares = "".join(
            f"{share:>{width}.1%}" for share, width in zip(accepted, (20, 8, 8), strict=True)
        )
        print(f"{name:14}{right:>8.1%}{shares}")
    result = {
        "config": {"minutes": minutes, "rows": args.rows, "length": args.length},
        "loss": [round(loss, 4) for loss in losses],
        "right": {name: round(right, 4) for name, (right, _) in scores.items()},
        "accepted": {name: [round(a, 4) for a in shares] for name, (_, shares) in scores.items()},
    }
    record("train_eagle", result, args.results)


def save_head(head: EagleHead, target: LlamaForCausalLM, folder: Path) -> None:
    """Writes `head` in EAGLE's layout: the target's config with one layer, and the target's embedding."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = target.config.to_dict() | {"num_hidden_layers": 1}
    small_model.write_json(folder / "config.json", config)
    tensors = {name: tensor.detach().cpu() for name, tensor in head.state_dict().items()}
    tensors["embed_tokens.weight"] = target.model.embed_tokens.weight.detach().cpu()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def evaluate(
    target: LlamaForCausalLM, head: EagleHead, args: argparse.Namespace, tokenizer_file: Path
) -> dict[str, tuple[float, list[float]]]:
    """Returns for each task the share of right answers, and the shares of accepted first, second and third drafts, each
    given that the drafts before it are the target's tokens."""
    torch.set_float32_matmul_precision("highest")
    device = next(target.parameters()).device
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    scores: dict[str, tuple[float, list[float]]] = {}
    for name, maker in tqdm(MEASURED.items(), desc="Answering", unit="task"):
        draw = random.Random(f"{args.seed} {name}")
        right = asked = 0
        accepted, drafts = [0, 0, 0], [0, 0, 0]
        examples = [maker(draw, True) for _ in range(args.eval_examples)]
        for tokens, weights in encode(tokenizer, examples):
            ids = torch.from_numpy(tokens).long().to(device)[None]
            features = target.model(ids).last_hidden_state
            said = target.lm_head(features).argmax(dim=-1)[0]  # after each token
            ranges = runs((weights == 1).tolist())
            correct = (said[:-1] == ids[0, 1:]).tolist()
            asked += len(ranges)
            right += sum(all(correct[start - 1 : end - 1]) for start, end in ranges)
            for depth in range(3):
                # Features one further: row i is now the drafted feature after token i + depth + 1. Its layer sees
                # drafted features only, which is harder than in use
                features = head(target, ids[:, depth + 1 :], features[:, :-1])
                draft = target.lm_head(features).argmax(dim=-1)[0]
                agrees = (draft == said[depth + 1 :]).tolist()
                for start, end in ranges:
                    inside = agrees[start - 1 : end - 2 - depth]
                    accepted[depth] += sum(inside)
                    drafts[depth] += len(inside)
        shares = [a / max(1, d) for a, d in zip(accepted, drafts, strict=True)]
        scores[name] = (right / asked, shares)
    return scores


if __name__ == "__main__":
    main()
