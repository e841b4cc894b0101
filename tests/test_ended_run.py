"""A run of the tests that is ended by SIGTERM leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import ROOT, wait_until
from support.procfs import descendants

HANGS = """
import pathlib, time
from support.processes import free_ports, running

def test_that_hangs():
    (port,) = free_ports(1)
    argv = ["-m", "http.server", str(port), "--bind=127.0.0.1"]
    with running(argv, f"http://127.0.0.1:{port}", "/"):
        pathlib.Path(__file__).with_name("started").touch()
        time.sleep(3600)
"""


@pytest.mark.parametrize("processes", [0, 2])
def test_sigterm_ends_all_processes_of_the_tests(processes: int, tmp_path: Path) -> None:
    test = tmp_path / "test_hangs.py"
    test.write_text(HANGS)
    command = f"{sys.executable} -m pytest -q -p conftest -p no:cacheprovider -c /dev/null"
    make = tmp_path / "make"
    make.write_text(f"#!/bin/sh\nexec {command} -n {processes} {test}\n")
    make.chmod(0o755)
    path = os.pathsep.join((str(ROOT / "tests"), str(ROOT / "python")))
    with (tmp_path / "output").open("wb") as output:
        run = subprocess.Popen(
            [ROOT / ".ci" / "stages", make, "test-python"],
            env=os.environ | {"PYTHONPATH": path},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until((tmp_path / "started").exists, (tmp_path / "output").read_text())
        started = descendants(run.pid)
        assert len(started) == 2 + processes, "pytest, its processes and the server"
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 128 + signal.SIGTERM
        wait_until(lambda: not any(pid.alive for pid in started), "they are gone")
    finally:
        run.kill()
        run.wait()
