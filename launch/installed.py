"""Checks for missing parts of an installation, and prints one line with the command that installs them.

Without the extra `worker` the package has only the router. A source checkout may lack the compiled router.
"""

from __future__ import annotations

import re
import shlex
from importlib import metadata
from importlib.util import find_spec

# Import names of the packages of the extra `worker` that every worker needs.
OF_A_WORKER = ("torch", "transformers", "aiohttp", "zmq", "msgspec", "setproctitle")


def require_router() -> None:
    """Exits if `mla_router._router` cannot be loaded."""
    try:
        import mla_router._router  # noqa: F401
    except ImportError as error:
        raise SystemExit(
            f"error: the compiled router cannot be loaded ({error}); in a source checkout `make build` "
            "makes it, and `make wheel` a package with it"
        ) from None


def require_worker() -> None:
    """Exits if a package of a worker is missing. It imports none of them."""
    missing = [name for name in OF_A_WORKER if find_spec(name) is None]
    if missing:
        raise SystemExit(f"error: a worker needs {', '.join(missing)}; run: {_command()}")


def _command() -> str:
    """Returns the command that installs the packages of the extra `worker`. It names them, because the extra's own name
    needs an index that has this package."""
    try:
        required = metadata.requires("mla-router") or []
    except metadata.PackageNotFoundError:  # a source checkout on PYTHONPATH
        return "make venv"
    wanted = [text for text in map(_of_worker, required) if text is not None]
    return shlex.join(["pip", "install", *wanted])


def _of_worker(requirement: str) -> str | None:
    """Returns `torch==2.11.0` of `torch==2.11.0 ; extra == 'worker'`; None for other extras."""
    package, _, marker = requirement.partition(";")
    return package.strip() if re.search(r"extra == ['\"]worker['\"]", marker) else None
