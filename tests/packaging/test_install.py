"""The packages that `make venv` installs, with a stand-in for uv."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import ROOT

UV = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
while [ $# -gt 0 ]; do
  if [ "$1" = -r ]; then cp "$2" "$(dirname "$0")/requirements"; fi
  shift
done
"""
LOCK = (ROOT / "requirements.lock").read_text()
CUDA = ("torch", "nvidia-", "cuda-")


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """Returns a folder with a `uv` that records its calls and its requirements."""
    uv = tmp_path / "uv"
    uv.write_text(UV)
    uv.chmod(0o755)
    return tmp_path


def install(bin_folder: Path, *argv: str) -> list[str]:
    """Returns the calls of uv."""
    subprocess.run([ROOT / ".ci" / "install-locked", bin_folder, *argv], check=True)
    return (bin_folder / "calls").read_text().splitlines()


def packages(requirements: str) -> dict[str, int]:
    """Returns the number of hashes of each package."""
    blocks = re.split(r"^(?=[a-z])", requirements, flags=re.MULTILINE)[1:]
    return {block.partition("==")[0]: block.count("--hash=sha256:") for block in blocks}


def test_every_package_is_checked_by_its_hash(bin_folder: Path) -> None:
    (call,) = install(bin_folder)
    assert "--require-hashes" in call
    assert (bin_folder / "requirements").read_text() == LOCK


def test_for_cpus_all_packages_but_torch_are_checked_by_their_hash(bin_folder: Path) -> None:
    torch, others = install(bin_folder, "cpu")
    assert re.search(r"--no-deps --torch-backend cpu torch==[\d.]+$", torch)
    assert "--no-deps --require-hashes" in others
    expected = {name: n for name, n in packages(LOCK).items() if not name.startswith(CUDA)}
    assert packages((bin_folder / "requirements").read_text()) == expected
    assert min(expected.values()) > 0
    assert {"triton", "numpy", "sympy", "networkx"} <= set(expected), "what torch itself needs"


def test_an_installation_prints_its_size_first() -> None:
    def said(*argv: str) -> str:
        command = [ROOT / ".ci" / "announce-install", *argv]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert "5.1 GB" in said("")
    assert "make serve TORCH=cpu" in said("")
    assert "PyTorch for CPUs" in said("cpu")
    makefile = (ROOT / "Makefile").read_text()
    assert makefile.index(".ci/announce-install") < makefile.index(".ci/install-locked")


def test_missing_tools_are_named_before_the_installation(tmp_path: Path) -> None:
    def check(python: str, path: str) -> str:
        command = ["/bin/bash", ROOT / ".ci" / "check-tools", python]
        return subprocess.run(
            command, env={"PATH": path}, capture_output=True, text=True, check=False
        ).stderr

    def program(name: str, text: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    path = f"{tmp_path}:/usr/bin:/bin"
    program("old-python", "exit 1")
    assert "old-python is not Python 3.11 or later" in check("old-python", path)
    assert "no-python is not Python 3.11 or later" in check("no-python", path)
    program("cargo", "echo cargo 1.75.0")
    assert "cargo 1.75.0 is older than Rust 1.88" in check(sys.executable, path)
    program("cargo", "echo 'cargo 1.100.0-nightly (abc 2026-01-01)'")
    assert check(sys.executable, path) == ""
    (tmp_path / "cargo").unlink()
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    assert "cargo is missing: install Rust" in check(sys.executable, str(tmp_path))
    makefile = (ROOT / "Makefile").read_text()
    assert makefile.index(".ci/check-tools") < makefile.index(".ci/announce-install")
