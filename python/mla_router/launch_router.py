"""`python -m mla_router.launch_router`: see `mla_router.launch.router`."""

from mla_router.launch.router import main

if __name__ == "__main__":
    raise SystemExit(main())
