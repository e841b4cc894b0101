"""The settings of a worker and the values that follow from several of them.

`settings.py` has the fields, and `config_checks.py` checks them against each other.
"""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mla_router.worker.config_checks import check_together
from mla_router.worker.settings import EXIT_BAD_SETTINGS, NOT_UTF8, ConfigError, Settings
from mla_router.worker.tree_shape import TreeShape

__all__ = [
    "EXIT_BAD_SETTINGS",
    "SMALL_MODEL",
    "ConfigError",
    "WorkerConfig",
    "check_secret",
    "misspelt_keys",
    "secrets_of_environment",
    "with_port",
]

# For ranks on one machine. Torch sets up multicast by NVLink switches unless forbidden; nothing here uses it
_RANKS = {"NCCL_SOCKET_IFNAME": "lo", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
# Steps differ in size, so memory that one step frees must be usable for tensors of other sizes in the next step.
# OpenMP threads sleep while they wait: on a busy machine, spinning threads occupy the cores that the awaited threads need.
_TORCH = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "OMP_WAIT_POLICY": "PASSIVE"}

# Variables that the router alone reads
_ROUTER_KEYS = {"MLA_ROUTER_WORKER_API_KEY", "MLA_ROUTER_WORKER_ADMIN_API_KEY"}

# Drafts of speculative decoding, unless a flag says otherwise: as SGLang for DeepSeek's models
_NUM_DRAFTS = 3
# Rows of a request whose drafts are a tree: as SGLang for Llama
_TREE_NODES = 8

SMALL_MODEL = Path(__file__).resolve().parent / "model" / "small"


@dataclass(frozen=True, slots=True)
class WorkerConfig(Settings):
    """The settings of a worker, checked together. Raises ConfigError."""

    def __post_init__(self) -> None:
        self.check_values()
        check_together(self)

    @property
    def tree(self) -> TreeShape | None:
        """The trees of drafts; None: drafts are a chain, or there are none."""
        topk, depth = self.speculative_eagle_topk, self.num_drafts
        if topk == 1 or not depth:
            return None
        candidates = topk + (depth - 1) * topk**2
        nodes = self.speculative_num_draft_tokens or min(_TREE_NODES, candidates + 1)
        slots = min(self.speculative_max_bs, self.max_running_requests)
        return TreeShape(topk, depth, nodes, slots)

    @property
    def rows_per_decode(self) -> int:
        """Rows of a request in a step that verifies drafts."""
        tree = self.tree
        return 1 + self.num_drafts if tree is None else tree.nodes

    @property
    def num_drafts(self) -> int:
        """Maximum number of drafts of a request that a step accepts."""
        if self.speculative_algorithm == "none":
            return 0
        return self.speculative_num_steps or _NUM_DRAFTS

    @property
    def max_masks(self) -> int:
        """Maximum number of token bitmasks of one step."""
        return self.max_running_requests * (1 + self.num_drafts)

    @property
    def chooses_drafts(self) -> bool:
        """Whether steps have drafts only where they pay by measured times."""
        return self.speculative_algorithm != "none" and not self.speculative_num_steps

    @property
    def ranks(self) -> range:
        """The ranks of this worker: all, or with DP attention those of its DP rank. The first one has the scheduler."""
        each = self.tp_size // self.attn_dp_size
        return range(self.attn_dp_rank * each, (self.attn_dp_rank + 1) * each)

    @property
    def ranks_here(self) -> range:
        """The ranks of this worker on this node."""
        return self.ranks if self.attn_dp_size > 1 else self.ranks_of(self.node_rank)

    def ranks_of(self, node: int) -> range:
        """Returns the ranks on a node: those of this worker, or with DP attention those of all DP ranks there."""
        each = self.tp_size // self.nnodes
        return range(node * each, (node + 1) * each)

    @property
    def leads_here(self) -> bool:
        """Whether the first rank of this worker, which has the scheduler, is on this node."""
        return self.ranks.start in self.ranks_here

    @property
    def dp_ranks_here(self) -> range:
        """The DP ranks on this node."""
        each = self.attn_dp_size // self.nnodes
        return range(self.node_rank * each, (self.node_rank + 1) * each)

    @property
    def decode_graph_sizes(self) -> list[int]:
        """Batch sizes of --cuda-graph-bs; empty if the flag is not set."""
        sizes = {int(size) for size in self.cuda_graph_bs.split(",") if size}
        return sorted(size for size in sizes if 0 < size <= self.max_running_requests)

    @property
    def media_domains(self) -> list[str]:
        """The domains of --allowed-media-domains."""
        return [
            domain for part in self.allowed_media_domains.split(",") if (domain := part.strip())
        ]

    @property
    def chunk_size(self) -> int:
        """Maximum number of prompt tokens of one request in one step."""
        return (
            self.max_prefill_tokens if self.chunked_prefill_size < 0 else self.chunked_prefill_size
        )

    @property
    def folder(self) -> Path:
        """The model's folder. Names on the hub are already resolved (`model_folder.locate`)."""
        return Path(self.model_path) if self.model_path else SMALL_MODEL

    @property
    def draft_folder(self) -> Path | None:
        """The folder of --speculative-draft-model-path; None: drafts are made by the model's own layer."""
        path = self.speculative_draft_model_path
        return Path(path) if path else None

    @property
    def tokenizer_folder(self) -> Path:
        return Path(self.tokenizer_path) if self.tokenizer_path else self.folder

    @property
    def model_name(self) -> str:
        return self.served_model_name or ("mla-small" if not self.model_path else self.folder.name)

    @property
    def url(self) -> str:
        return f"http://{with_port(self.host, self.port)}"

    @property
    def name(self) -> str:
        return self.worker_id or with_port(self.host, self.port)

    def settings(self) -> dict[str, Any]:
        """Returns all settings but the secrets, for display."""
        return {
            spec.name: getattr(self, spec.name)
            for spec in dataclasses.fields(self)
            if "variable" not in spec.metadata
        }

    def to_argv(self) -> list[str]:
        """Returns the flags of this config for a child process, without the secrets: `ps` shows flags. The secrets go by
        `child_environment`."""
        argv = []
        for spec in dataclasses.fields(self):
            value, flag = getattr(self, spec.name), "--" + spec.name.replace("_", "-")
            if value != spec.default and "variable" not in spec.metadata:
                argv += [flag] if value is True else [f"{flag}={value}"]
        return argv

    def child_environment(self) -> dict[str, str]:
        """Returns the environment of a child process: this process's, torch's settings, and the secrets."""
        secrets = {
            spec.metadata["variable"]: str(value)
            for spec in dataclasses.fields(self)
            if "variable" in spec.metadata and (value := getattr(self, spec.name))
        }
        ranks = _RANKS if self.tp_size > 1 and self.nnodes == 1 else {}
        return {**_TORCH, **ranks, **os.environ, **secrets}


