"""One key for router and workers, hidden from other users."""

from __future__ import annotations

import subprocess

import openai
import pytest

from support import processes
from support.pasted import curl_lines
from support.processes import wait_until

KEY = "sesame-street-7"


def test_a_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_ROUTER_API_KEY", KEY)
    port, base_port = processes.free_ports(2)
    flags = {"port": port, "router_dp_worker_base_port": base_port, "cpu_threads": 1}
    flags |= {f"router_{name}": value for name, value in processes.LONG_ROUTER_TIMEOUTS.items()}
    argv = ["-m", "mla_router.launch_server", "--device=cpu", *processes.to_argv(flags)]
    with processes.running(argv, f"http://127.0.0.1:{port}", "/readiness") as server:
        url = server.url + "/v1"
        stranger = openai.OpenAI(base_url=url, api_key="wrong", max_retries=0)
        with stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            assert client.models.list().data[0].id == "mla-small"
            answer = client.completions.create(model="mla-small", prompt="one two", max_tokens=3)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 3
            # The router also sends the key to its workers, to read the size of their caches.
            workers = client.get("/../workers", cast_to=object)
        assert isinstance(workers, dict)
        assert workers["workers"][0]["max_total_num_tokens"] > 0
        wait_until(lambda: "Ctrl-C stops everything" in server.output(), "the closing lines")
        for command in curl_lines(server.output()):
            assert KEY not in command
            done = subprocess.run([*command, "-sS", "--fail"], capture_output=True, check=False)
            assert done.returncode == 0, (command, done.stderr)
        assert f"{server.url}/dashboard" in server.output()
        for process in server.tree():
            assert KEY not in process.command
        assert KEY not in server.output()
