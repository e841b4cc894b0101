"""The facts that must be equal on all nodes of a worker, because its ranks compute the same steps."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterator, Mapping
from hashlib import sha256
from importlib import metadata
from pathlib import Path

from mla_router import __version__
from mla_router.worker.bounded_file import read_bounded
from mla_router.worker.config import WorkerConfig
from mla_router.worker.host import has_gpu

# Groups of settings that the ranks read, and the settings of these groups that may differ
GROUPS = ("model", "device and kernels", "memory", "scheduling")
OF_ONE_NODE = (
    "node_rank",
    "dist_init_addr",
    "dist_timeout",
    "base_gpu_id",
    "cpu_threads",
    "device",
)
# The contents of the model's folder are compared instead.
OF_THE_FOLDER = ("model_path", "revision", "download_dir", "tokenizer_path", "served_model_name")
PACKAGES = ("torch", "triton", "flashinfer-python")
MAX_SHOWN = 100  # characters of a value in an error


def facts(config: WorkerConfig) -> dict[str, str]:
    """Returns the facts of this node, by flag or by the name of a package. `config` has a local --model-path."""
    return {
        **dict(_settings(config)),
        "--model-path": model_digest(config.folder),
        "--init-expert-location": _placement(config.init_expert_location),
        "--device": "cuda" if has_gpu(config.device) else "cpu",
        "mla-router": __version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        **{package: _version(package) for package in PACKAGES},
    }


def model_digest(folder: Path) -> str:
    """Returns a digest of config.json, and of the names and sizes of the weights. Contents of hundreds of gigabytes are
    not read."""
    digest = sha256()
    config = folder / "config.json"
    digest.update(config.read_bytes() if config.exists() else b"")
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"\0{path.name}\0{path.stat().st_size}".encode())
    return "digest " + digest.hexdigest()[:16]


def difference(leader: Mapping[str, str], other: Mapping[str, str], node: int) -> str | None:
    """Returns the first difference between the facts of node 0 and those of `node`; None if they are equal."""
    for name in sorted(leader.keys() | other.keys()):
        here, there = (facts.get(name, "missing")[:MAX_SHOWN] for facts in (leader, other))
        if here != there:
            return (
                f"{name} differs between the nodes: {here or 'empty'} on node 0, {there or 'empty'} on node {node}; "
                f"it must be the same"
            )
    return None


def _settings(config: WorkerConfig) -> Iterator[tuple[str, str]]:
    group = ""
    for spec in dataclasses.fields(config):
        group = spec.metadata.get("group", group)
        may_differ = spec.name in OF_ONE_NODE + OF_THE_FOLDER or "variable" in spec.metadata
        if group.startswith(GROUPS) and not may_differ:
            yield "--" + spec.name.replace("_", "-"), str(getattr(config, spec.name))


def _placement(setting: str) -> str:
    """Returns a digest of the file of --init-expert-location."""
    try:
        return "digest " + sha256(read_bounded(Path(setting))).hexdigest()[:16]
    except OSError:  # `trivial`, or a file that the worker will name in its own error
        return setting


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
