"""The Helm chart's manifests, and its router as a process that watches a kube-apiserver."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from support.chart import CHART
from support.kube_cluster import HELM, ROUTER
from support.processes import free_ports, status_of, wait_until

ROUTER_TOKEN = "router-token"
SERVICE_ACCOUNT = "system:serviceaccount:default:llm-mla-router-router"


def render(*values: str) -> list[dict[str, Any]]:
    """Returns the manifests of the release `llm`."""
    command = [str(HELM), "template", "llm", str(CHART), "--kube-version=1.30.0", *values]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [manifest for manifest in yaml.safe_load_all(text) if manifest]


def find(manifests: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [manifest for manifest in manifests if manifest["kind"] == kind]
    return found


@contextlib.contextmanager
def router(deployment: dict[str, Any], kubeconfig: Path) -> Iterator[str]:
    """Starts the router of the chart, on another address and with readable keys. Yields its URL."""
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (port,) = free_ports(1)
    moved = {"--host=0.0.0.0": "--host=127.0.0.1", "--port=30000": f"--port={port}"}
    arguments = [moved.get(argument, argument) for argument in container["args"]]
    keys = {variable["name"]: f"value-of-{variable['name']}" for variable in container["env"]}
    environment = os.environ | keys | {"KUBECONFIG": str(kubeconfig)}
    process = subprocess.Popen([ROUTER, *arguments], env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: status_of(f"{url}/liveness") == 200, "the router runs")
        yield url
    finally:
        process.kill()
        process.wait()


def ask(url: str, path: str, key: str, body: Any = None) -> Any:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data, headers)) as answer:
        return json.load(answer)
