"""What an installation may lack, told in one line with the command that mends it.

The package without its extra `worker` is the router alone; a source checkout may have no compiled router.
"""

from __future__ import annotations

import re
import shlex
from importlib import metadata
from importlib.util import find_spec

# The packages of the extra `worker` that a worker does not start without, as they are imported.
OF_A_WORKER = ("torch", "transformers", "aiohttp", "zmq", "msgspec", "setproctitle")


def require_router() -> None:
    """Leave the program if `mla_router._router` cannot be loaded."""
    try:
        import mla_router._router  # noqa: F401
    except ImportError as error:
        raise SystemExit(
            f"error: the compiled router cannot be loaded ({error}); in a source checkout `make build` "
            "makes it, and `make wheel` a package with it"
        ) from None


def require_worker() -> None:
    """Leave the program if a worker could not start. Looks for its packages without importing."""
    missing = [name for name in OF_A_WORKER if find_spec(name) is None]
    if missing:
        raise SystemExit(f"error: a worker needs {', '.join(missing)}; run: {_command()}")


def _command() -> str:
    """Installs what the extra `worker` asks for. It names the packages themselves: the extra's own name
    works only where an index has this package."""
    try:
        required = metadata.requires("mla-router") or []
    except metadata.PackageNotFoundError:  # a source checkout on PYTHONPATH
        return "make venv"
    wanted = [text for text in map(_of_worker, required) if text is not None]
    return shlex.join(["pip", "install", *wanted])


def _of_worker(requirement: str) -> str | None:
    """`torch==2.11.0 ; extra == 'worker'` without its marker; None for another extra's."""
    package, _, marker = requirement.partition(";")
    return package.strip() if re.search(r"extra == ['\"]worker['\"]", marker) else None
