"""What an installation may lack, told in one line.

`pip install mla-router` brings the router alone; a source checkout may have no compiled router.
"""

from __future__ import annotations

from importlib.util import find_spec

# The packages of the extra `worker` that a worker does not start without, as they are imported.
OF_A_WORKER = ("torch", "transformers", "aiohttp", "zmq", "msgspec", "setproctitle")


def require_router() -> None:
    """Leave the program if `mla_router._router` cannot be loaded."""
    try:
        import mla_router._router  # noqa: F401
    except ImportError as error:
        raise SystemExit(
            f"error: the compiled router cannot be loaded ({error}); "
            "build it with `make build`, or `pip install mla-router`"
        ) from None


def require_worker() -> None:
    """Leave the program if a worker could not start. Looks for its packages without importing."""
    missing = [name for name in OF_A_WORKER if find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"error: a worker needs {', '.join(missing)}; `pip install 'mla-router[worker]'`"
        )
