"""Models by their name on the Hugging Face Hub: the package huggingface_hub against a local server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mla_router.worker.config import SMALL_MODEL
from support.fake_worker import fake_worker
from support.hub import COMMIT, hub
from support.processes import ROOT, get_json

NAME = "acme/tiny-deepseek"
NOWHERE = "http://127.0.0.1:9"  # the discard port: refuses connections


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sets an empty cache, which the processes of a test inherit."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The repository on the hub: the small model, and weights in another format."""
    folder = tmp_path / "published"
    shutil.copytree(SMALL_MODEL, folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    return folder


def refused(*flags: str) -> str:
    """Returns the error of a worker that refuses its flags."""
    ended = subprocess.run(
        [sys.executable, "-m", "mla_router.launch_worker", "--port=0", *flags],
        env=os.environ | {"PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    return ended.stderr.splitlines()[-1]


@pytest.mark.usefixtures("home")
def test_a_name_is_downloaded_once_and_served_offline_afterwards(
    published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub(NAME, published) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with fake_worker(model_path=NAME) as worker:
            assert get_json(f"{worker.url}/v1/models")["data"][0]["id"] == NAME
            assert COMMIT in get_json(f"{worker.url}/get_model_info")["model_path"]
    expected = {path.name for path in SMALL_MODEL.iterdir()}
    assert set(server.downloaded) == expected
    assert len(server.downloaded) == len(expected)

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with fake_worker(model_path=NAME, served_model_name="mine") as worker:
        assert get_json(f"{worker.url}/v1/models")["data"][0]["id"] == "mine"


@pytest.mark.usefixtures("home")
def test_the_reason_for_which_a_name_is_not_found(
    published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "not in the cache, and the Hugging Face Hub cannot" in refused(f"--model-path={NAME}")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with hub(NAME, published) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        line = refused("--model-path=acme/other")
        assert line.startswith("error: --model-path acme/other: neither a folder here nor a public")
        line = refused(f"--model-path={NAME}", "--revision=v9")
        assert line == f"error: --model-path {NAME}: the hub has no --revision v9 of it"


def test_a_path_that_is_no_folder(tmp_path: Path) -> None:
    assert "no such folder; a model on the Hugging Face Hub" in refused("--model-path=/no/such")
    assert "a file; give the folder" in refused(f"--model-path={SMALL_MODEL / 'config.json'}")
    assert "no config.json in this folder" in refused(f"--model-path={tmp_path}")
    line = refused(f"--model-path={SMALL_MODEL}", "--revision=main")
    assert line.startswith("error: --revision main: ")
    assert "leave --revision out" in line
