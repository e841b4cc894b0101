"""Converts a folder of plain weights to FP8, in the formats of published checkpoints.

    python bench/accuracy/quantize.py DIR OUT --format block       # as DeepSeek-V3's
    python bench/accuracy/quantize.py DIR OUT --format channel     # as llm-compressor's

Every linear layer except the head, the gates and eh_proj is quantized: with a scale for each block
(`weight_scale_inv`, quant_method fp8), or for each row or matrix (`weight_scale`, quant_method compressed-tensors).
The largest magnitude of a block becomes FP8's largest value. One file is in memory at a time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

FP8 = torch.float8_e4m3fn
INDEX = "model.safetensors.index.json"
LINEAR = ("_proj.weight", "_proj_with_mqa.weight")  # the endings of linear layers' names
PLAIN = "eh_proj.weight"  # of the layer for multi-token prediction: DeepSeek's are not quantized
FORMATS = ("block", "channel", "tensor")


@dataclass(frozen=True, slots=True)
class Format:
    name: str  # one of FORMATS
    block: tuple[int, int] = (128, 128)  # of "block"

    @property
    def scale_suffix(self) -> str:
        return "_scale_inv" if self.name == "block" else "_scale"

    def block_of(self, weight: Tensor) -> tuple[int, int]:
        """The rows and columns that share a scale."""
        rows, columns = weight.shape
        return {"block": self.block, "channel": (1, columns), "tensor": (rows, columns)}[self.name]

    def config(self) -> dict[str, Any]:
        """Returns the quantization_config of config.json."""
        if self.name == "block":
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": list(self.block),
            }
        numbers = {"num_bits": 8, "type": "float", "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": numbers | {"dynamic": False, "strategy": self.name},
            "input_activations": numbers | {"dynamic": True, "strategy": "token"},
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", r"re:.*mlp\.gate$", r"re:.*eh_proj$"],
        }


def main() -> None:
    args = parse_args()
    quantize_folder(args.source, args.out, Format(args.format))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path, help="Hugging Face folder of plain weights")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--format", choices=FORMATS, default="block")
    return parser.parse_args()


def quantize_folder(source: Path, out: Path, kind: Format) -> None:
    """Writes the files of `source` to `out`, with quantized linear weights."""
    config = json.loads((source / "config.json").read_text())
    if config.get("quantization_config"):
        sys.exit(f"{source} is quantized already")
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name != INDEX:
            shutil.copy(file, out)
    (out / "config.json").write_text(
        json.dumps(config | {"quantization_config": kind.config()}, indent=2) + "\n"
    )
    places, total = dict[str, str](), 0
    files = sorted(source.glob("*.safetensors"))
    for file in tqdm(files, desc="Quantizing", unit="file", disable=None):
        tensors = quantize_tensors(load_file(file), kind)
        save_file(tensors, out / file.name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file.name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def quantize_tensors(tensors: dict[str, Tensor], kind: Format) -> dict[str, Tensor]:
    out = {}
    for name, tensor in tensors.items():
        out[name] = tensor
        if name.endswith(LINEAR) and not name.endswith(PLAIN) and tensor.ndim == 2:
            out[name], scale = quantize(tensor, kind.block_of(tensor))
            out[name + kind.scale_suffix] = scale.view(-1) if kind.name == "tensor" else scale
    return out


def quantize(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """weight [N, K] in blocks: [N, K] float8_e4m3fn and the scales that it is to be multiplied by,
    [ceil(N / block[0]), ceil(K / block[1])] float32. Blocks at the edges may be cut off."""
    rows, columns = weight.shape
    height, width = -(-rows // block[0]), -(-columns // block[1])
    padded = torch.zeros(height * block[0], width * block[1])
    padded[:rows, :columns] = weight
    blocks = padded.view(height, block[0], width, block[1])
    scale = blocks.abs().amax(dim=(1, 3)) / torch.finfo(FP8).max
    scale = scale.masked_fill(scale == 0, 1.0)  # a block of zeros
    quantized = (blocks / scale[:, None, :, None]).view_as(padded)[:rows, :columns]
    return quantized.to(FP8).contiguous(), scale


if __name__ == "__main__":
    main()
