"""The settings of the router behind `launch_server`, and the keys that it shares with its workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mla_router.launch.arguments import with_launcher_flags
from mla_router.launch.options import Options
from mla_router.worker.config import WorkerConfig

if TYPE_CHECKING:
    from mla_router import RouterConfig


class BadRouterFlagError(ValueError):
    """The router's own command line refuses a value."""


def router_config(options: Options, worker_urls: Sequence[str]) -> RouterConfig:
    """Returns the router's settings, with its keys of the environment. Raises BadRouterFlagError."""
    from mla_router import RouterConfig

    try:
        return RouterConfig.from_argv(options.router_argv(worker_urls))
    except UnicodeEncodeError:
        raise BadRouterFlagError("a flag of the router has bytes that are not UTF-8") from None
    except ValueError as error:
        raise BadRouterFlagError(with_launcher_flags(str(error))) from None


def with_worker_key(config: RouterConfig, key: str) -> RouterConfig:
    """Returns the settings with one key for all paths of the workers: a whole network can reach them."""
    from mla_router import RouterConfig

    return RouterConfig(**config.to_dict() | {"worker_api_key": key, "worker_admin_api_key": key})


def with_router_keys(worker: WorkerConfig, key: str | None, admin_key: str | None) -> WorkerConfig:
    """Returns the settings with the keys that the router sends to its workers. Its environment may have keys that are not
    those of clients."""
    return dataclasses.replace(
        worker,
        api_key=key or worker.api_key,
        admin_api_key=admin_key or worker.admin_api_key,
    )
