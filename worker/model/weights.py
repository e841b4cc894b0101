"""Loads weights from the safetensors files of a Hugging Face folder.

A few files at a time are mapped into memory and copied tensor by tensor to the device (`weight_mapping.py`). The
host never holds more than these files, as pages that the operating system can drop. One error lists all tensors that
are missing, unknown, or do not fit (`shard.py`), before the server is ready.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.shard import Shard
from mla_router.worker.model.weight_mapping import weight_mapping

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
NEXTN_FILE = "nextn_layer_parameters.safetensors"  # of SGLang's export_deepseek_nextn.py
LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
LFS_POINTER = b"version https://git-lfs"  # its first bytes; git leaves it in place of a large file
MAX_LISTED = 20  # names shown of each kind of mistake
PROGRESS_S = 10.0  # between two lines about the progress
PARALLEL_FILES = 4  # threads: each waits for the disk at every page, several keep it busy


class Index(msgspec.Struct):
    weight_map: dict[str, str]  # names of tensors, and of their files


@dataclass(frozen=True, slots=True)
class FileCopy:
    """The result of reading one file."""

    names: set[str]
    mistakes: list[tuple[str, str]]  # kind of mistake, and a description of the tensor
    num_bytes: int  # copied


class Progress:
    """Logs the progress of threads that read `total` bytes. It writes lines and no bar, because the launcher reads the
    output of a worker through a pipe."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._next_line = time.perf_counter() + PROGRESS_S
        self._lock = threading.Lock()

    def advance(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            if (now := time.perf_counter()) < self._next_line:
                return
            self._next_line = now + PROGRESS_S
            done, total = self._done / 1e9, self._total / 1e9
        logger.info("Loading weights: %.1f of %.1f GB", done, total)


def load_weights(
    model: nn.Module,
    folder: Path,
    is_unused: Callable[[str], bool],
    own_name: Callable[[str], str] = str,
) -> None:
    """Copies every weight of the checkpoint in `folder` to `model`. `own_name` maps the checkpoint's name of a tensor to
    the model's; by default they are equal. It skips tensors if `is_unused` of the model's name. Raises ModelError."""
    files = weight_files(folder)
    wanted = dict(weight_mapping(model))
    progress = Progress(sum(file.stat().st_size for file in files))
    begin = time.perf_counter()

    def copy(file: Path) -> FileCopy:
        return copy_file(file, wanted, is_unused, own_name, progress=progress.advance)

    with ThreadPoolExecutor(min(PARALLEL_FILES, len(files))) as pool:
        copies = list(pool.map(copy, files))

    found = set[str]().union(*(copied.names for copied in copies))
    needed = {name for name, shard in wanted.items() if shard.is_needed}
    mistakes = [("missing", name) for name in sorted(needed - found)]
    mistakes += [mistake for copied in copies for mistake in copied.mistakes]
    if mistakes:
        raise ModelError(f"{folder}: the weights do not fit the config\n{_listed(mistakes)}")
    seconds, size = time.perf_counter() - begin, sum(copied.num_bytes for copied in copies) / 1e9
    logger.info("Loaded %.3f GB in %.2f s (%.2f GB/s)", size, seconds, size / seconds)


def copy_file(
    file: Path,
    wanted: Mapping[str, Shard],
    is_unused: Callable[[str], bool],
    own_name: Callable[[str], str] = str,
    *,
    progress: Callable[[int], None],
) -> FileCopy:
    """Copies the tensors of `file` to the shards that `wanted` has under their names, and reports the bytes of each
    tensor to `progress`. Raises ModelError if the file cannot be read."""
    names, mistakes, num_bytes = set[str](), list[tuple[str, str]](), 0
    for found, tensor in read_tensors(file):
        name = own_name(found)
        shard = wanted.get(name)
        where = f"{found} {list(tensor.shape)} in {file.name}"
        if shard is None:
            # transformers writes empty shared experts for a model without shared experts
            if tensor.numel() and not is_unused(name):
                mistakes.append(("unknown", where))
        elif mistake := shard.fill(tensor):
            mistakes.append((mistake.kind, f"{where}: {mistake.reason}"))
        else:
            num_bytes += shard.bytes_read(tensor)
        names.add(name)
        progress(tensor.nbytes)
    return FileCopy(names, mistakes, num_bytes)


def is_unused(name: str, config: ModelConfig) -> bool:
    """Whether the tensor `name` of a checkpoint does not belong to the model without MTP layers."""
    if name == "lm_head.weight":
        return config.tie_word_embeddings
    layer = LAYER.match(name)
    if layer is None:
        return False
    return int(layer[1]) in config.mtp_layers or layer[2] == "self_attn.rotary_emb.inv_freq"


def is_unused_by_mtp(name: str, numbers: range) -> bool:
    """Whether the tensor `name` of a checkpoint does not belong to the MTP layers, which have these `numbers`: it is the
    model's, or their copy of the model's embedding or head."""
    layer = LAYER.match(name)
    if layer is None or int(layer[1]) not in numbers:
        return True
    return layer[2] in ("embed_tokens.weight", "shared_head.head.weight")


def has_tensor(folder: Path, name: str) -> bool:
    """Returns whether a file of the checkpoint in `folder` has the tensor `name`. Raises ModelError."""
    return any(name == found for file in weight_files(folder) for found, _ in read_tensors(file))


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of `folder`, by its index if there is one. Raises ModelError."""
    if (folder / NEXTN_FILE).is_file():
        return [folder / NEXTN_FILE]  # an index in this folder is a copy of the model's
    index = folder / INDEX_FILE
    if not index.is_file():
        if not (folder / SINGLE_FILE).is_file():
            raise ModelError(
                f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}; weights are read from safetensors alone"
            )
        return [folder / SINGLE_FILE]
    try:
        names = set(msgspec.json.decode(index.read_bytes(), type=Index).weight_map.values())
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{index}: not an index of safetensors files: {error}") from error
    if not names:
        raise ModelError(f"{index}: names no safetensors files")
    files = [folder / name for name in sorted(names)]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ModelError(f"{folder}: the index names files that are not there: {absent}")
    return files


def read_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields names and memory-mapped tensors of one safetensors file. Raises ModelError."""
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                yield name, tensors.get_tensor(name)
    except OSError as error:
        raise ModelError(f"{file}: {error}") from error
    except SafetensorError as error:
        with file.open("rb") as opened:
            is_pointer = opened.read(len(LFS_POINTER)) == LFS_POINTER
        reason = "a pointer of Git LFS; run `git lfs pull` in this folder" if is_pointer else error
        raise ModelError(f"{file}: {reason}") from error


def _listed(mistakes: list[tuple[str, str]]) -> str:
    """Returns one line for each kind of mistake: the number, and the first tensors."""
    kinds: dict[str, list[str]] = {}
    for kind, tensor in mistakes:
        kinds.setdefault(kind, []).append(tensor)
    return "\n".join(
        f"  {len(tensors)} {kind}: {', '.join(tensors[:MAX_LISTED])}"
        + (", ..." if len(tensors) > MAX_LISTED else "")
        for kind, tensors in kinds.items()
    )
