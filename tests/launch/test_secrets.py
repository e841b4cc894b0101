"""Keys in arguments are hidden from other users of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mla_router.launch.secrets import HeaderFile
from support.processes import free_ports, running

KEYS = ("first-key", "second-key", "third-key", "fourth-key")


def test_a_routers_arguments_show_no_key() -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    one, two, three, four = KEYS
    given = ["--api-key", one, two, f"--admin-api-key={three}", "--replay-key", four]
    argv = ["-m", "mla_router.launch_router", f"--port={port}", *given, "--worker-urls", url]
    with running(argv, url, "/liveness") as router:
        shown = Path(f"/proc/{router.pid}/cmdline").read_text().split("\0")
    stars = ["*" * len(key) for key in KEYS]
    expected = [
        "--api-key",
        *stars[:2],
        f"--admin-api-key={stars[2]}",
        "--replay-key",
        stars[3],
    ]
    assert shown[4:-3] == expected, shown
    assert shown[-3:-1] == ["--worker-urls", url]


@pytest.mark.parametrize("entry", ["server", "worker", "router"])
def test_every_command_hides_them_before_anything_else(entry: str) -> None:
    program = (
        "import sys, pathlib\n"
        f"import mla_router.launch.{entry} as command\n"
        "command.require_worker = command.require_router = lambda: sys.exit(\n"
        "    pathlib.Path('/proc/self/cmdline').read_text())\n"
        "command.main()"
    )
    argv = [sys.executable, "-c", program, "--api-key", KEYS[0]]
    shown = subprocess.run(argv, capture_output=True, text=True, check=False).stderr
    assert "--api-key\0*********\0" in shown, shown
    assert KEYS[0] not in shown


@pytest.mark.parametrize("entry", ["server", "worker", "router"])
def test_every_command_names_a_misspelt_variable(entry: str) -> None:
    variables = {"MLA_ROUTER_APIKEY": "k", "MLA_ROUTER_WORKER_ADMIN_API_KEY": "k"}
    argv = [sys.executable, "-m", f"mla_router.launch_{entry}", "--version"]
    done = subprocess.run(
        argv, env=os.environ | variables, capture_output=True, text=True, check=True
    )
    expected = "warning: nothing reads MLA_ROUTER_APIKEY; did you mean MLA_ROUTER_API_KEY?\n"
    assert done.stderr == expected


def test_curl_reads_the_header_from_this_process() -> None:
    path = HeaderFile(KEYS[0]).path
    assert Path(path).read_text() == Path(path).read_text() == f"Authorization: Bearer {KEYS[0]}\n"
    assert Path(path).stat().st_mode & 0o077 == 0
