"""The compiled router: missing, it is missed in one clear line."""

from __future__ import annotations


def require_extension() -> None:
    """Leave the program if `mla_router._router` cannot be loaded."""
    try:
        import mla_router._router  # noqa: F401
    except ImportError as error:
        raise SystemExit(
            f"error: the compiled router cannot be loaded ({error}); "
            "build it with `make build`, or `pip install mla-router`"
        ) from None
