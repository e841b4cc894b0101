"""Converts a folder of plain weights to FP8 or INT8, in the formats of published checkpoints.

    python bench/accuracy/quantize.py DIR OUT --format block       # as DeepSeek-V3's
    python bench/accuracy/quantize.py DIR OUT --format channel     # as llm-compressor's FP8
    python bench/accuracy/quantize.py DIR OUT --format int8        # as llm-compressor's INT8

Every linear layer except the head, the gates and eh_proj is quantized: with a scale for each block
(`weight_scale_inv`, quant_method fp8), or for each row or matrix (`weight_scale`, quant_method compressed-tensors).
One file is in memory at a time.
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

from mla_router.worker.model.quantization.online import quantize_blocks

INDEX = "model.safetensors.index.json"
LINEAR = ("_proj.weight", "_proj_with_mqa.weight")  # the endings of linear layers' names
PLAIN = "eh_proj.weight"  # of the layer for multi-token prediction: DeepSeek's are not quantized
FORMATS = ("block", "channel", "tensor", "int8")


@dataclass(frozen=True, slots=True)
class Format:
    name: str  # one of FORMATS
    block: tuple[int, int] = (128, 128)  # of "block"

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self.name == "int8" else torch.float8_e4m3fn

    @property
    def scale_suffix(self) -> str:
        return "_scale_inv" if self.name == "block" else "_scale"

    def block_of(self, weight: Tensor) -> tuple[int, int]:
        """The rows and columns that share a scale."""
        rows, columns = weight.shape
        return {"block": self.block, "tensor": (rows, columns)}.get(self.name, (1, columns))

    def config(self) -> dict[str, Any]:
        """Returns the quantization_config of config.json."""
        if self.name == "block":
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": list(self.block),
            }
        kind = "float" if self.dtype.is_floating_point else "int"
        numbers = {"num_bits": 8, "type": kind, "symmetric": True}
        strategy = "tensor" if self.name == "tensor" else "channel"
        group = {
            "targets": ["Linear"],
            "weights": numbers | {"dynamic": False, "strategy": strategy},
            "input_activations": numbers | {"dynamic": True, "strategy": "token"},
        }
        return {
            "quant_method": "compressed-tensors",
            "format": f"{kind}-quantized",
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
            out[name], scale = quantize_blocks(tensor, kind.block_of(tensor), kind.dtype)
            out[name + kind.scale_suffix] = scale.view(-1) if kind.name == "tensor" else scale
    return out


if __name__ == "__main__":
    main()
