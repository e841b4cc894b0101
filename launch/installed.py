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
        raise SystemExit(f"error: a worker needs {', '.join(missing)}; run: {_command('worker')}")


def require_ray() -> None:
    """Exits if Ray is missing."""
    if find_spec("ray") is None:
        raise SystemExit(f"error: --use-ray needs Ray; run: {_command('ray')}")


def _command(extra: str) -> str:
    """Returns the command that installs the packages of `extra`. It names them, because the extra's own name needs an
    index that has this package."""
    try:
        required = metadata.requires("mla-router") or []
    except metadata.PackageNotFoundError:  # a source checkout on PYTHONPATH
        return "make venv"
    pairs = [requirement.partition(";") for requirement in required]
    wanted = [package.strip() for package, _, marker in pairs if _names(marker, extra)]
    # A checkout that was installed before it had this extra names nothing.
    return shlex.join(["pip", "install", *wanted]) if wanted else "make venv"


def _names(marker: str, extra: str) -> bool:
    """Returns whether a marker such as `extra == 'worker'` names `extra`."""
    return re.search(rf"extra == ['\"]{extra}['\"]", marker) is not None
