"""The router in front of running engines: SGLang, vLLM, or any server with OpenAI's API.

    python examples/front.py http://10.0.0.1:30000 http://10.0.0.2:30000

The same as a command:

    python -m mla_router.launch_router --worker-urls http://10.0.0.1:30000 http://10.0.0.2:30000
"""

from __future__ import annotations

import contextlib
import sys
import time

from mla_router import Router, RouterConfig


def main(urls: list[str], seconds: float = float("inf")) -> None:
    config = RouterConfig(worker_urls=urls, port=0, policy="cache_aware")
    with Router(config) as router:
        print(f"send requests to {router.url}, look at {router.url}/dashboard", flush=True)
        ends = time.monotonic() + seconds
        with contextlib.suppress(KeyboardInterrupt):
            while time.monotonic() < ends:
                time.sleep(1)
                states = {worker["url"]: worker["phase"] for worker in router.workers()}
                print(states, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
