"""Fill a model from the safetensors files of a Hugging Face folder.

Files are mapped into memory, a few at a time, and copied tensor by tensor straight to where they
belong on the device (`weight_mapping.py`), so that the host never holds more than the files being read,
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
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.weight_mapping import weight_mapping

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
MAX_LISTED = 20  # names shown of each kind of mistake
PARALLEL_FILES = 4  # a thread waits for the disk at every page: several keep it busy


@dataclass(frozen=True, slots=True)
class FileCopy:
    """What became of one file's tensors."""

    names: set[str]
    mistakes: list[tuple[str, str]]  # kind of mistake, and the tensor with what it is and should be
    num_bytes: int  # of those that were copied


def load_weights(model: nn.Module, folder: Path, is_unused: Callable[[str], bool]) -> None:
    """Copy every weight of the checkpoint in `folder` into `model`, but for those that rightly have no
    place in it. Raises ModelError."""
    files = weight_files(folder)
    wanted = dict(weight_mapping(model))
    total = sum(file.stat().st_size for file in files)
    begin = time.perf_counter()
    with tqdm(
        desc="Loading weights", total=total, unit="B", unit_scale=True, disable=None
    ) as progress:
        lock = threading.Lock()  # tqdm counts without one

        def copy(file: Path) -> FileCopy:
            return copy_file(file, wanted, is_unused, progress=advance)

        def advance(num_bytes: int) -> None:
            with lock:
                progress.update(num_bytes)

        with ThreadPoolExecutor(min(PARALLEL_FILES, len(files))) as pool:
            copies = list(pool.map(copy, files))

    found = set[str]().union(*(copied.names for copied in copies))
    mistakes = [("missing", name) for name in sorted(wanted.keys() - found)]
    mistakes += [mistake for copied in copies for mistake in copied.mistakes]
    if mistakes:
        raise ModelError(f"{folder}: the weights do not fit the config\n{_listed(mistakes)}")
    seconds, size = time.perf_counter() - begin, sum(copied.num_bytes for copied in copies) / 1e9
    logger.info("Loaded %.3f GB in %.2f s (%.2f GB/s)", size, seconds, size / seconds)


def copy_file(
    file: Path,
    wanted: Mapping[str, Tensor],
    is_unused: Callable[[str], bool],
    *,
    progress: Callable[[int], None],
) -> FileCopy:
    """Copy the tensors of `file` to where they are `wanted`, and tell `progress` of every one's bytes.
    Raises ModelError if the file cannot be read."""
    names, mistakes, num_bytes = set[str](), list[tuple[str, str]](), 0
    for name, tensor in read_tensors(file):
        target = wanted.get(name)
        # One scale of a whole tensor has no axis in some checkpoints, one in others.
        scalar = target is not None and target.numel() == tensor.numel() == 1
        where = f"{name} {list(tensor.shape)} in {file.name}"
        if target is None:
            # transformers writes shared experts without any width where there are none
            if tensor.numel() and not is_unused(name):
                mistakes.append(("unknown", where))
        elif target.shape != tensor.shape and not scalar:
            mistakes.append(("misshaped", f"{where}, not {list(target.shape)}"))
        elif target.dtype != tensor.dtype and 1 in (target.itemsize, tensor.itemsize):
            # Between wider types we convert; FP8 without the scales that belong to it is nonsense.
            mistakes.append(("mistyped", f"{where}: {_dtype(tensor)}, not {_dtype(target)}"))
        else:
            target.copy_(tensor.view(target.shape))
            num_bytes += tensor.nbytes
        names.add(name)
        progress(tensor.nbytes)
    return FileCopy(names, mistakes, num_bytes)


def is_unused(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint rightly holds a tensor that a model without prediction layers does not
    load."""
    if name == "lm_head.weight":
        return config.tie_word_embeddings
    if name.endswith(".input_scale"):  # of activations, which are not quantized
        return config.quantization is not None
    layer = LAYER.match(name)
    if layer is None:
        return False
    return _is_prediction(layer, config) or layer[2] == "self_attn.rotary_emb.inv_freq"


def is_unused_by_prediction(name: str, config: ModelConfig) -> bool:
    """The same of prediction layers alone: what is the model's, and their copies of embedding and
    head, which they share with it."""
    layer = LAYER.match(name)
    if layer is None or not _is_prediction(layer, config):
        return True
    if layer[2].endswith(".input_scale"):
        return config.quantization is not None
    return layer[2] in ("embed_tokens.weight", "shared_head.head.weight")


def _is_prediction(layer: re.Match[str], config: ModelConfig) -> bool:
    return 0 <= int(layer[1]) - config.num_layers < config.num_mtp_layers


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
