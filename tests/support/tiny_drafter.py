"""Small models with a drafter: DeepSeek's with a NextN layer, or a Llama with an EAGLE head."""

from __future__ import annotations

from pathlib import Path

from support.tiny_eagle import write_tiny_eagle
from support.tiny_model import CONFIGS, write_tiny_model
from support.tiny_mtp import write_tiny_mtp


def write_tiny_drafter(folder: Path, name: str) -> Path | None:
    """Writes the model to `folder` / model. Returns the folder of its head; None: a layer of the model drafts."""
    if name == "v3":
        write_tiny_mtp(folder / "model", 1, **CONFIGS[name])
        return None
    write_tiny_model(folder / "model", **CONFIGS[name])
    write_tiny_eagle(folder / "eagle", folder / "model", bias=True)
    return folder / "eagle"
