"""The state that all handlers share: settings, and the service once the scheduler is ready."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from mla_router.worker.config import WorkerConfig
from mla_router.worker.heartbeat import Heartbeat
from mla_router.worker.heartbeat_watch import RanksWatch
from mla_router.worker.messages import Ready
from mla_router.worker.server.errors import NotFound, Unavailable
from mla_router.worker.server.ipc.scheduler_client import SchedulerClient, Shared
from mla_router.worker.server.ipc.shared_counters import SharedCounters
from mla_router.worker.server.media.reader import MediaReader
from mla_router.worker.server.metrics.metrics import Metrics
from mla_router.worker.server.metrics.scheduler_collector import Reading
from mla_router.worker.server.request_names import NamedRequests
from mla_router.worker.server.text.answer import AnswerFormat
from mla_router.worker.server.text.tokenizer import Tokenizer

DEFAULT_MODEL = "default"  # SGLang's clients use it for the only model


def fingerprint_of(config: WorkerConfig, limits: Ready) -> str:
    """Returns OpenAI's system_fingerprint: equal for the same model, device, dtypes and attention backend."""
    parts = (
        config.model_name,
        limits.device,
        limits.dtype,
        limits.kv_cache_dtype,
        limits.attention_backend,
    )
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]


@dataclass(frozen=True, slots=True)
class Service:
    """The objects that serve requests. It exists once the scheduler is ready."""

    config: WorkerConfig
    limits: Ready
    tokenizer: Tokenizer
    answers: AnswerFormat
    scheduler: SchedulerClient
    names: NamedRequests
    metrics: Metrics
    fingerprint: str  # see `fingerprint_of`
    media: MediaReader | None = None  # of a model that takes images

    def check_model(self, name: str | None) -> str:
        """Returns the model's name for the answer: the client's spelling, or the served name.

        The worker serves one model, so a request may omit it. Raises NotFound.
        """
        config = self.config
        if not name or name == DEFAULT_MODEL:
            return config.model_name
        if name not in (config.model_name, config.folder.name, str(config.folder)):
            raise NotFound(
                f"The model `{name[:200]}` does not exist; this server has `{config.model_name}`",
                param="model",
                code="model_not_found",
            )
        return name


class StartInfo(msgspec.Struct, frozen=True):
    """The start of a worker, the same in all its API processes."""

    boot_id: str
    created: int  # seconds since 1970
    started: float  # by the monotonic clock

    @classmethod
    def now(cls) -> StartInfo:
        return cls(secrets.token_hex(16), int(time.time()), time.monotonic())


@dataclass(slots=True)
class ServerState:
    """State that the endpoints of an API process share."""

    config: WorkerConfig
    start_info: StartInfo = field(default_factory=StartInfo.now)
    counters: SharedCounters = field(default_factory=SharedCounters.create)
    heartbeat: Heartbeat = field(default_factory=Heartbeat.create)
    own_heartbeat: Heartbeat = field(default_factory=Heartbeat.create)  # of this API process
    service: Service | None = None  # None until the weights are loaded
    draining: bool = False
    shared: Shared = field(init=False)
    metrics: Metrics = field(init=False)
    ranks: list[Heartbeat] = field(init=False)  # the heartbeats of all ranks of the worker
    watch: RanksWatch = field(init=False)
    servers_watch: RanksWatch = field(init=False)  # of all API processes

    def __post_init__(self) -> None:
        config = self.config
        self.ranks = [self.heartbeat, *map(self.heartbeat.of_rank, config.ranks[1:])]
        # Other DP ranks wait for this one and for each other
        strangers = [rank for rank in range(config.tp_size) if rank not in config.ranks]
        self.watch = RanksWatch([*self.ranks, *map(self.heartbeat.of_rank, strangers)])
        servers = range(config.tokenizer_worker_num or 1)
        self.servers_watch = RanksWatch([self.own_heartbeat.of_rank(number) for number in servers])
        self.shared = Shared(self.counters)
        self.metrics = Metrics(config.model_name, self.reading, self.counters, self.dp_rank)

    @property
    def dp_rank(self) -> int | None:
        """The number of this DP rank; None without DP attention."""
        return self.config.attn_dp_rank if self.config.attn_dp_size > 1 else None

    @property
    def complete(self) -> bool:
        """Whether all API processes serve. All of them see it at the same time, so that /health does not differ."""
        return self.shared.complete.total > 0

    def ready(self) -> Service:
        if self.service is None:
            raise Unavailable("The model is loading", code="starting", retry_after=1)
        return self.service

    def accepting(self) -> Service:
        """Returns the service for a new generation. Raises Unavailable."""
        if self.draining:
            raise Unavailable("This worker is shutting down", code="draining", retry_after=1)
        # A stream that another DP rank has lost would come here next, only to be lost again with the whole group
        if self.dp_rank is not None and self.watch.is_frozen:
            raise Unavailable("A rank of the DP group is stuck", code="stuck", retry_after=1)
        return self.ready()

    def healthy(self) -> bool:
        """Returns whether the worker makes progress: the heartbeats of all ranks and API processes change, and every
        API process receives statistics."""
        return (
            self.service is not None
            and self.complete
            and not self.draining
            and not self.watch.is_frozen
            and not self.servers_watch.is_frozen
            and self.service.scheduler.latest_stats.oldest_age < self.config.watchdog_timeout
        )

    def last_step_age(self) -> float:
        """Returns the seconds since the last observed progress of the scheduler."""
        if self.heartbeat.pid or self.service is None:
            return self.heartbeat.age
        return self.service.scheduler.latest_stats.oldest_age

    def reading(self) -> Reading | None:
        """Returns the scheduler's last statistics; None before the first ones."""
        if self.service is None:
            return None
        latest = self.service.scheduler.latest_stats
        if latest.value is None:
            return None
        return Reading(self.service.limits, latest.value, latest.throughput)


STATE = web.AppKey("state", ServerState)
