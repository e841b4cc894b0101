"""The attention backends of a model, one for each distinct `AttentionSpec`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from mla_router.worker.engine.attention.layout import AttentionBackend, StepLayout
from mla_router.worker.model.attention import StepAttention

# Returns the attention of a prompt, by spec, from its out_cache_loc [N] int64, and that of layers with window pages.
PromptAttention = Callable[[Tensor, Tensor | None], Sequence[StepAttention]]


class ModelAttention:
    """The interface of `AttentionBackend` for all specs of a model. A step has one plan for each spec, in the order of
    `ModelConfig.attention_specs`. Layers of equal specs share a plan."""

    def __init__(self, backends: Sequence[AttentionBackend], windowed: Sequence[bool] = ()) -> None:
        """`windowed`: whether the spec of each backend has a window, by default none."""
        self.backends = tuple(backends)
        self.windowed = tuple(windowed) or (False,) * len(backends)

    @property
    def name(self) -> str:
        return ", ".join(dict.fromkeys(backend.name for backend in self.backends))

    @property
    def supports_decode_graph(self) -> bool:
        return all(backend.supports_decode_graph for backend in self.backends)

    @property
    def plans_prefill_on_host(self) -> bool:
        return any(backend.plans_prefill_on_host for backend in self.backends)

    @property
    def max_keys(self) -> int:
        return min(backend.max_keys for backend in self.backends)

    def prepare_decode(
        self, page_table: Tensor, page_size: int, slots: Sequence[int], lengths: Sequence[int]
    ) -> None:
        for backend in self.backends:
            backend.prepare_decode(page_table, page_size, slots, lengths)

    def plan(self, layout: StepLayout) -> Sequence[StepAttention]:
        layouts = layout, layout.of_windows()
        pairs = zip(self.backends, self.windowed, strict=True)
        return tuple([backend.plan(layouts[has]) for backend, has in pairs])

    def plan_prefill_graph(self, layout: StepLayout) -> PromptAttention:
        plans = [backend.plan_prefill_graph(layout) for backend in self.backends]

        def attention(locations: Tensor, windows: Tensor | None) -> Sequence[StepAttention]:
            of_kind = locations, locations if windows is None else windows
            pairs = zip(plans, self.windowed, strict=True)
            return tuple([plan(of_kind[has]) for plan, has in pairs])

        return attention
