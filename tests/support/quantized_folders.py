"""Quantized checkpoints, and plain checkpoints with exactly the same values.

`bench/accuracy/quantize.py` makes the quantized folders. Their values are computed here from the files alone, value by value,
without code of the worker.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from quantize import Format, quantize_folder
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["Format", "quantize_folder", "write_dequantized"]


def write_dequantized(folder: Path, out: Path, kind: Format) -> None:
    """Writes the checkpoint in `folder`, of format `kind`, to `out` in float32."""
    shutil.copytree(folder, out)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        (out / file.name).unlink()
    (out / "model.safetensors.index.json").unlink(missing_ok=True)
    scales = {name: tensors.pop(name) for name in list(tensors) if kind.scale_suffix in name}
    assert scales, f"nothing in {folder} is quantized"
    for name, scale in scales.items():
        weight = name.removesuffix(kind.scale_suffix)
        assert tensors[weight].dtype == kind.dtype, weight
        tensors[weight] = dequantized(tensors[weight], scale, kind)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def dequantized(weight: Tensor, scale: Tensor, kind: Format) -> Tensor:
    """Returns [N, K] float32. The scale of row i and column j is at (i // height, j // width)."""
    height, width = kind.block_of(weight)
    i = torch.arange(weight.shape[0])[:, None] // height
    j = torch.arange(weight.shape[1])[None, :] // width
    table = scale.view(1, 1) if scale.numel() == 1 else scale
    return (weight.double() * table.double()[i, j]).float()
