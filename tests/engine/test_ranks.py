"""Engines of several ranks, which divide one model, give the results of one rank.

Steps of one rank's scheduler are repeated by processes over gloo: prompts in chunks, with cached prefixes, decode rows
and both together, with random sampling and logprobs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.config import SMALL_MODEL
from mla_router.worker.kernels.comm.groups import ONE_RANK
from mla_router.worker.model.config.deepseek import DeepseekConfig
from mla_router.worker.model.config.read import read_config
from mla_router.worker.model.expert_load import count_experts
from mla_router.worker.model.parallel.balance import balanced
from mla_router.worker.model.parallel.placement import Placement, balancedness, trivial
from mla_router.worker.model.quantization.choose import ONLINE
from mla_router.worker.tree_shape import TreeShape
from support import rank_engine
from support.divisible import divisible_config
from support.examples import examples
from support.quantized_folders import Format, quantize_folder
from support.rank_engine import RecordingEngine, engine_of_rank
from support.ranks import ranks
from support.served_steps import CAPACITY, TOLERANCE, numbers, serve, served
from support.tiny_drafter import write_tiny_drafter
from support.tiny_model import CONFIGS, write_tiny_model
from support.tiny_mtp import write_tiny_mtp


def compare(one: RecordingEngine, folder: Path, size: int, expert_parts: int, **how: Any) -> None:
    """Asserts that each of `size` ranks has the results of `one`."""
    wanted = one.results()
    assert numbers(wanted) or one.capacity.num_drafts
    results = ranks(size).call(
        rank_engine.repeat, folder, one.capacity, one.steps, expert_parts, how
    )
    for of_rank in results:
        assert [step.tokens for step in of_rank] == [step.tokens for step in wanted]
        assert numbers(of_rank) == pytest.approx(numbers(wanted), abs=TOLERANCE)
        assert numbers(of_rank) == numbers(results[0])  # bit by bit


@pytest.mark.parametrize(
    ("name", "divisions"),
    [
        ("v3", [(4, 2)]),  # groups of ranks share the experts
        pytest.param("v3", [(2, 1), (2, 2), (4, 1), (4, 4)], marks=pytest.mark.slow),
        ("v2_lite", [(2, 2)]),
        pytest.param("v2_lite", [(4, 1)], marks=pytest.mark.slow),
        ("v2_tied", [(2, 1)]),  # the head is the embedding
        ("v3_halves", [(4, 4)]),  # biases of attention are added once
        ("llama_gqa", [(4, 1)]),  # 2 KV heads: two ranks have the same one
        ("llama_biased", [(2, 1)]),
        pytest.param("qwen2", [(2, 1)], marks=pytest.mark.slow),
        ("gemma2", [(2, 1)]),
    ],
)
def test_ranks_give_the_results_of_one(
    tmp_path: Path, name: str, divisions: list[tuple[int, int]]
) -> None:
    write_tiny_model(tmp_path, **CONFIGS[name])
    one = served(tmp_path, count=8)
    for size, expert_parts in divisions:
        compare(one, tmp_path, size, expert_parts)


@pytest.mark.parametrize(("drafts", "divisions"), [(1, [(4, 4)]), (3, [(2, 2)])])
def test_drafts_of_the_own_layer(
    tmp_path: Path, drafts: int, divisions: list[tuple[int, int]]
) -> None:
    write_tiny_mtp(tmp_path, 1, **CONFIGS["v3"])
    one = served(tmp_path, capacity=replace(CAPACITY, tokens_per_row=1 + drafts))
    assert_drafts_were_accepted(one)
    for size, expert_parts in divisions:
        compare(one, tmp_path, size, expert_parts)


@pytest.mark.parametrize("name", ["v3", "llama_gqa"])
def test_trees_of_drafts(tmp_path: Path, name: str) -> None:
    how = {"eagle": write_tiny_drafter(tmp_path, name)}
    shape = TreeShape(3, 3, 8, CAPACITY.num_slots)
    one = served(
        tmp_path / "model", capacity=replace(CAPACITY, tokens_per_row=4, tree=shape), **how
    )
    assert_drafts_were_accepted(one)
    compare(one, tmp_path / "model", 2, 2 if name == "v3" else 1, **how)


def test_drafts_of_a_layer_beside_replicas_of_experts(tmp_path: Path) -> None:
    write_tiny_mtp(tmp_path, 1, **CONFIGS["v3"])
    config = read_config(tmp_path)
    assert isinstance(config, DeepseekConfig)
    one = served(tmp_path, count=8, capacity=replace(CAPACITY, tokens_per_row=3))
    placement = trivial(config.num_layers, config.num_experts, 2, 2)
    compare(one, tmp_path, 2, 2, placement=placement)


def test_drafts_of_an_eagle_head(tmp_path: Path) -> None:
    """4 ranks share 2 KV heads."""
    eagle = write_tiny_drafter(tmp_path, "llama_gqa")
    capacity = replace(CAPACITY, tokens_per_row=4)
    one = served(tmp_path / "model", capacity=capacity, eagle=eagle)
    assert_drafts_were_accepted(one)
    for size in (2, 4):
        compare(one, tmp_path / "model", size, 1, eagle=eagle)


def assert_drafts_were_accepted(engine: RecordingEngine) -> None:
    verified = [
        r for (plan, _), r in zip(engine.steps, engine.results(), strict=True) if plan.num_drafts
    ]
    assert any(len(tokens) > 1 for result in verified for tokens in result.tokens)


@pytest.mark.slow
def test_the_small_model_on_eight_ranks() -> None:
    compare(served(SMALL_MODEL, count=5), SMALL_MODEL, 8, 1)


@examples(3)
@given(st.data())
def test_random_models_and_steps(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    size, seed = data.draw(st.sampled_from([2, 4])), data.draw(st.integers(0, 1000))
    config = divisible_config(seed, size)
    parts = (
        [1, 2, size]
        if config.get("first_k_dense_replace", 3) < config["num_hidden_layers"]
        else [1]
    )
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, seed=seed, **config)
    expert_parts = data.draw(st.sampled_from(parts))
    placement = data.draw(placements(config, expert_parts)) if expert_parts > 1 else None
    one = served(folder, seed=seed, count=8)
    compare(one, folder, size, expert_parts, placement=placement)


@st.composite
def placements(draw: st.DrawFn, config: dict[str, Any], parts: int) -> Placement:
    layers, experts = config["num_hidden_layers"], config["n_routed_experts"]
    loads = st.lists(st.integers(0, 20), min_size=experts, max_size=experts)
    counts = draw(st.lists(loads, min_size=layers, max_size=layers))
    return balanced(counts, parts, draw(st.sampled_from([0, parts])))


# 5 and 6 blocks of 16 columns, of which the last one is cut off; heads are whole blocks
BLOCKS = CONFIGS["v2_lite"] | {
    "v_head_dim": 16,
    "intermediate_size": 168,
    "moe_intermediate_size": 80,
    "num_hidden_layers": 2,
}


def test_a_quantized_checkpoint(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "plain", **BLOCKS)
    folder = tmp_path / "quantized"
    quantize_folder(tmp_path / "plain", folder, Format("block", (16, 16)))
    one = served(folder, count=5)
    compare(one, folder, 2, 1)
    compare(one, folder, 2, 2)


def test_blocks_that_are_quantized_while_they_load(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **BLOCKS)
    online = replace(ONLINE["fp8"], block=(16, 16))
    config = replace(read_config(tmp_path), quantization=online)
    compare(served(tmp_path, count=5, config=config), tmp_path, 2, 1, config=config)


def test_experts_that_are_placed_by_their_recorded_load(tmp_path: Path) -> None:
    """With and without replicas, results are those of one rank; by the recorded load ranks do more equal work than with the
    experts in order."""
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    one = engine_of_rank(ONE_RANK, tmp_path, CAPACITY)
    counts = count_experts(one.model)
    serve(one, seed=1, count=6)
    config = one.model.config
    assert isinstance(config, DeepseekConfig)
    rows = sum(plan.num_tokens for plan, _ in one.steps)
    of_outputs = sum(len(plan.sampled_slots) for plan, _ in one.steps)
    pairs = [layer.sum().item() // config.experts_per_token for layer in counts]
    moe = config.num_layers - config.num_dense_layers
    assert pairs[:-1] == [0] * config.num_dense_layers + [rows] * (moe - 1)
    assert of_outputs <= pairs[-1] <= rows  # the last layer computes rows with an output

    recorded, experts = counts.tolist(), config.num_experts
    for parts, redundant in ((2, 0), (4, 4)):
        placement = balanced(recorded, parts, redundant)
        in_order = trivial(config.num_layers, experts, parts)
        assert balancedness(placement.loads(counts)) > balancedness(in_order.loads(counts))
        compare(one, tmp_path, 4, parts, placement=placement)
    skewed = balanced([[1000, 1, 1, 1, 1, 1, 1, 0]] * config.num_layers, 2, 4)
    compare(one, tmp_path, 2, 2, placement=skewed)


def test_random_weights_are_pieces_of_one_model(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    one = served(tmp_path, count=5, dummy=True)
    compare(one, tmp_path, 2, 1, dummy=True)
    compare(one, tmp_path, 2, 2, dummy=True)


def test_all_ranks_have_the_pages_of_the_one_with_the_least_room() -> None:
    assert ranks(4).call(rank_engine.pages_with, [4096, 640, 9999, 650]) == [40] * 4
