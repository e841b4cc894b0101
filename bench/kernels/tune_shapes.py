"""The matrix products of DeepSeek's models, whole and divided among ranks, for `tune.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

BLOCK = 128  # a division through a block of scales is not possible


@dataclass(frozen=True)
class Model:
    hidden: int
    heads: int
    q_lora: int | None
    dense_width: int
    moe_width: int
    experts: int
    shared_experts: int
    top_k: int


MODELS = {
    "deepseek-v2-lite": Model(2048, 16, None, 10944, 1408, 64, 2, 6),
    "deepseek-v3": Model(7168, 128, 1536, 18432, 2048, 256, 1, 8),
}
KV_LORA, ROPE, NOPE, VALUE = 512, 64, 128, 128


@dataclass(frozen=True)
class DenseShape:
    outputs: int
    inputs: int


@dataclass(frozen=True)
class ExpertsShape:
    experts: int  # of this rank
    hidden: int
    width: int
    top_k: int
    total: int  # experts of all ranks, among which a token chooses


def divisions(tp: list[int], ep: list[int]) -> list[tuple[int, int]]:
    """Returns the pairs of tensor and expert parallel sizes: the ranks of a tensor parallel group divide the experts."""
    return [(ranks, parts) for ranks in tp for parts in ep if ranks % parts == 0]


def dense_shapes(model: Model, tp: int) -> Iterator[DenseShape]:
    """Yields the shapes of one rank: columns of the first product of a pair are divided, rows of the second."""
    queries, heads = (NOPE + ROPE) * model.heads // tp, model.heads // tp
    latent = KV_LORA + ROPE
    if model.q_lora is None:
        yield DenseShape(queries + latent, model.hidden)
    else:
        yield DenseShape(model.q_lora + latent, model.hidden)
        yield DenseShape(queries, model.q_lora)
    yield DenseShape(heads * (NOPE + VALUE), KV_LORA)
    yield DenseShape(model.hidden, heads * VALUE)
    for width in (model.dense_width, model.shared_experts * model.moe_width):
        if tp == 1 or width % (tp * BLOCK) == 0:
            yield DenseShape(2 * width // tp, model.hidden)
            yield DenseShape(model.hidden, width // tp)


def experts_shape(model: Model, tp: int, ep: int) -> ExpertsShape | None:
    """Returns the shape of one rank; None if it would cut a block of scales."""
    parts = tp // ep
    if model.moe_width % (parts * BLOCK):
        return None
    return ExpertsShape(
        model.experts // ep, model.hidden, model.moe_width // parts, model.top_k, model.experts
    )
