"""Decode steps with projections and feed-forward layers compiled by torch.compile.

Each class and shape of these modules is compiled once for all layers and for each batch size. Operations on the KV cache
are not compiled: Inductor would copy the whole cache instead of writing it in place. The routed experts keep our
kernels.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType

import torch
from torch import nn

from mla_router.worker.engine.runners.outputs import Decode, HeadOutput
from mla_router.worker.kernels.kv_cache.out_cache_loc import LookedUp
from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.layers import MLP
from mla_router.worker.model.linear import Linear

logger = logging.getLogger(__name__)

# The mode of SGLang's flag: torch tunes the tiles, and the CUDA graphs are ours.
MODE = "max-autotune-no-cudagraphs"
# Maximum number of compiled versions of one function, of all shapes and batch sizes. Beyond it torch runs the function
# uncompiled; its default is 8.
MAX_VERSIONS = 4096


class CompiledDecode:
    """A `Decode` that compiles the modules of `model` for batches of at most `max_rows` rows, at the first call of each
    batch size."""

    def __init__(self, decode: Decode, model: CausalLM, max_rows: int) -> None:
        self._decode = decode
        self._max_rows = max_rows
        regions = list(_regions(model.model.layers))
        compiled = {
            kind: torch.compile(kind.forward, mode=MODE, dynamic=False)
            for kind in {type(region) for region in regions}
        }
        self._forwards = {region: MethodType(compiled[type(region)], region) for region in regions}
        self._sizes: set[int] = set()  # compiled batch sizes
        self._seconds = 0.0  # of all compiled calls

    def __call__(self, rows: LookedUp) -> HeadOutput:
        if len(rows.slots) > self._max_rows:
            return self._decode(rows)
        begin = time.perf_counter()
        with self._in_place():
            output = self._decode(rows)
        self._sizes.add(len(rows.slots))
        self._seconds += time.perf_counter() - begin
        return output

    def report(self) -> None:
        """Logs the compiled batch sizes and the time."""
        logger.info(
            "torch.compile: decode steps of %d batch sizes up to %d: %.1f s",
            len(self._sizes),
            max(self._sizes, default=0),
            self._seconds,
        )

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Replaces the modules' forward methods inside: prefill steps and larger batches are not compiled."""
        limits = {"recompile_limit": MAX_VERSIONS, "accumulated_recompile_limit": MAX_VERSIONS}
        try:
            for region, forward in self._forwards.items():
                region.forward = forward
            with torch._dynamo.config.patch(limits):
                yield
        finally:
            for region in self._forwards:
                del region.forward


def _regions(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, (MLP, Linear)):
            yield child
        else:
            yield from _regions(child)
