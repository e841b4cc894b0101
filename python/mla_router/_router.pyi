"""The router, compiled from `router/bindings`. Public names are re-exported by `mla_router`."""

from collections.abc import Sequence
from types import TracebackType
from typing import Literal, TypeAlias, TypedDict, final

from typing_extensions import Self

_Policy: TypeAlias = Literal["cache_aware", "round_robin"]
_LogLevel: TypeAlias = Literal["error", "warn", "info", "debug", "trace"]

__all__ = ["Router", "RouterConfig", "RouterError", "router_flags", "run_cli"]

class RouterError(Exception):
    """The router cannot do what was asked; the message is one line."""

class _Settings(TypedDict):
    worker_urls: list[str]
    host: str
    port: int
    policy: _Policy
    max_payload_size: int
    request_timeout_secs: float
    connect_timeout_secs: float
    upstream_idle_timeout_secs: float
    health_check_interval_secs: float
    health_check_timeout_secs: float
    health_failure_threshold: int
    health_success_threshold: int
    health_check_endpoint: str
    max_retries: int
    queue_size: int
    queue_timeout_secs: float
    shutdown_grace_period_secs: float
    api_key: str | None
    log_level: _LogLevel

class _Worker(TypedDict):
    id: int
    url: str
    phase: Literal["starting", "healthy", "suspect", "down"]
    healthy: bool
    requests: int
    pending_tokens: int
    boot_id: str | None
    max_total_num_tokens: int | None

class _Flag(TypedDict):
    name: str
    value_name: str | None
    default: str | None
    help: str
    choices: list[str]

@final
class RouterConfig:
    """All settings of a router. What is not given, or None, has the default of the command line.

    An unknown name is a TypeError, a bad value a ValueError that names the flag.
    """

    def __new__(
        cls,
        *,
        worker_urls: Sequence[str] | None = None,
        host: str | None = None,
        port: int | None = None,
        policy: _Policy | None = None,
        max_payload_size: int | None = None,
        request_timeout_secs: float | None = None,
        connect_timeout_secs: float | None = None,
        upstream_idle_timeout_secs: float | None = None,
        health_check_interval_secs: float | None = None,
        health_check_timeout_secs: float | None = None,
        health_failure_threshold: int | None = None,
        health_success_threshold: int | None = None,
        health_check_endpoint: str | None = None,
        max_retries: int | None = None,
        queue_size: int | None = None,
        queue_timeout_secs: float | None = None,
        shutdown_grace_period_secs: float | None = None,
        api_key: str | None = None,
        log_level: _LogLevel | None = None,
    ) -> Self: ...
    @staticmethod
    def from_argv(argv: Sequence[str]) -> RouterConfig:
        """The settings that a command line, without the program's name, stands for."""

    def to_dict(self) -> _Settings:
        """All settings by name; `RouterConfig(**settings)` makes the same again."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    __hash__: None  # type: ignore[assignment]

@final
class Router:
    """A router within this process. `start` and `stop` it, or use it as a context manager.

    It runs on threads of its own and needs the interpreter for nothing. Every method may be called
    from any thread; those that wait let other Python threads run and can be ended by Ctrl-C.
    """

    def __new__(cls, config: RouterConfig | None = None) -> Self: ...
    def start(self) -> None:
        """Returns when the port is open; RouterError if it is taken."""

    @property
    def url(self) -> str:
        """Where it listens."""

    def add_worker(self, url: str) -> None:
        """Registers a worker; it takes requests after its first good health check."""

    def remove_worker(self, url: str) -> None:
        """Takes a worker out of rotation; it may finish what it is serving."""

    def workers(self) -> list[_Worker]:
        """The workers and their state, in the order of registration."""

    def drain(self, timeout_s: float) -> bool:
        """Takes no new requests; true when those in flight have finished in time."""

    def stop(self, timeout_s: float = 5.0) -> None:
        """Closes the port and, after `timeout_s`, the connections. Does nothing if not running."""

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
    """The flags of the router's command line, so that others can offer the same."""

def run_cli(argv: Sequence[str]) -> int:
    """The `mla-router` command with these arguments; its exit status."""
