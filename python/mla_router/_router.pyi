"""The router, compiled from `router/bindings`. Public names are re-exported by `mla_router`."""

from collections.abc import Sequence
from os import PathLike
from types import TracebackType
from typing import Literal, Self, TypeAlias, TypedDict, final

_Policy: TypeAlias = Literal[
    "cache_aware",
    "cache_aware_threshold",
    "consistent_hash",
    "least_load",
    "manual",
    "power_of_two",
    "prefix_hash",
    "random",
    "round_robin",
]
_QueuePolicy: TypeAlias = Literal["fcfs", "fair"]
_LogLevel: TypeAlias = Literal["error", "warn", "info", "debug", "trace"]

__all__ = [
    "Router",
    "RouterConfig",
    "RouterError",
    "ignored_router_flags",
    "router_flags",
    "run_cli",
]

class RouterError(Exception):
    """An operation of the router has failed. The message is one line."""

class _Settings(TypedDict):
    worker_urls: list[str]
    worker_urls_file: str | None
    service_discovery: bool
    selector: list[str]
    service_discovery_port: int
    service_discovery_namespace: str | None
    worker_networks: list[str]
    worker_api_key: str | None
    worker_admin_api_key: str | None
    replay_key: str | None
    worker_ca_cert_path: str | None
    dp_aware: bool
    upstream_http2: bool
    connect_timeout_secs: float
    upstream_idle_timeout_secs: float
    host: str
    port: int
    reuse_port: bool
    tls_cert_path: str | None
    tls_key_path: str | None
    api_key: list[str]
    admin_api_key: str | None
    insecure: bool
    allowed_hosts: list[str]
    cors_allowed_origins: list[str]
    max_payload_size: int
    max_connections: int
    header_read_timeout_secs: float
    body_read_timeout_secs: float
    body_min_rate: int
    sse_keepalive_secs: float
    shutdown_grace_period_secs: float
    policy: _Policy
    cache_threshold: float
    balance_abs_threshold: int
    balance_rel_threshold: float
    max_tree_size: int
    max_concurrent_requests: int
    queue_size: int
    queue_policy: _QueuePolicy
    queue_timeout_secs: float
    request_timeout_secs: float
    first_token_timeout_secs: float
    inter_token_timeout_secs: float
    max_retries: int
    disable_retries: bool
    retry_initial_backoff_ms: int
    retry_max_backoff_ms: int
    retry_budget: float
    disable_replay: bool
    disable_circuit_breaker: bool
    cb_failure_threshold: int
    cb_timeout_duration_secs: float
    health_check_interval_secs: float
    health_check_timeout_secs: float
    health_failure_threshold: int
    health_success_threshold: int
    health_check_endpoint: str
    log_level: _LogLevel
    log_json: bool
    access_log: bool
    request_id_headers: list[str]
    otlp_traces_endpoint: str | None

class _Trouble(TypedDict):
    reason: str
    for_s: float  # seconds since the first failure

class _Worker(TypedDict):
    id: int
    url: str
    phase: Literal["starting", "healthy", "suspect", "down"]
    healthy: bool
    is_healthy: bool
    breaker: Literal["closed", "open", "half_open"]
    dp_rank: int | None  # None if the router does not choose the data-parallel rank
    trouble: _Trouble | None  # the reason why it gets no requests
    requests: int
    pending_tokens: int
    models: list[str]
    boot_id: str | None
    max_total_num_tokens: int | None
    runtime: Literal["mla", "sglang", "vllm"] | None
    unreported_answers: int  # complete answers without a report of cached tokens

class _Tokens(TypedDict):
    """Prompt tokens of the requests with a report of cached tokens."""

    prompt: int
    predicted: int  # tokens that the router predicted to be cached
    cached: int

class _EngineLoad(TypedDict):
    """The figures in an engine's /metrics. None: the engine does not report the figure."""

    running: float | None
    waiting: float | None
    kv_usage: float | None
    prompt_tokens: float | None
    output_tokens: float | None
    pauses_s: float | None
    pauses: float | None

class _WorkerStats(_Worker):
    selections: dict[str, int]  # requests sent to the worker, by the policy's reason
    tokens: _Tokens
    tree_blocks: int
    ejections: int
    engine: _EngineLoad

class _Requests(TypedDict):
    in_flight: int
    waiting: int  # requests in flight that wait for a worker
    answered: dict[str, int]  # by status class: "2xx" and so on
    client_aborts: int
    retries: int
    upstream_errors: int

class _Latency(TypedDict):
    count: int
    sum_s: float
    buckets: list[tuple[float, int]]  # upper bound in seconds, and number of requests up to it

class _Tree(TypedDict):
    blocks: int
    held: int  # blocks, counted once for each worker that owns them
    bytes: int

class _Process(TypedDict):
    cpu_s: float
    resident_bytes: int

class _Stats(TypedDict):
    """A snapshot. Counts begin at the start of the router; the difference of two snapshots gives a rate."""

    version: str
    uptime_s: float
    policy: str
    draining: bool
    requests: _Requests
    tokens: _Tokens
    first_byte: _Latency
    duration: _Latency
    tree: _Tree
    process: _Process
    workers: list[_WorkerStats]

class _Flag(TypedDict):
    name: str
    heading: str | None
    value_name: str | None  # None: the flag takes no value
    nargs: Literal["+", "*"] | None  # argparse's, if the flag takes several values
    default: str | None
    help: str
    choices: list[str]

