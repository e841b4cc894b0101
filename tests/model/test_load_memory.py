"""Loading needs the memory of the weights and of the files that are being read, not of all files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mla_router.worker.model.weights import PARALLEL_FILES
from support import load_memory
from support.tiny_model import CONFIGS, write_tiny_model

MB = 1_000_000
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "moe_intermediate_size": 128,
    "n_routed_experts": 16,
    "num_hidden_layers": 9,
}


def peak_of_loading(folder: Path, *methods: str) -> int:
    """Returns bytes."""
    child = subprocess.run(
        [sys.executable, load_memory.__file__, str(folder), *methods],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    return int(child.stdout)


def test_peak_is_the_weights_and_the_files_being_read(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, shard_size="20MB", **(CONFIGS["v3"] | LARGE))
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    total = sum(sizes)
    assert total > 250 * MB and len(sizes) > 12 and max(sizes) < 25 * MB
    limit = total + PARALLEL_FILES * max(sizes) + 30 * MB  # torch's allocations at its first use
    assert limit < 1.5 * total  # all files at once would exceed it

    peak = peak_of_loading(tmp_path)
    assert total <= peak <= limit, f"{peak / MB:.0f} MB, limit {limit / MB:.0f}"

    # Weights that are quantized while they load never exist as plain ones all at once
    peak = peak_of_loading(tmp_path, "fp8")
    assert peak < total, f"{peak / MB:.0f} MB of {total / MB:.0f}"
