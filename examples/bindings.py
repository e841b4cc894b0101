"""The router inside a Python program: workers are added, drained and removed while it runs.

python examples/bindings.py http://127.0.0.1:31000 http://127.0.0.1:31001
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request

from mla_router import Router, RouterConfig


def main(urls: list[str]) -> None:
    with Router(RouterConfig(worker_urls=urls[:1], port=0)) as router:
        for url in urls[1:]:
            router.add_worker(url)
        while not all(worker["healthy"] for worker in router.workers()):
            time.sleep(0.1)  # the first health checks

        messages = [{"role": "user", "content": "What is 17 + 25?"}]
        body = {"messages": messages, "max_tokens": 32, "temperature": 0}
        request = urllib.request.Request(
            router.url + "/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            print(json.load(response)["choices"][0]["message"]["content"])

        for worker in router.workers():
            print(worker["url"], "healthy" if worker["healthy"] else "unhealthy")
        for url in urls[1:]:
            router.remove_worker(url)  # it finishes the requests that it has


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