@final
class RouterConfig:
    """All settings of a router. A setting that is missing or None has the default of the command line.

    Raises TypeError for an unknown name, and ValueError, which names the flag, for an invalid value. Environment
    variables are not read.
    """

    def __new__(
        cls,
        *,
        worker_urls: Sequence[str] | None = None,
        worker_urls_file: str | PathLike[str] | None = None,
        service_discovery: bool | None = None,
        selector: Sequence[str] | None = None,
        service_discovery_port: int | None = None,
        service_discovery_namespace: str | None = None,
        worker_networks: Sequence[str] | None = None,
        worker_api_key: str | None = None,
        worker_admin_api_key: str | None = None,
        replay_key: str | None = None,
        worker_ca_cert_path: str | PathLike[str] | None = None,
        dp_aware: bool | None = None,
        upstream_http2: bool | None = None,
        connect_timeout_secs: float | None = None,
        upstream_idle_timeout_secs: float | None = None,
        host: str | None = None,
        port: int | None = None,
        reuse_port: bool | None = None,
        tls_cert_path: str | PathLike[str] | None = None,
        tls_key_path: str | PathLike[str] | None = None,
        api_key: Sequence[str] | None = None,
        admin_api_key: str | None = None,
        insecure: bool | None = None,
        allowed_hosts: Sequence[str] | None = None,
        cors_allowed_origins: Sequence[str] | None = None,
        max_payload_size: int | None = None,
        max_connections: int | None = None,
        header_read_timeout_secs: float | None = None,
        body_read_timeout_secs: float | None = None,
        body_min_rate: int | None = None,
        sse_keepalive_secs: float | None = None,
        shutdown_grace_period_secs: float | None = None,
        policy: _Policy | None = None,
        cache_threshold: float | None = None,
        balance_abs_threshold: int | None = None,
        balance_rel_threshold: float | None = None,
        max_tree_size: int | None = None,
        max_concurrent_requests: int | None = None,
        queue_size: int | None = None,
        queue_policy: _QueuePolicy | None = None,
        queue_timeout_secs: float | None = None,
        request_timeout_secs: float | None = None,
        first_token_timeout_secs: float | None = None,
        inter_token_timeout_secs: float | None = None,
        max_retries: int | None = None,
        disable_retries: bool | None = None,
        retry_initial_backoff_ms: int | None = None,
        retry_max_backoff_ms: int | None = None,
        retry_budget: float | None = None,
        disable_replay: bool | None = None,
        disable_circuit_breaker: bool | None = None,
        cb_failure_threshold: int | None = None,
        cb_timeout_duration_secs: float | None = None,
        health_check_interval_secs: float | None = None,
        health_check_timeout_secs: float | None = None,
        health_failure_threshold: int | None = None,
        health_success_threshold: int | None = None,
        health_check_endpoint: str | None = None,
        log_level: _LogLevel | None = None,
        log_json: bool | None = None,
        access_log: bool | None = None,
        request_id_headers: Sequence[str] | None = None,
        otlp_traces_endpoint: str | None = None,
    ) -> Self: ...
    @staticmethod
    def from_argv(argv: Sequence[str]) -> RouterConfig:
        """Parses a command line without the program name. Keys that are not in it are read from the environment."""

    def to_dict(self) -> _Settings:
        """Returns all settings by name. `RouterConfig(**settings)` gives an equal config."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    __hash__: None  # type: ignore[assignment]

@final
class Router:
    """A router within this process. `start` and `stop` it, or use it as a context manager.

    It runs on its own threads and does not need the interpreter. Every method may be called from any thread. While a
    method waits, other Python threads run, and Ctrl-C ends the wait.
    """

    def __new__(cls, config: RouterConfig | None = None) -> Self: ...
    def start(self) -> None:
        """Starts the router. Returns when the port is open. Raises RouterError if the port is in use."""

    @property
    def url(self) -> str:
        """The URL at which the router listens."""

    def add_worker(self, url: str) -> None:
        """Registers a worker. It gets requests after its first good health check. Raises RouterError if there is one with this
        URL, and ValueError if it is no URL of a worker."""

    def remove_worker(self, url: str) -> None:
        """Removes a worker. Its requests in flight may finish. Raises RouterError if it is not registered, and ValueError if
        it is no URL of a worker."""

    def workers(self) -> list[_Worker]:
        """Returns the workers and their state, in the order of registration."""

    def stats(self) -> _Stats:
        """Returns a snapshot of all statistics."""

    def drain(self, timeout_s: float) -> bool:
        """Refuses new requests. Returns whether the requests in flight have finished within `timeout_s` seconds."""

    def stop(self, timeout_s: float = 5.0) -> None:
        """Closes the port and, after `timeout_s`, the connections. Does nothing if the router is not running,
        or runs in another process, from which this one was forked."""

    def wait(self) -> None:
        """Returns when the router has been stopped. Ctrl-C ends the wait, not the router."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        error_type: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None: ...

def router_flags() -> list[_Flag]:
    """Returns the flags of the router's command line, so that other commands can offer them."""

def ignored_router_flags() -> dict[str, str]:
    """Returns the flags of SGLang's router that are accepted without effect, with the reasons."""

def run_cli(argv: Sequence[str]) -> int:
    """Runs the `mla-router` command with these arguments. Returns its exit status."""
