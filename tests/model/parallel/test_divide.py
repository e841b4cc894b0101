"""The part of a model that a rank gets, and models that cannot be divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mla_router.worker.kernels.comm.groups import Groups
from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.config.attention_spec import GroupedQueryAttentionSpec
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.config.read import read_config
from mla_router.worker.model.linear import Linear
from mla_router.worker.model.loader import load_model
from mla_router.worker.model.parallel.divide import divide
from mla_router.worker.model.quantization.apply import quantize
from mla_router.worker.model.quantization.spec import FP8, Quantization
from mla_router.worker.model.registry import build_model
from support.positions import Position
from support.tiny_model import CONFIGS, write_tiny_model


def part(
    folder: Path, rank: int, size: int, expert_parts: int = 1, block: int | None = None
) -> CausalLM:
    """Returns the declared model of a rank, with weights in blocks of `block` x `block`."""
    config = read_config(folder)
    model = build_model(config)
    if block is not None:
        quantize(model, Quantization("fp8", FP8, (block, block)))
    divide(model, Groups(Position(rank, size)), expert_parts)
    return model


def shapes(model: CausalLM, ending: str) -> set[tuple[int, ...]]:
    return {
        tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, Linear) and name.endswith(ending)
    }


def write_config(folder: Path, name: str, **changes: Any) -> None:
    write_tiny_model(folder, **(CONFIGS[name] | changes))


def test_latent_attention_and_experts(tmp_path: Path) -> None:
    """4 heads of 24 and 24 + 16 rows, 96 dense columns, 8 experts and a shared one of 32 columns."""
    write_config(tmp_path, "v3")
    model = part(tmp_path, 1, 4)
    assert model.config.num_heads == 1
    assert shapes(model, "qkv_proj") == {(24 + 32 + 8, 64)}  # the same on every rank
    assert shapes(model, "q_b_proj") == {(24, 24)}
    assert shapes(model, "kv_b_proj") == {(40, 32)}
    assert shapes(model, "o_proj") == {(64, 24)}
    assert shapes(model, "layers.0.mlp.gate_up_proj") == {(48, 64)}
    assert shapes(model, "mlp.experts.down_proj") == {(8, 64, 8)}
    assert shapes(model, "shared_experts.down_proj") == {(64, 8)}
    assert shapes(model, "lm_head") == {(80, 64)}
    assert model.model.embed_tokens.weight.shape == (320, 64)


def test_whole_experts(tmp_path: Path) -> None:
    write_config(tmp_path, "v3")
    for rank, first in ((0, 0), (1, 0), (2, 4), (3, 4)):
        model = part(tmp_path, rank, 4, 2)
        assert shapes(model, "mlp.experts.gate_up_proj") == {(4, 32, 64)}
        table = model.model.layers[1].mlp.gate.table
        own = range(first, first + 4)
        assert table.tolist() == [[e - first if e in own else -1] for e in range(8)]
    assert shapes(part(tmp_path, 1, 4, 4), "mlp.experts.gate_up_proj") == {(2, 64, 64)}


@pytest.mark.parametrize(("expert_parts", "of_rank"), [(4, 2), (2, 4)])
def test_a_rank_knows_the_experts_of_those_with_its_place(
    tmp_path: Path, expert_parts: int, of_rank: int
) -> None:
    """2 DP ranks of 2 ranks exchange rows between ranks 0 and 2, and between 1 and 3. Two parts are on two ranks each."""
    write_config(tmp_path, "v3")
    for place in range(2):
        model = build_model(read_config(tmp_path))
        divide(model, Groups(Position(place, 2), Position(1, 2), all_to_all=True), expert_parts)
        reaches = model.model.layers[1].mlp.gate.reaches
        assert reaches.shape == (8, 1, 2)
        for dp_rank in range(2):
            first = (2 * dp_rank + place) * expert_parts // 4 * of_rank
            own = reaches[:, 0, dp_rank].nonzero().flatten().tolist()
            assert own == list(range(first, first + of_rank))


@pytest.mark.parametrize(("size", "kv_heads"), [(2, 1), (4, 1), (8, 1)])
def test_kv_heads_are_repeated_if_there_are_fewer_than_ranks(
    tmp_path: Path, size: int, kv_heads: int
) -> None:
    write_config(tmp_path, "llama_gqa")
    extents = []
    for rank in range(size):
        model = part(tmp_path, rank, size)
        spec = model.config.attention_spec(0)
        assert isinstance(spec, GroupedQueryAttentionSpec)
        assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (8 // size, kv_heads, 8)
        q, k, v = model.model.layers[0].self_attn.qkv_proj.shape.rows
        assert k == v and q == (rank * 64 // size, 64 // size, 64)
        extents.append(k.start)
    assert extents == [8 * (2 * rank // size) for rank in range(size)]


def test_columns_are_divided_between_blocks(tmp_path: Path) -> None:
    write_config(tmp_path, "v2_lite", v_head_dim=16, moe_intermediate_size=88)
    rows = [
        part(tmp_path, rank, 2, block=16).model.layers[1].mlp.experts.gate_up_proj.shape.rows[0]
        for rank in range(2)
    ]
    assert rows == [(0, 48, 88), (48, 40, 88)]  # 6 blocks, of which the last one is cut off


@pytest.mark.parametrize(
    ("changes", "size", "expert_parts", "block", "message"),
    [
        ({}, 3, 1, None, "num_attention_heads: 4 cannot be divided into 3 .*: change --tp-size"),
        ({"vocab_size": 321}, 2, 1, None, "lm_head: 321 cannot .* change --tp-size"),
        (
            {"intermediate_size": 95},
            2,
            1,
            None,
            r"layers\.0\.mlp\.gate_proj\.weight: 95 cannot .* change --tp-size",
        ),
        (
            {"moe_intermediate_size": 31, "n_shared_experts": 2},
            2,
            1,
            None,
            r"layers\.1\.mlp\.experts\.0\.gate_proj\.weight: 31 .* change --tp-size, or raise --ep-size",
        ),
        ({"n_routed_experts": 6}, 4, 4, None, "6 cannot be divided into 4 .*: change --ep-size"),
        (
            {"v_head_dim": 16, "qk_rope_head_dim": 16, "moe_intermediate_size": 48},
            4,
            1,
            16,
            r"experts\.0\.gate_proj\.weight: 48, in blocks of 16 .* change --tp-size, or raise --ep-size",
        ),
        ({}, 4, 1, 16, r"q_proj\.weight: 24 of 96 are no whole blocks of 16 .* change --tp-size"),
        ({"first_k_dense_replace": 3}, 2, 2, None, "--ep-size 2: the model has no routed experts"),
    ],
)
def test_models_that_cannot_be_divided(
    tmp_path: Path,
    changes: dict[str, Any],
    size: int,
    expert_parts: int,
    block: int | None,
    message: str,
) -> None:
    write_config(tmp_path, "v2_lite", **changes)
    with pytest.raises(ModelError, match=message):
        part(tmp_path, 0, size, expert_parts, block)


def test_dp_ranks_divide_routed_experts_alone(tmp_path: Path) -> None:
    """Rank 3 of 4, which are two DP ranks: heads and columns are halves, experts quarters."""
    write_config(tmp_path, "v3")
    model = build_model(read_config(tmp_path))
    divide(model, Groups(attention=Position(1, 2), exchange=Position(1, 2)), expert_parts=2)
    assert model.config.num_heads == 2
    assert shapes(model, "q_b_proj") == {(48, 24)}
    assert shapes(model, "layers.0.mlp.gate_up_proj") == {(96, 64)}
    assert shapes(model, "lm_head") == {(model.config.vocab_size // 2, 64)}
    assert shapes(model, "mlp.shared_experts.gate_up_proj") == {(32, 64)}
    assert shapes(model, "mlp.experts.down_proj") == {(4, 64, 16)}
    table = model.model.layers[1].mlp.gate.table  # the second half of the experts
    assert table.tolist() == [[-1], [-1], [-1], [-1], [0], [1], [2], [3]]


def test_dp_ranks_without_experts_share_nothing(tmp_path: Path) -> None:
    write_config(tmp_path, "llama_gqa")
    model = build_model(read_config(tmp_path))
    with pytest.raises(ModelError, match="--enable-dp-attention: the model has no routed experts"):
        divide(model, Groups(exchange=Position(0, 2)))


def test_each_rank_finds_tensors_that_are_missing_for_any_rank(tmp_path: Path) -> None:
    """So that no rank waits for one that has ended."""
    write_config(tmp_path, "v3")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.7.up_proj.weight"]  # of the second rank
    save_file(tensors, file, metadata={"format": "pt"})
    for rank in range(2):
        groups = Groups(Position(rank, 2))
        with pytest.raises(
            ModelError, match=r"1 missing: .*1\.mlp\.experts\.7\.up_proj\.weight\n?$"
        ):
            load_model(tmp_path, device="cpu", dtype=torch.float32, groups=groups, expert_parts=2)
