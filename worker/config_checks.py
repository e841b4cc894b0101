"""Checks of a worker's settings against each other."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from mla_router.worker.settings import MIN_DIST_KEY, ConfigError

if TYPE_CHECKING:
    from mla_router.worker.config import WorkerConfig

_MAX_NODES = 64  # of a tree of drafts: an int64 has a bit for each


def check_together(config: WorkerConfig) -> None:
    """Raises ConfigError if settings exclude each other."""
    if not re.fullmatch(r"(\d{1,4}(,\d{1,4})*)?", config.cuda_graph_bs):
        raise ConfigError(
            f"--cuda-graph-bs {config.cuda_graph_bs}: give batch sizes, such as 1 2 4 8"
        )
    for domain in config.media_domains:
        if not re.fullmatch(r"[\w.-]+|[\da-fA-F:]+", domain):  # a name or an address
            raise ConfigError(
                f"--allowed-media-domains {domain}: give domains alone, such as example.com, without scheme, port, path or *"
            )
    _check_ranks(config)
    _check_speculation(config)
    if config.chunked_prefill_size == 0:
        raise ConfigError("--chunked-prefill-size 0: give at least 1, or -1 for whole prompts")


def _check_ranks(config: WorkerConfig) -> None:
    if config.tp_size % config.ep_size:
        raise ConfigError(f"--ep-size {config.ep_size}: must divide --tp-size {config.tp_size}")
    for flag, is_set in (
        ("--init-expert-location", config.init_expert_location != "trivial"),
        ("--ep-num-redundant-experts", config.ep_num_redundant_experts > 0),
    ):
        if is_set and config.ep_size == 1:
            raise ConfigError(f"{flag}: needs --ep-size of at least 2")
    if config.tp_size % config.attn_dp_size:
        raise ConfigError(
            f"--dp-size {config.attn_dp_size}: must divide --tp-size {config.tp_size}"
        )
    if config.nnodes > 1:
        _check_nodes(config)
    elif config.node_rank:
        raise ConfigError(f"--node-rank {config.node_rank}: set --nnodes, which is 1")


def _check_nodes(config: WorkerConfig) -> None:
    flag = f"--nnodes {config.nnodes}"
    if config.tp_size % config.nnodes:
        raise ConfigError(f"{flag}: must divide --tp-size {config.tp_size}")
    if config.attn_dp_size > 1 and config.attn_dp_size % config.nnodes:
        raise ConfigError(
            f"{flag}: must divide --dp-size {config.attn_dp_size} with --enable-dp-attention: each DP rank is on one node"
        )
    if config.node_rank >= config.nnodes:
        raise ConfigError(f"--node-rank {config.node_rank}: must be less than {flag}")
    if not config.dist_init_addr:
        raise ConfigError(f"{flag}: give --dist-init-addr HOST:PORT, the same on all nodes")
    if len(config.dist_key) < MIN_DIST_KEY:
        raise ConfigError(
            f"{flag}: set MLA_ROUTER_DIST_KEY to a secret of at least {MIN_DIST_KEY} characters, the same on all nodes"
        )


def _check_speculation(config: WorkerConfig) -> None:
    flag = "--speculative-algorithm"
    rows = config.speculative_num_draft_tokens
    if config.speculative_algorithm == "none":
        for spec in dataclasses.fields(config):
            value, other = getattr(config, spec.name), "--" + spec.name.replace("_", "-")
            if other.startswith("--speculative-") and value != spec.default:
                raise ConfigError(f"{other} {value}: needs {flag} NEXTN, EAGLE or NGRAM")
        return
    if config.speculative_algorithm == "NGRAM" and config.speculative_draft_model_path:
        raise ConfigError(
            f"--speculative-draft-model-path {config.speculative_draft_model_path!r}: {flag} NGRAM has no draft layer"
        )
    if config.speculative_algorithm == "EAGLE" and not config.speculative_draft_model_path:
        raise ConfigError(
            f"{flag} EAGLE: give --speculative-draft-model-path, the folder of the draft head"
        )
    if config.speculative_eagle_topk > 1:
        _check_tree(config, flag)
    elif rows and rows != config.num_drafts + 1:
        raise ConfigError(
            f"--speculative-num-draft-tokens {rows}: must be --speculative-num-steps + 1, {config.num_drafts + 1}; or "
            f"leave it out"
        )
    for other, is_set in (
        ("--enable-flashinfer-mla", config.enable_flashinfer_mla),
        ("--enable-torch-compile", config.enable_torch_compile),
    ):
        if is_set:
            raise ConfigError(
                f"{flag} {config.speculative_algorithm}: not with {other}; leave one of the two out"
            )


def _check_tree(config: WorkerConfig, flag: str) -> None:
    tree, topk = config.tree, f"--speculative-eagle-topk {config.speculative_eagle_topk}"
    assert tree is not None, "trees are on"
    if config.speculative_algorithm == "NGRAM":
        raise ConfigError(f"{topk}: trees need {flag} NEXTN or EAGLE; with NGRAM leave it out")
    if config.attention_backend == "flashinfer":
        raise ConfigError(f"{topk}: not with --attention-backend flashinfer")
    most = min(tree.candidates + 1, _MAX_NODES)
    if not 2 <= tree.nodes <= most:
        raise ConfigError(
            f"--speculative-num-draft-tokens {tree.nodes}: from 2 to {most} with {topk} and "
            f"--speculative-num-steps {tree.depth}"
        )
    if tree.expanded > _MAX_NODES:
        raise ConfigError(
            f"{topk}: times one less than --speculative-num-steps {tree.depth} must be at most {_MAX_NODES}"
        )
