"""Fill a model from the safetensors files of a Hugging Face folder.

Each tensor of the checkpoint has a destination: a parameter, or the part of a parameter where it
belongs (an expert's slice of the stacked weights, the upper half of a joined projection). Files
are mapped into memory and copied tensor by tensor straight to the device, so that the host never
holds more than one. Anything missing, unknown or of the wrong shape is collected and refused
together, before a request could see it.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.layers import JoinedLinear

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_LISTED = 20  # names shown of each kind of mistake


def load_weights(model: nn.Module, config: ModelConfig, folder: Path) -> None:
    """Copy every weight of the checkpoint in `folder` into `model`. Raises ModelError."""
    files = weight_files(folder)
    wanted = dict(destinations(model))
    missing, unknown, misshaped = set(wanted), list[str](), list[str]()
    total = sum(file.stat().st_size for file in files)
    begin = time.perf_counter()

    with tqdm(
        desc="Loading weights", total=total, unit="B", unit_scale=True, disable=None
    ) as progress:
        for file in files:
            for name, tensor in read_tensors(file):
                target = wanted.get(name)
                if target is None:
                    if not is_unused(name, config):
                        unknown.append(f"{name} {list(tensor.shape)}")
                elif target.shape != tensor.shape:
                    misshaped.append(f"{name} {list(tensor.shape)}, not {list(target.shape)}")
                else:
                    target.copy_(tensor)
                missing.discard(name)
                progress.update(tensor.nbytes)

    _refuse(folder, missing=sorted(missing), unknown=unknown, misshaped=misshaped)
    seconds = time.perf_counter() - begin
    logger.info("Loaded %.3f GB in %.2f s (%.2f GB/s)", total / 1e9, seconds, total / 1e9 / seconds)


def destinations(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The name in the checkpoint and the memory of every weight that `model` needs."""
    joined = {name: part for name, part in model.named_modules() if isinstance(part, JoinedLinear)}
    for name, parameter in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        if name.endswith(".experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for expert, weight in enumerate(parameter):
                gate, up = weight.chunk(2)
                yield f"{prefix}{expert}.gate_proj.weight", gate
                yield f"{prefix}{expert}.up_proj.weight", up
        elif name.endswith(".experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            for expert, weight in enumerate(parameter):
                yield f"{prefix}{expert}.down_proj.weight", weight
        elif owner in joined:
            parts = joined[owner].parts
            prefix = owner.rpartition(".")[0]
            for part, rows in zip(parts, torch.split(parameter, list(parts.values())), strict=True):
                yield f"{prefix}.{part}.{kind}", rows
        else:
            yield name, parameter


def is_unused(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint rightly holds a tensor that the model does not load."""
    if name == "lm_head.weight":
        return config.tie_word_embeddings
    layer = re.match(r"model\.layers\.(\d+)\.(.*)", name)
    if layer is None:
        return False
    behind = int(layer[1]) - config.num_layers
    return 0 <= behind < config.num_mtp_layers or layer[2] == "self_attn.rotary_emb.inv_freq"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of `folder`: those of the index if there is one. Raises ModelError."""
    index = folder / INDEX_FILE
    if not index.is_file():
        if not (folder / SINGLE_FILE).is_file():
            raise ModelError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}")
        return [folder / SINGLE_FILE]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{index}: not an index of safetensors files: {error!r}") from error
    files = [folder / name for name in names]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ModelError(f"{folder}: the index names files that are not there: {absent}")
    return files


def read_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and memory-mapped tensors of one safetensors file. Raises ModelError."""
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                yield name, tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: {error}") from error


def _refuse(folder: Path, **mistakes: list[str]) -> None:
    lines = [
        f"  {len(names)} {kind}: {', '.join(names[:MAX_LISTED])}"
        + (", ..." if len(names) > MAX_LISTED else "")
        for kind, names in mistakes.items()
        if names
    ]
    if lines:
        raise ModelError(f"{folder}: the weights do not fit the config\n" + "\n".join(lines))
