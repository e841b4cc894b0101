"""Loads a model in a separate process and prints the largest growth of its memory, in bytes.

    python load_memory.py FOLDER [QUANTIZATION]

Pages of mapped files count as memory here, though the kernel can take them back.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import torch

from mla_router.worker.model.config.read import read_config
from mla_router.worker.model.loader import load_model
from mla_router.worker.model.quantization.choose import ONLINE


def status(name: str) -> int:
    """Returns a size of /proc/self/status in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, name
    return int(found[1]) * 1024


def main() -> None:
    folder, *methods = sys.argv[1:]
    config = read_config(Path(folder))
    if methods:
        config = replace(config, quantization=ONLINE[methods[0]])
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    load_model(Path(folder), device="cpu", dtype=torch.float32, config=config)
    print(status("VmHWM") - before)


if __name__ == "__main__":
    main()
