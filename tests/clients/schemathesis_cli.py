# /// script
# dependencies = ["schemathesis==4.32.5"]
# ///
"""Schemathesis with our OpenAPI document: generated requests, and answers checked against it."""

from __future__ import annotations

import json
import urllib.request

from checks import Server, command, main

EXAMPLES = 30  # for each operation
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"
CHECKS += ",response_headers_conformance,response_schema_conformance"


# The document is that of a worker. The router answers these paths for all workers together, or does not have them.
ROUTERS_OWN = "^/(health|health_generate|get_load|get_server_info|metrics|flush_cache"
ROUTERS_OWN += "|abort_request|start_profile|stop_profile)$"


def _run(url: str, server: Server, *more: str) -> None:
    command(
        *("schemathesis", "run", url + "/openapi.json", "--checks", CHECKS, *more),
        *("--max-examples", str(EXAMPLES), "--seed", "1", "--request-timeout", "60"),
        cwd=server.folder,
    )


def the_router(server: Server) -> None:
    _run(server.url, server, "--exclude-path-regex", ROUTERS_OWN)


def a_worker(server: Server) -> None:
    with urllib.request.urlopen(server.url + "/workers") as response:
        worker = json.load(response)["workers"][0]["url"]
    _run(worker, server)


main(the_router, a_worker)
