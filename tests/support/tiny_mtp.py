"""Small random checkpoints with NextN layers for multi-token prediction, and the paper's drafts of these layers.

transformers has no such layers. Here its decoder layers stand for the paper's TRM, in float64. The rest of
DeepSeek-V3's (arXiv:2412.19437) equations 21 to 23 is written out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from support.tiny_model import raw_config, write_tiny_model


def write_tiny_mtp(folder: Path, depths: int, **config: Any) -> None:
    """`write_tiny_model` with `depths` NextN layers behind the others."""
    layers = raw_config(config)["num_hidden_layers"]
    write_tiny_model(folder, **config | {"num_hidden_layers": layers + depths})
    changes = {"num_hidden_layers": layers, "num_nextn_predict_layers": depths}
    edit_config(folder, **changes)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    hidden = embedding.shape[1]
    for index in range(layers, layers + depths):
        prefix = f"model.layers.{index}"
        tensors |= {
            f"{prefix}.embed_tokens.weight": embedding.clone(),
            f"{prefix}.shared_head.head.weight": tensors["lm_head.weight"].clone(),
            f"{prefix}.eh_proj.weight": torch.randn(hidden, 2 * hidden) * 0.2,
        }
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.empty(hidden).uniform_(0.5, 1.5)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def export_nextn(folder: Path, out: Path) -> Path:
    """Writes the NextN layer of `folder` to `out`, as SGLang's export_deepseek_nextn.py does, and returns `out`."""
    out.mkdir()
    raw = json.loads((folder / "config.json").read_text())
    number = raw["num_hidden_layers"]
    changes = {"num_hidden_layers": 1, "architectures": [raw["architectures"][0] + "NextN"]}
    (out / "config.json").write_text(json.dumps(raw | changes))
    # The script copies the model's index, whose files are not there
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a"}}))
    tensors = {
        name.replace(f"layers.{number}.", "layers.0."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if f"layers.{number}." in name
        and "embed_tokens" not in name
        and "shared_head.head" not in name
    }
    save_file(tensors, out / "nextn_layer_parameters.safetensors")
    return out


class PaperMtp:
    """The plain checkpoint in `folder`, in float64."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        """`scratch` is a folder for a copy that transformers loads as a deeper model."""
        config = json.loads((folder / "config.json").read_text())
        self.layers: int = config["num_hidden_layers"]
        self.depths: int = config["num_nextn_predict_layers"]
        self.epsilon: float = config["rms_norm_eps"]
        self.tensors = {
            name: tensor.double()
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        scratch.mkdir()
        (scratch / "config.json").write_text(json.dumps(config))
        edit_config(scratch, num_hidden_layers=self.layers + self.depths)
        (scratch / "model.safetensors").symlink_to(folder / "model.safetensors")
        model: Any = AutoModelForCausalLM.from_pretrained(
            scratch, dtype=torch.float64, experts_implementation="eager"
        )
        self._model = model.model

    @torch.no_grad()
    def logprobs(self, tokens: list[int]) -> list[Tensor]:
        """Returns [len(tokens) - 1 - d, vocab] for each depth d: row i drafts tokens[i + 2 + d] from the tokens up to
        i + 1 + d."""
        embedded = self.tensors["model.embed_tokens.weight"][tokens]
        hidden = self._hidden_states(embedded)
        guesses = []
        for depth in range(self.depths):
            hidden = self._following(embedded[1 + depth :], hidden[:-1], depth)
            guesses.append(self._shares(hidden))
        return guesses

    @torch.no_grad()
    def behind(self, tokens: list[int], path: Sequence[int]) -> Tensor:
        """Returns [vocab]: the log-shares of drafts by the first layer behind `tokens`, of whose last one the model has no hidden
        state yet, and the drafts of `path`. For these the layer's own results take the place of the model's."""
        embedded = self.tensors["model.embed_tokens.weight"][[*tokens, *path]]
        hidden = self._hidden_states(embedded[: len(tokens) - 1])
        for depth in range(len(path) + 1):
            own = self._following(embedded[1 : len(tokens) + depth], hidden, 0)
            hidden = torch.cat((hidden, own[-1:]))
        return self._shares(own[-1])

    def _hidden_states(self, hidden: Tensor) -> Tensor:
        """Returns those of the model, [T, hidden_size], for embedded tokens."""
        for index in range(self.layers):
            hidden = self.block(index, hidden)
        return self.norm(hidden, "model.norm")

    def _following(self, embedded: Tensor, hidden: Tensor, depth: int) -> Tensor:
        """Returns the hidden states of the layer of a depth from those before it, and the embedded tokens behind them."""
        prefix = f"model.layers.{self.layers + depth}"
        # (21) h' = M [RMSNorm(h); RMSNorm(Emb(t))]; checkpoints keep the halves of M in turn
        for_embedding, for_hidden = self.tensors[f"{prefix}.eh_proj.weight"].chunk(2, dim=1)
        both = torch.cat(
            (self.norm(hidden, f"{prefix}.hnorm"), self.norm(embedded, f"{prefix}.enorm")), dim=1
        )
        joined = both @ torch.cat((for_hidden, for_embedding), dim=1).T
        # (22) h = TRM(h')
        return self.norm(self.block(self.layers + depth, joined), f"{prefix}.shared_head.norm")

    def _shares(self, hidden: Tensor) -> Tensor:
        """Returns logarithms. (23) P = OutHead(h)"""
        return (hidden @ self.tensors["lm_head.weight"].T).log_softmax(dim=-1)

    def block(self, index: int, hidden: Tensor) -> Tensor:
        """Returns [T, hidden_size] of one of transformers' layers, causally."""
        count = len(hidden)
        positions = torch.arange(count)[None]
        later = torch.full((count, count), float("-inf"), dtype=torch.float64).triu(1)
        out = self._model.layers[index](
            hidden[None],
            attention_mask=later[None, None],
            position_ids=positions,
            position_embeddings=self._model.rotary_emb(hidden[None], positions),
        )
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result.view(count, -1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        square = x.pow(2).mean(dim=-1, keepdim=True)
        return x / (square + self.epsilon).sqrt() * self.tensors[f"{name}.weight"]
