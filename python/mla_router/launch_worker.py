"""`python -m mla_router.launch_worker`: see `mla_router.launch.worker`."""

from mla_router.launch.worker import main

if __name__ == "__main__":
    raise SystemExit(main())
