"""A cache-aware router and the DeepSeek-family workers behind it.

>>> from mla_router import Router, RouterConfig
>>> with Router(RouterConfig(worker_urls=["http://127.0.0.1:31000"])) as router:
...     print(router.url)
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mla_router._router import Router, RouterConfig, RouterError

__all__ = ["Router", "RouterConfig", "RouterError", "__version__"]

try:
    __version__ = metadata.version("mla-router")
except metadata.PackageNotFoundError:  # a source checkout on PYTHONPATH, not installed
    __version__ = "0+source"


def __getattr__(name: str) -> Any:
    # Workers run without the compiled router, so it is loaded on first use.
    if name in ("Router", "RouterConfig", "RouterError"):
        from mla_router import _router

        return getattr(_router, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
