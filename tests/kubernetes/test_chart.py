"""The Helm chart, rendered by Helm and applied to a kube-apiserver: `make test-kubernetes`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mla_router._router import ignored_router_flags, router_flags
from mla_router.launch.arguments import parse
from support.chart import CHART
from support.kube_chart import ROUTER_TOKEN, SERVICE_ACCOUNT, ask, find, render, router
from support.kube_cluster import APISERVER, HELM, ROUTER, Cluster, Refused, cluster
from support.processes import free_ports, status_of, wait_until

pytestmark = pytest.mark.skipif(
    not all(tool.exists() for tool in (APISERVER, HELM, ROUTER)),
    reason="needs Helm and a kube-apiserver: make test-kubernetes",
)

# Kinds that a plain apiserver does not have.
FOREIGN = ("monitoring.coreos.com/v1", "leaderworkerset.x-k8s.io/v1")
EVERYTHING = (
    "--set=autoscaling.enabled=true,serviceMonitor.enabled=true,modelCache.kind=shared,huggingFace.tokenSecret=hf",
    "--set=worker.flags.max-total-tokens=16777216,worker.flags.mem-fraction-static=0.9,worker.flags.disable-mla=true",
    "--set=worker.tpSize=4,worker.modelPath=a/b,worker.runtimeClassName=nvidia,modelCache.storageClass=fast",
    '--set-json=router.flags={"policy":"round_robin","request-id-headers":["x-a","x-b"]}',
    '--set-json=networkPolicy.clients=[{"namespaceSelector":{}}]',
    '--set-json=networkPolicy.monitoring=[{"podSelector":{}}]',
    '--set-json=worker.tolerations=[{"key":"gpu","operator":"Exists"}]',
    '--set-json=router.nodeSelector={"a":"b"}',
)


@pytest.fixture(scope="module")
def apiserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with cluster(folder, [f"{ROUTER_TOKEN},{SERVICE_ACCOUNT},2"]) as started:
        yield started


def lost(sent: Any, kept: Any, path: str = "") -> list[str]:
    """Returns the paths of fields that the apiserver dropped: it does not know them."""
    if isinstance(sent, dict):
        missing = [f"{path}.{name}" for name in sent if name not in (kept or {})]
        inner = [
            lost(sent[name], kept[name], f"{path}.{name}") for name in sent if name in (kept or {})
        ]
        return missing + [line for lines in inner for line in lines]
    if isinstance(sent, list):
        assert len(sent) == len(kept), path
        pairs = zip(sent, kept, strict=True)
        return [line for at, pair in enumerate(pairs) for line in lost(*pair, f"{path}[{at}]")]
    return []


def test_lint_has_no_complaint() -> None:
    command = [str(HELM), "lint", "--strict", str(CHART)]
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.parametrize("values", [(), EVERYTHING], ids=["defaults", "everything"])
def test_the_apiserver_knows_every_field(apiserver: Cluster, values: tuple[str, ...]) -> None:
    own = [manifest for manifest in render(*values) if manifest["apiVersion"] not in FOREIGN]
    assert len(own) >= 12
    for manifest in own:
        kept = apiserver.create(manifest, dry_run=True)
        assert lost(manifest, kept) == [], manifest["kind"]


@pytest.mark.parametrize("dp_ranks", [1, 4])
def test_several_nodes_are_a_leader_worker_set(apiserver: Cluster, dp_ranks: int) -> None:
    values = f"worker.nodes=2,worker.tpSize=16,worker.dpAttention={dp_ranks},modelCache.kind=shared"
    groups = find(render(f"--set={values}"), "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    assert groups["size"] == 2
    for name in ("leaderTemplate", "workerTemplate"):
        pod: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": "pod"},
        }
        pod["template"] = groups[name]
        assert lost(pod, apiserver.create(pod, dry_run=True)) == []
    for value, named in (
        ("worker.tpSize=3", "tpSize 3"),
        ("modelCache.kind=perWorker", "modelCache"),
    ):
        with pytest.raises(subprocess.CalledProcessError) as refused:
            render(f"--set={values},{value}")
        assert named in refused.value.stderr


def test_dp_ranks_are_behind_the_router_of_their_pod(apiserver: Cluster) -> None:
    values = "worker.tpSize=8,worker.dpAttention=8,worker.flags.ep-size=8"
    workers = find(render(f"--set={values}"), "StatefulSet")
    assert lost(workers, apiserver.create(workers, dry_run=True)) == []
    (container,) = workers["spec"]["template"]["spec"]["containers"]
    assert container["command"][-1] == "mla_router.launch_server"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    options = parse(container["args"], router_flags(), ignored_router_flags())
    assert options.every_worker.attn_dp_size == options.every_worker.ep_size == 8
    assert (options.host, options.port) == ("0.0.0.0", 31000)
    for value, named in (
        ("worker.dpAttention=3", "dpAttention 3"),
        ("worker.dpAttention=1,worker.nodes=3,modelCache.kind=shared", "nodes 3"),
        ("worker.dpAttention=4,worker.nodes=8,modelCache.kind=shared", "nodes 8"),
    ):
        with pytest.raises(subprocess.CalledProcessError) as refused:
            render(f"--set={values},{value}")
        assert named in refused.value.stderr


def test_an_unknown_field_and_a_wrong_value_are_noticed(apiserver: Cluster) -> None:
    deployment = find(render(), "Deployment")
    deployment["spec"]["replicaz"] = 2
    assert lost(deployment, apiserver.create(deployment, dry_run=True)) == [".spec.replicaz"]
    deployment["spec"]["template"]["spec"]["containers"][0]["imagePullPolicy"] = "Sometimes"
    with pytest.raises(Refused, match="imagePullPolicy"):
        apiserver.create(deployment, dry_run=True)


class Worker(BaseHTTPRequestHandler):
    """Answers like a worker, and keeps the keys that it was sent."""

    protocol_version = "HTTP/1.1"
    keys: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self._answer(
            {
                "boot_id": str(self.server.server_address),
                "max_total_num_tokens": 4096,
                "page_size": 16,
            }
        )

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.keys.append(self.headers["Authorization"])
        self._answer({"choices": []})

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, found: dict[str, Any]) -> None:
        body = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def workers(host: str, ports: list[int]) -> Iterator[None]:
    servers = [ThreadingHTTPServer((host, port), Worker) for port in ports]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def test_a_router_with_the_charts_rights_discovers_the_charts_pods(
    apiserver: Cluster, tmp_path: Path
) -> None:
    ports = free_ports(2)
    annotation = json.dumps({"mla-router/ports": ",".join(map(str, ports))})
    manifests = render(
        "--set=modelCache.kind=none", f"--set-json=worker.podAnnotations={annotation}"
    )
    for kind in ("ServiceAccount", "Role", "RoleBinding"):
        apiserver.create(find(manifests, kind))
    with pytest.raises(Refused, match="403"):
        apiserver.request("GET", "/api/v1/namespaces/default/secrets", token=ROUTER_TOKEN)
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(apiserver.kubeconfig(ROUTER_TOKEN))

    pod = find(manifests, "StatefulSet")["spec"]["template"]
    pod["metadata"]["name"] = "llm-mla-router-worker-0"
    pod["spec"]["nodeName"] = "node"
    host = "127.0.0.2"
    with workers(host, ports), router(find(manifests, "Deployment"), kubeconfig) as url:
        assert status_of(f"{url}/readiness") == 503
        apiserver.create({"apiVersion": "v1", "kind": "Pod", **pod})
        apiserver.report("llm-mla-router-worker-0", host)
        wait_until(lambda: status_of(f"{url}/readiness") == 200, "a worker is in rotation")
        listed = ask(url, "/list_workers", "value-of-MLA_ROUTER_ADMIN_API_KEY")["urls"]
        assert sorted(listed) == sorted(f"http://{host}:{port}" for port in ports)
        ask(url, "/v1/completions", "value-of-MLA_ROUTER_API_KEY", {"prompt": "a"})
        assert Worker.keys == ["Bearer value-of-MLA_ROUTER_WORKER_API_KEY"]
