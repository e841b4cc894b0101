"""`python -m mla_router.launch_server`: see `mla_router.launch.server`."""

from mla_router.launch.server import main

if __name__ == "__main__":
    raise SystemExit(main())