def with_port(host: str, port: int) -> str:
    """Returns HOST:PORT, with the brackets of an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def misspelt_keys() -> dict[str, str]:
    """Returns the variables of the environment that are named like a key and that nothing reads, each with the most
    similar one that is read."""
    fields = dataclasses.fields(WorkerConfig)
    read = _ROUTER_KEYS | {f.metadata["variable"] for f in fields if "variable" in f.metadata}
    given = {name for name in os.environ if re.match("MLA_ROUTER_.*KEY", name)}
    close = {name: get_close_matches(name, sorted(read), n=1) for name in sorted(given - read)}
    return {name: names[0] for name, names in close.items() if names}


def secrets_of_environment() -> dict[str, str]:
    """Returns the secrets in the environment, by field. Every user of the machine can read flags, but not the
    environment. Raises ConfigError."""
    variables = {
        spec.name: spec.metadata["variable"]
        for spec in dataclasses.fields(WorkerConfig)
        if "variable" in spec.metadata
    }
    given = {
        name: check_secret(variable, os.environ[variable])
        for name, variable in variables.items()
        if variable in os.environ
    }
    return dict.fromkeys(variables, "") | given


def check_secret(name: str, value: str) -> str:
    """Returns `value` of the flag or variable `name`. Raises ConfigError: without a key, a server would be open, and no client
    can send a key with the newline of its file."""
    if not value:
        raise ConfigError(f"{name} is empty: give a key, or leave it out")
    if NOT_UTF8.search(value):
        raise ConfigError(f"{name}: the key has bytes that are not UTF-8; give another one")
    if value != value.strip():
        raise ConfigError(f"{name}: the key begins or ends with a blank or a newline; remove it")
    return value
