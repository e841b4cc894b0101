"""Fill a model from the safetensors files of a Hugging Face folder.

Files are mapped into memory, a few at a time, and copied tensor by tensor straight to where they
belong on the device (`destinations.py`), so that the host never holds more than the files being read,
and those only as pages that the kernel can take back. Anything missing, unknown, or of the wrong shape
or type is collected and refused together, before a request could see it.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.destinations import destinations

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_LISTED = 20  # names shown of each kind of mistake
PARALLEL_FILES = 4  # a thread waits for the disk at every page: several keep it busy


def load_weights(model: nn.Module, config: ModelConfig, folder: Path) -> None:
    """Copy every weight of the checkpoint in `folder` into `model`. Raises ModelError."""
    files = weight_files(folder)
    wanted = dict(destinations(model))
    total = sum(file.stat().st_size for file in files)
    begin = time.perf_counter()
    with tqdm(
        desc="Loading weights", total=total, unit="B", unit_scale=True, disable=None
    ) as progress:
        lock = threading.Lock()  # tqdm counts without one

        def copy(file: Path) -> tuple[set[str], list[tuple[str, str]]]:
            return copy_file(file, wanted, config, progress=advance)

        def advance(num_bytes: int) -> None:
            with lock:
                progress.update(num_bytes)

        with ThreadPoolExecutor(min(PARALLEL_FILES, len(files))) as pool:
            results = list(pool.map(copy, files))

    found = set[str]().union(*(names for names, _ in results))
    mistakes = [("missing", name) for name in sorted(wanted.keys() - found)]
    mistakes += [mistake for _, of_file in results for mistake in of_file]
    if mistakes:
        raise ModelError(f"{folder}: the weights do not fit the config\n{_listed(mistakes)}")
    seconds = time.perf_counter() - begin
    logger.info("Loaded %.3f GB in %.2f s (%.2f GB/s)", total / 1e9, seconds, total / 1e9 / seconds)


def copy_file(
    file: Path,
    wanted: Mapping[str, Tensor],
    config: ModelConfig,
    *,
    progress: Callable[[int], None],
) -> tuple[set[str], list[tuple[str, str]]]:
    """Copy the tensors of `file` to where they are `wanted`, and tell `progress` of every one's bytes.

    Returns the names in the file, and what does not fit: the kind of mistake, and the tensor with what
    it is and should be. Raises ModelError if the file cannot be read.
    """
    names, mistakes = set[str](), list[tuple[str, str]]()
    for name, tensor in read_tensors(file):
        target = wanted.get(name)
        # One scale of a whole tensor has no axis in some checkpoints, one in others.
        scalar = target is not None and target.numel() == tensor.numel() == 1
        where = f"{name} {list(tensor.shape)} in {file.name}"
        if target is None:
            if not is_unused(name, config):
                mistakes.append(("unknown", where))
        elif target.shape != tensor.shape and not scalar:
            mistakes.append(("misshaped", f"{where}, not {list(target.shape)}"))
        elif target.dtype != tensor.dtype and 1 in (target.itemsize, tensor.itemsize):
            # Between wider types we convert; FP8 without the scales that belong to it is nonsense.
            mistakes.append(("mistyped", f"{where}: {_dtype(tensor)}, not {_dtype(target)}"))
        else:
            target.copy_(tensor.view(target.shape))
        names.add(name)
        progress(tensor.nbytes)
    return names, mistakes


def is_unused(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint rightly holds a tensor that the model does not load."""
    if name == "lm_head.weight":
        return config.tie_word_embeddings
    if name.endswith(".input_scale"):  # of activations, which are not quantized
        return config.quantization is not None
    layer = re.match(r"model\.layers\.(\d+)\.(.*)", name)
    if layer is None:
        return False
    behind = int(layer[1]) - config.num_layers
    return 0 <= behind < config.num_mtp_layers or layer[2] == "self_attn.rotary_emb.inv_freq"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of `folder`: those of the index if there is one. Raises ModelError."""
    index = folder / INDEX_FILE
    if not index.is_file():
        if not (folder / SINGLE_FILE).is_file():
            raise ModelError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}")
        return [folder / SINGLE_FILE]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{index}: not an index of safetensors files: {error!r}") from error
    files = [folder / name for name in names]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ModelError(f"{folder}: the index names files that are not there: {absent}")
    return files


def read_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and memory-mapped tensors of one safetensors file. Raises ModelError."""
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                yield name, tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: {error}") from error


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _listed(mistakes: list[tuple[str, str]]) -> str:
    """One line for each kind: how many, and the first of them."""
    kinds: dict[str, list[str]] = {}
    for kind, tensor in mistakes:
        kinds.setdefault(kind, []).append(tensor)
    return "\n".join(
        f"  {len(tensors)} {kind}: {', '.join(tensors[:MAX_LISTED])}"
        + (", ..." if len(tensors) > MAX_LISTED else "")
        for kind, tensors in kinds.items()
    )
