"""A kube-apiserver with etcd, without scheduler and nodes: `make test-kubernetes` builds it."""

from __future__ import annotations

import contextlib
import json
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from file_sizes import ROOT
from support.processes import free_ports, wait_until

TOOLS = ROOT / "target" / "kubernetes"
APISERVER, HELM, ROUTER = TOOLS / "kube-apiserver", TOOLS / "helm", TOOLS / "mla-router"
ADMIN = "admin-token"
# Equal in the fields that the chart uses; the apiserver is of Kubernetes 1.20.
OLDER = {"policy/v1": "policy/v1beta1", "autoscaling/v2": "autoscaling/v2beta2"}


class Refused(Exception):
    """The apiserver's answer to a bad request."""


class Cluster:
    """Sends requests to the apiserver at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._context = ssl.create_default_context()
        self._context.check_hostname = False
        self._context.verify_mode = ssl.CERT_NONE  # a certificate of its own

    def request(
        self, method: str, path: str, body: Any = None, token: str = ADMIN, kind: str = "json"
    ) -> Any:
        """Returns the JSON of the answer. Raises Refused for an error status."""
        headers = {"Authorization": f"Bearer {token}", "Content-Type": f"application/{kind}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, context=self._context, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise Refused(f"{error.code}: {error.read().decode()}") from None

    def create(self, manifest: dict[str, Any], *, dry_run: bool = False) -> Any:
        """Creates an object of any kind in the namespace `default`."""
        version = OLDER.get(manifest["apiVersion"], manifest["apiVersion"])
        base = f"/apis/{version}" if "/" in version else f"/api/{version}"
        resources = self.request("GET", base)["resources"]
        names = [
            r["name"] for r in resources if r["kind"] == manifest["kind"] and "/" not in r["name"]
        ]
        path = f"{base}/namespaces/default/{names[0]}" + ("?dryRun=All" if dry_run else "")
        return self.request("POST", path, manifest | {"apiVersion": version})

    def report(self, pod: str, ip: str) -> None:
        """Sets the status of a pod that runs and is ready, in place of its node."""
        status = {
            "phase": "Running",
            "podIP": ip,
            "podIPs": [{"ip": ip}],
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        path = f"/api/v1/namespaces/default/pods/{pod}/status"
        self.request("PATCH", path, {"status": status}, kind="merge-patch+json")

    def kubeconfig(self, token: str) -> str:
        server = {"server": self.url, "insecure-skip-tls-verify": True}
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "test", "cluster": server}],
                "users": [{"name": "user", "user": {"token": token}}],
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": "user"}}],
                "current-context": "test",
            }
        )


@contextlib.contextmanager
def cluster(folder: Path, tokens: Sequence[str]) -> Iterator[Cluster]:
    """Starts etcd and the apiserver with RBAC. `tokens`: further lines `TOKEN,USER,UID` of the token file."""
    for command in ("genrsa -out sa.key 2048", "rsa -in sa.key -pubout -out sa.pub"):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    lines = [f'{ADMIN},admin,1,"system:masters"', *tokens]
    (folder / "tokens.csv").write_text("\n".join(lines) + "\n")
    client, peer, port = free_ports(3)
    etcd, peers = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    run_etcd = (
        f"etcd --data-dir etcd --listen-client-urls {etcd} --advertise-client-urls {etcd} "
        f"--listen-peer-urls {peers} --initial-advertise-peer-urls {peers} --initial-cluster default={peers}"
    )
    run_apiserver = (
        f"{APISERVER} --etcd-servers={etcd} --secure-port={port} --bind-address=127.0.0.1 --cert-dir=certs "
        "--token-auth-file=tokens.csv --service-cluster-ip-range=10.0.0.0/24 --authorization-mode=RBAC "
        "--service-account-issuer=https://x --service-account-key-file=sa.pub "
        "--service-account-signing-key-file=sa.key --api-audiences=api "
        "--disable-admission-plugins=ServiceAccount"
    )
    started = []
    try:
        for number, command in enumerate((run_etcd, run_apiserver)):
            log = (folder / f"{number}.log").open("w")
            started.append(subprocess.Popen(command.split(), cwd=folder, stdout=log, stderr=log))
        found = Cluster(f"https://127.0.0.1:{port}")

        def answers() -> bool:
            with contextlib.suppress(OSError, Refused):
                return bool(found.request("GET", "/api/v1/namespaces/default"))
            return False

        assert wait_until(answers, "the apiserver answers")
        yield found
    finally:
        for process in reversed(started):
            process.kill()
            process.wait()
