"""Small random EAGLE heads in the published layout, and the paper's drafts of them in float64."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


def write_tiny_eagle(folder: Path, model: Path, *, bias: bool) -> None:
    """Writes a head for the Llama in `model`, with a layer of transformers' names. `bias`: of the projection."""
    llama: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    hidden = llama.config.hidden_size
    layer = LlamaDecoderLayer(llama.config, 0)
    tensors = {
        f"layers.0.{name}": torch.empty_like(tensor).uniform_(0.5, 1.5)
        if "norm" in name
        else torch.randn_like(tensor) * 0.1
        for name, tensor in layer.state_dict().items()
        if "input_layernorm" not in name
    }
    tensors["fc.weight"] = torch.randn(hidden, 2 * hidden) * 0.1
    if bias:
        tensors["fc.bias"] = torch.randn(hidden)
    tensors["embed_tokens.weight"] = llama.model.embed_tokens.weight.detach().clone()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))


class PaperEagle:
    """A head and its model, in float64."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.llama: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        self.tensors = {
            name: tensor.double()
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        layer: Any = LlamaDecoderLayer(self.llama.config, 0).double()
        layer.input_layernorm = nn.Identity()
        prefix = "layers.0."
        layer.load_state_dict(
            {n.removeprefix(prefix): t for n, t in self.tensors.items() if n.startswith(prefix)}
        )
        self.layer = layer

    @torch.no_grad()
    def logprobs(self, tokens: list[int]) -> list[Tensor]:
        """Returns [len(tokens) - 1 - d, vocab] for d = 0 and 1: row i drafts tokens[i + 2 + d]. For d = 1 the features of
        d = 0 take the place of the model's."""
        ids = torch.tensor(tokens)[None]
        features = self.llama.model(ids).last_hidden_state
        found = []
        for depth in range(2):
            features = self._following(ids[:, depth + 1 :], features[:, :-1])
            found.append(self.llama.lm_head(features)[0].log_softmax(dim=-1))
        return found

    @torch.no_grad()
    def behind(self, tokens: list[int], path: Sequence[int]) -> Tensor:
        """Returns [vocab]: the log-shares of drafts behind `tokens`, of whose last one the model has no features yet, and
        the drafts of `path`."""
        known = torch.tensor(tokens)[None]
        features = self.llama.model(known[:, :-1]).last_hidden_state
        for depth in range(len(path) + 1):
            ids = torch.cat((known, torch.tensor([[*path[:depth]]], dtype=torch.int64)), dim=1)
            own = self._following(ids[:, 1:], features)
            features = torch.cat((features, own[:, -1:]), dim=1)
        return self.llama.lm_head(own[0, -1]).log_softmax(dim=-1)

    def _following(self, ids: Tensor, features: Tensor) -> Tensor:
        """Returns the features [1, n, hidden] that the head makes of `features`, and of the tokens `ids` [1, n] behind
        them."""
        joined = functional.linear(
            torch.cat((self.llama.model.embed_tokens(ids), features), dim=-1),
            self.tensors["fc.weight"],
            self.tensors.get("fc.bias"),
        )
        positions = torch.arange(joined.shape[1])[None]
        out = self.layer(
            joined,
            position_ids=positions,
            position_embeddings=self.llama.model.rotary_emb(joined, positions),
            attention_mask=torch.full((1, 1, *[joined.shape[1]] * 2), -torch.inf).triu(1).double(),
        )
        return out[0] if isinstance(out, tuple) else out
