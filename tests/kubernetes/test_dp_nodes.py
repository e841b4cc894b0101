"""DP ranks on several nodes, as the Helm chart starts them: `make test-kubernetes`.

The pods of one group are made from the chart's LeaderWorkerSet, with the variables that its controller would set. Launchers
with the pods' own arguments run in place of the kubelets. A router with the chart's rights finds the group.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import processes
from support.kube_chart import ROUTER_TOKEN, SERVICE_ACCOUNT, ask, find, render, router
from support.kube_cluster import APISERVER, HELM, ROUTER, Cluster, cluster
from support.processes import free_ports, get_json, status_of, wait_until

pytestmark = pytest.mark.skipif(
    not all(tool.exists() for tool in (APISERVER, HELM, ROUTER)),
    reason="needs Helm and a kube-apiserver: make test-kubernetes",
)

LEADER, OTHER = "127.0.0.2", "127.0.0.3"
WORKER_KEY = "value-of-MLA_ROUTER_WORKER_API_KEY"
VALUES = (
    "worker.tpSize=2,worker.dpAttention=2,worker.nodes=2,worker.device=cpu,modelCache.kind=none"
)


@pytest.fixture(scope="module")
def apiserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(
        tmp_path_factory.mktemp("cluster"), [f"{ROUTER_TOKEN},{SERVICE_ACCOUNT},2"]
    ) as started:
        yield started


def group_pod(groups: dict[str, Any], number: int) -> dict[str, Any]:
    """Returns pod `number` of the first group, as the controller of LeaderWorkerSets makes it."""
    template = groups["leaderWorkerTemplate"]
    pod: dict[str, Any] = template["workerTemplate" if number else "leaderTemplate"]
    name = "llm-mla-router-worker-0" + (f"-{number}" if number else "")
    pod = {"apiVersion": "v1", "kind": "Pod", **pod}
    pod["metadata"] |= {"name": name}
    pod["spec"] |= {"nodeName": f"node-{number}"}
    variables = {
        "LWS_LEADER_ADDRESS": LEADER,
        "LWS_GROUP_SIZE": str(template["size"]),
        "LWS_WORKER_INDEX": str(number),
    }
    pod["spec"]["containers"][0]["env"] += [
        {"name": name, "value": value} for name, value in variables.items()
    ]
    return pod


def arguments(pod: dict[str, Any], **changed: object) -> list[str]:
    """Returns the arguments of the pod's container as its process gets them. `changed` flags get other values."""
    (container,) = pod["spec"]["containers"]
    values = {entry["name"]: entry.get("value") for entry in container["env"]}
    texts = [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], a) for a in container["args"]]
    flags = {name.replace("_", "-"): value for name, value in changed.items()}
    kept = [text for text in texts if text.removeprefix("--").partition("=")[0] not in flags]
    return [*kept, *(f"--{name}={value}" for name, value in flags.items())]


def test_the_router_finds_a_group_by_its_node_0(
    apiserver: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, meeting, *bases = free_ports(4)
    annotation = json.dumps({"mla-router/ports": str(port)})
    manifests = render(f"--set={VALUES}", f"--set-json=worker.podAnnotations={annotation}")
    for kind in ("ServiceAccount", "Role", "RoleBinding"):
        apiserver.create(find(manifests, kind))
    groups = find(manifests, "LeaderWorkerSet")["spec"]
    pods = [group_pod(groups, number) for number in range(2)]
    for pod, address in zip(pods, (LEADER, OTHER), strict=True):
        apiserver.create(pod)
        apiserver.report(pod["metadata"]["name"], address)
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(apiserver.kubeconfig(ROUTER_TOKEN))

    # The keys of the Secret; the router of the chart gets its own in `router`
    monkeypatch.setenv("MLA_ROUTER_API_KEY", WORKER_KEY)
    monkeypatch.setenv("MLA_ROUTER_DIST_KEY", "a secret of the nodes of tests")
    module = ["-m", "mla_router.launch_server"]
    addresses = {"port": port, "dist_init_addr": f"{LEADER}:{meeting}", "cpu_threads": 1}
    lines = [
        [*module, *arguments(pod, router_dp_worker_base_port=base, **addresses)]
        for pod, base in zip(pods, bases, strict=True)
    ]
    leader = f"http://{LEADER}:{port}"
    with contextlib.ExitStack() as stack:
        stack.enter_context(processes.running(lines[1], "", None))
        stack.enter_context(processes.running(lines[0], leader, "/readiness"))
        url = stack.enter_context(router(find(manifests, "Deployment"), kubeconfig))
        wait_until(lambda: status_of(f"{url}/readiness") == 200, "the group is in rotation")
        listed = ask(url, "/list_workers", "value-of-MLA_ROUTER_ADMIN_API_KEY")["urls"]
        assert listed == [leader], "the other pod of the group gets no requests"
        ranks = get_json(f"{leader}/workers", WORKER_KEY)["workers"]
        assert len(ranks) == 2 and any(f"//{LEADER}:" not in rank["url"] for rank in ranks)
        answer = ask(
            url,
            "/v1/completions",
            "value-of-MLA_ROUTER_API_KEY",
            {"model": "small", "prompt": "a", "max_tokens": 4},
        )
        assert answer["usage"]["completion_tokens"] == 4
