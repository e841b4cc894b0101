"""The content of the packages: maturin drops linked folders silently, so the tests read the archives."""

from __future__ import annotations

import csv
import email
import fcntl
import io
import os
import re
import shlex
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from support.processes import ROOT


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel and the sdist into a folder.

    The wheel has the extension of the checkout, unoptimized unless $CARGO_PROFILE is `release`.
    """
    folder: Path = tmp_path_factory.mktemp("dist")
    maturin = str(Path(sys.executable).with_name("maturin"))
    profile = os.environ.get("CARGO_PROFILE", "dev")
    build = ("build", "--profile", profile, "--locked", "-i", sys.executable)
    if profile == "dev":  # an extension of 50 MB
        build += ("--compression-method", "stored")
    # As in the Makefile: two builds at a time would write the same files.
    with (ROOT / "target" / ".make.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run(maturin, *build, "--out", str(folder))
    run(maturin, "sdist", "--out", str(folder))
    return folder


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.fixture(scope="session")
def in_sdist(dist: Path) -> set[str]:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        # Without the top folder of an sdist.
        return {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in archive.getnames()}


def sources() -> set[str]:
    """Returns all files of the package, by their paths in the wheel."""
    listed = run(
        "git", "ls-files", "--cached", "--others", "--exclude-standard", "worker", "launch"
    )
    package = {f"mla_router/{name}" for name in listed.splitlines() if (ROOT / name).is_file()}
    facade = run("git", "ls-files", "python/mla_router/*.py*").splitlines()
    package |= {name.removeprefix("python/") for name in facade}
    return package | {"mla_router/py.typed"}


def test_there_are_many_sources() -> None:
    """Otherwise the comparisons below would compare empty sets."""
    assert {"mla_router/worker/step/plan.py", "mla_router/launch/server.py"} <= sources()
    assert "mla_router/worker/model/small/model.safetensors" in sources()


def test_the_wheel_holds_every_source_and_nothing_else(in_wheel: set[str]) -> None:
    info = {name for name in in_wheel if ".dist-info/" in name}
    assert in_wheel - info == sources() | {"mla_router/_router.abi3.so"}


def test_pip_can_read_the_list_of_files(wheel: Path) -> None:
    """maturin does not quote a name with a comma."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
        rows = csv.reader(io.TextIOWrapper(archive.open(name), encoding="utf-8"))
        assert {len(row) for row in rows} == {3}, "path, hash, size"


def test_the_sdist_holds_every_source(in_sdist: set[str]) -> None:
    assert {f"python/{name}" for name in sources()} <= in_sdist
    assert {"Cargo.lock", "pyproject.toml", "router/src/lib.rs"} <= in_sdist
    assert not [name for name in in_sdist if name.endswith((".pyc", ".so"))]


def test_metadata_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        page = email.message_from_bytes(archive.read(name))
        assert [name for name in archive.namelist() if name.endswith("/licenses/LICENSE")]
    assert page["License-Expression"] == "Apache-2.0"
    assert page["Author"] == "the mla-router developers"
    text = page.get_payload()
    assert isinstance(text, str)
    # A package's page cannot have links into the repository or diagrams.
    assert "mermaid" not in text
    assert re.findall(r"\]\((?!https?://)", text) == []


def test_the_sdist_has_the_documents_that_the_page_names(in_sdist: set[str]) -> None:
    named = {"README.md", "ARCHITECTURE.md", "CHANGELOG.md", "LICENSE", "docs/faults.md"}
    assert named <= in_sdist


def test_one_wheel_for_all_pythons_from_3_11_on(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name


ROUTER_ALONE = """
import importlib.util, urllib.request
from mla_router import Router, RouterConfig, RouterError, __version__
import mla_router
assert mla_router.__file__.startswith(PREFIX), mla_router.__file__
assert importlib.util.find_spec("torch") is None
with Router(RouterConfig(port=0, policy="round_robin")) as router:
    answer = urllib.request.urlopen(router.url + "/liveness")
    assert answer.status == 200
print("version", __version__)
"""


@pytest.fixture(scope="session")
def router_only(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the Python of a new venv with the wheel, without extras and without a package index."""
    folder: Path = tmp_path_factory.mktemp("venv")
    venv.create(folder)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", str(python))  # its own takes seconds to install
    run(*pip, "install", "--quiet", "--no-index", str(wheel))
    return python


def in_venv(python: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    outside = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [python, *argv],
        cwd=python.parent,
        env=outside,
        check=False,
        capture_output=True,
        text=True,
    )


def test_the_router_alone_needs_nothing_else(router_only: Path) -> None:
    program = ROUTER_ALONE.replace("PREFIX", repr(str(router_only.parents[1])))
    done = in_venv(router_only, "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("version 0.")
    shown = in_venv(router_only, "-m", "mla_router.launch_router", "--help")
    assert shown.returncode == 0
    assert "--worker-urls" in shown.stdout


@pytest.mark.parametrize("entry", ["launch_server", "launch_worker"])
def test_a_worker_reports_missing_packages(router_only: Path, entry: str) -> None:
    done = in_venv(router_only, "-m", f"mla_router.{entry}")
    assert done.returncode == 1
    assert done.stderr.startswith("error: a worker needs torch, ")
    assert done.stderr.count("\n") == 1
    command = shlex.split(done.stderr.partition("; run: ")[2])
    assert command[:2] == ["pip", "install"]
    assert {"torch==2.11.0", "pyzmq>=27"} <= set(command)
    assert not any("mla-router" in word for word in command), "there may be no index that has it"
