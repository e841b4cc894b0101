"""Trains a module for some minutes.

A step of a small model takes the host longer to launch than the GPU to compute. So on a GPU a whole step, from the loss to
the new parameters, is captured in a CUDA graph, one for each shape of the batches.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from training import WARM_UP_STEPS

SHOWN_EVERY = 100  # steps
WARM_UP = 3  # steps of a shape before its capture: they make gradients and set up libraries


def fit(
    name: str,
    module: nn.Module,
    loss_of: Callable[..., Tensor],
    data: Iterator[tuple[Any, tuple[Tensor, ...]]],
    minutes: float,
    learning_rate: float,
    *,
    captures: bool = True,
) -> float:
    """Trains `module` for `minutes`. The learning rate falls with the clock. Returns the last loss. `data`: a key and tensors
    of each batch: batches of one key have one shape. `loss_of` takes the key and the tensors; if a GPU `captures` it, it does
    not wait for the device."""
    steps = Steps(module, loss_of, learning_rate, captures=captures)
    begin, loss = time.monotonic(), torch.zeros(())
    with tqdm(total=round(minutes * 60), desc=f"Training the {name}", unit="s") as bar:
        for step in range(sys.maxsize):
            elapsed = time.monotonic() - begin
            if elapsed >= minutes * 60:
                break
            share = min((step + 1) / WARM_UP_STEPS, max(0.01, 1 - elapsed / (minutes * 60)))
            steps.set_rate(learning_rate * share)
            loss = steps.run(*next(data))
            if step % SHOWN_EVERY == 0:
                bar.set_postfix(step=step, loss=f"{loss.item():.4f}")
            bar.update(int(time.monotonic() - begin) - bar.n)
    return loss.item()


class Steps:
    """The steps of AdamW."""

    def __init__(
        self,
        module: nn.Module,
        loss_of: Callable[..., Tensor],
        learning_rate: float,
        *,
        captures: bool,
    ) -> None:
        self._module, self._loss_of = module, loss_of
        self._device = next(module.parameters()).device
        on_gpu = self._device.type == "cuda"
        # Warm-up and captures have a stream of their own, as torch's documentation of CUDA graphs asks
        self._stream = torch.cuda.Stream(self._device) if on_gpu and captures else None
        self._rate = torch.tensor(learning_rate, device=self._device)
        self._optimizer = torch.optim.AdamW(
            module.parameters(),
            lr=self._rate,
            betas=(0.9, 0.98),
            weight_decay=0.1,
            fused=on_gpu or None,
            capturable=self._stream is not None,
        )
        self._graphs: dict[Any, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]] = {}
        self._seen: dict[Any, int] = {}
        self._pool: Any = None

    def set_rate(self, rate: float) -> None:
        self._rate.fill_(rate)

    def run(self, key: Any, tensors: tuple[Tensor, ...]) -> Tensor:
        """Returns the loss before the step. The next step of the same key may overwrite it."""
        if self._stream is None:
            return self._step(key, tensors)
        if key not in self._graphs:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] <= WARM_UP:
                return self._warm_up(key, tensors, self._stream)
            self._capture(key, tensors, self._stream)
        graph, inputs, loss = self._graphs[key]
        for static, tensor in zip(inputs, tensors, strict=True):
            static.copy_(tensor, non_blocking=True)
        graph.replay()
        return loss

    def _step(self, key: Any, tensors: tuple[Tensor, ...]) -> Tensor:
        on_gpu = self._device.type == "cuda"
        # Without its cache, which would hold numbers of another graph
        with torch.autocast(
            self._device.type, dtype=torch.bfloat16, enabled=on_gpu, cache_enabled=False
        ):
            loss = self._loss_of(key, *tensors)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._module.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _warm_up(self, key: Any, tensors: tuple[Tensor, ...], stream: torch.cuda.Stream) -> Tensor:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            loss = self._step(key, tensors)
        torch.cuda.current_stream().wait_stream(stream)
        return loss

    def _capture(self, key: Any, tensors: tuple[Tensor, ...], stream: torch.cuda.Stream) -> None:
        inputs = tuple(tensor.clone() for tensor in tensors)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Graphs run one at a time, and what one leaves behind for the next is outside of their memory. The thread that pins
        # the batches goes on
        with torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            loss = self._step(key, inputs)
        self._pool = graph.pool()
        self._graphs[key] = graph, inputs, loss
