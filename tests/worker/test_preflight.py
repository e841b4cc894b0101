"""Errors that are found before the import of torch."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from mla_router.worker import preflight
from mla_router.worker.config import SMALL_MODEL, ConfigError, WorkerConfig
from support.processes import ROOT

SMALL = json.loads((SMALL_MODEL / "config.json").read_text())


def folder_with(path: Path, text: str) -> str:
    (path / "config.json").write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ('{"architectures": ["Qwen3ForCausalLM"]}', {}, "Qwen3ForCausalLM is not supported"),
        ('{"hidden_size": ', {}, r"config\.json: not JSON"),
        ('{"hidden_size": ' * 100_000, {}, r"config\.json: not JSON"),
        (
            json.dumps(SMALL),
            {"context_length": 1 << 20},
            "--context-length 1048576: at most 8192",
        ),
        (
            json.dumps(SMALL),
            {"tp_size": 3},
            "--tp-size 3: the model's 8 attention heads cannot be divided into 3 equal parts",
        ),
        (
            json.dumps(SMALL),
            {"quantization": "compressed-tensors"},
            "--quantization compressed-tensors: the checkpoint is not quantized",
        ),
        (
            json.dumps(SMALL),
            {"chat_template": "/no/file"},
            "--chat-template /no/file: No such file",
        ),
        (
            json.dumps(SMALL),
            {"chat_template": "/dev/zero"},
            "--chat-template /dev/zero: not a regular file",
        ),
        (
            json.dumps(SMALL),
            {"profile_dir": "/dev/null"},
            "--profile-dir /dev/null: File exists; give a folder in which this user may write",
        ),
        (
            json.dumps(SMALL),
            {"expert_distribution_recorder_dir": "/dev/null/records"},
            "--expert-distribution-recorder-dir /dev/null/records: Not a directory",
        ),
    ],
)
def test_errors_of_the_model(
    tmp_path: Path, text: str, settings: dict[str, Any], message: str
) -> None:
    config = WorkerConfig(model_path=folder_with(tmp_path, text), **settings)
    with pytest.raises(ConfigError, match=message):
        preflight.check(config)


@pytest.mark.parametrize("flag", ["model_path", "tokenizer_path", "speculative_draft_model_path"])
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool.jinja"]
)
def test_a_file_that_never_ends_is_not_opened(tmp_path: Path, flag: str, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(SMALL_MODEL, folder)
    file = folder / name
    file.unlink(missing_ok=True)
    file.parent.mkdir(exist_ok=True)
    os.mkfifo(file)
    flags = {flag: str(folder)}
    if flag == "speculative_draft_model_path":
        flags["speculative_algorithm"] = "NEXTN"
    message = f"--{flag.replace('_', '-')} {file}: not a regular file; replace it"
    with pytest.raises(ConfigError, match=message):
        preflight.check(WorkerConfig(**flags))


def test_a_huge_or_missing_file_of_the_folder_is_named(tmp_path: Path) -> None:
    shutil.copytree(SMALL_MODEL, tmp_path, dirs_exist_ok=True)
    config = WorkerConfig(model_path=str(tmp_path))
    index = tmp_path / "model.safetensors.index.json"
    index.touch()
    os.truncate(index, 1 << 30)
    with pytest.raises(ConfigError, match=r"index\.json: more than \d+ bytes; replace it"):
        preflight.check(config)
    index.unlink()
    index.symlink_to("blobs/absent")
    with pytest.raises(ConfigError, match=r"index\.json: No such file or directory; replace it"):
        preflight.check(config)


@pytest.mark.parametrize("flag", ["profile_dir", "expert_distribution_recorder_dir"])
def test_a_folder_for_files_is_made_and_must_be_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    folder = tmp_path / "new" / "folder"
    config = WorkerConfig(**{flag: str(folder)})
    preflight.check(config)
    assert folder.is_dir()
    monkeypatch.setattr(os, "access", lambda path, _: path != folder)
    message = f"--{flag.replace('_', '-')} {folder}: Permission denied; give a folder"
    with pytest.raises(ConfigError, match=message):
        preflight.check(config)


def test_few_open_files_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (32, 32))
    with pytest.raises(ConfigError, match=r"at most 32 open files .* by `ulimit -n`"):
        preflight.check(WorkerConfig())
    monkeypatch.setattr(resource, "getrlimit", lambda _: (32, resource.RLIM_INFINITY))
    preflight.check(WorkerConfig())


def test_a_deleted_working_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(ConfigError, match="working directory has been deleted"):
        preflight.check(WorkerConfig())


def test_no_folder_for_temporary_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc", "/dev/null"])
    with pytest.raises(ConfigError, match="name one in TMPDIR"):
        preflight.check(WorkerConfig())


def test_each_folder_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[str, Path]] = []
    monkeypatch.setattr(preflight, "_check_texts", lambda *names: checked.append(names))
    preflight.check(WorkerConfig(tokenizer_path=str(SMALL_MODEL)))
    assert checked == [("--model-path", SMALL_MODEL)]


def test_dp_attention_needs_routed_experts(tmp_path: Path) -> None:
    ranks = {"tp_size": 2, "attn_dp_size": 2, "device": "cpu"}
    preflight.check(WorkerConfig(**ranks))
    dense = SMALL | {"n_routed_experts": None}
    config = WorkerConfig(model_path=folder_with(tmp_path, json.dumps(dense)), **ranks)
    with pytest.raises(ConfigError, match=r"--enable-dp-attention: this .* has no routed experts"):
        preflight.check(config)


def test_a_missing_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "count_gpus", lambda: 0)
    with pytest.raises(ConfigError, match="--device cuda: this machine has no GPU"):
        preflight.check(WorkerConfig(device="cuda"))
    monkeypatch.setattr(preflight, "count_gpus", lambda: 2)
    preflight.check(WorkerConfig(device="cuda", base_gpu_id=1))
    for device in ("cuda", "auto"):
        with pytest.raises(
            ConfigError, match=r"GPU 2, .* does not exist: this machine has 2; lower --dp"
        ):
            preflight.check(WorkerConfig(device=device, base_gpu_id=2))
    preflight.check(WorkerConfig(device="cuda", tp_size=2))
    with pytest.raises(ConfigError, match=r"GPU 2, .* lower --dp-size, --tp-size or --base-gpu-id"):
        preflight.check(WorkerConfig(device="cuda", base_gpu_id=1, tp_size=2))
    preflight.check(WorkerConfig(device="cpu", base_gpu_id=2))


def test_only_the_launcher_reports_the_error(tmp_path: Path) -> None:
    """It does so without torch and before the router listens."""
    folder = folder_with(tmp_path, '{"architectures": ["Qwen3ForCausalLM"]}')
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from mla_router.launch.server import run\n"
        f"sys.exit(run(['--model-path', {folder!r}, '--port', '0']))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: --model-path ")
    assert "Qwen3ForCausalLM is not supported; supported are Deepseek" in line
