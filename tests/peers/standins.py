"""A plugin of pytest: other engines' tests import their engine, and get this project's server.

Whatever they import of the package `vllm` or `sglang` is a stand-in (`_Anything`), but for the few things that a
test of a server needs: to start it, to end it, and its tokenizer. This file runs in the environment of the
tests, in which nothing of this project is installed.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import types
import unittest
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import openai
import pytest
from transformers import AutoTokenizer

ENGINES = ("vllm", "sglang")
TOKENIZER = Path(os.environ["PEER_SERVER_PATH"]) / "mla_router/worker/model/small"
START_S = 240.0
TESTS = "sglang.test.kits."  # modules of tests, which are no stand-ins
# Flags of these engines that say something about the server that a test asks for, and ours: (name, takes a value).
FLAGS = {
    "--context-length": ("--context-length", True),
    "--max-model-len": ("--context-length", True),
    "--api-key": ("--api-key", True),
    "--served-model-name": ("--served-model-name", True),
    "--max-running-requests": ("--max-running-requests", True),
    "--max-queued-requests": ("--max-queued-requests", True),
    "--chunked-prefill-size": ("--chunked-prefill-size", True),
    "--max-total-tokens": ("--max-total-tokens", True),
    "--schedule-policy": ("--schedule-policy", True),
    "--tokenizer-worker-num": ("--tokenizer-worker-num", True),
    "--enable-priority-scheduling": ("--enable-priority-scheduling", False),
    "--disable-overlap-schedule": ("--disable-overlap-schedule", False),
    "--disable-radix-cache": ("--disable-radix-cache", False),
    "--tool-call-parser": (None, True),  # ours is the small model's own
    "--reasoning-parser": (None, True),
    "--enable-cache-report": ("--enable-cache-report", False),
    "--enable-force-include-usage": ("--enable-force-include-usage", False),
    "--enable-per-request-metrics": ("--enable-per-request-metrics", False),
    "--return-tokens-as-token-ids": ("--return-tokens-as-token-ids", False),
    "--constrained-json-disable-any-whitespace": (
        "--constrained-json-disable-any-whitespace",
        False,
    ),
}


def tokenizer(*_: Any, **__: Any) -> Any:
    return AutoTokenizer.from_pretrained(TOKENIZER)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """`launch_server` with one worker: what vLLM's tests know as `RemoteOpenAIServer`."""

    DUMMY_API_KEY = "token-abc123"
    # Sampling has a fixed seed by default in vLLM, and a random one here: each run must get the same answers.
    OWN_FLAGS = ("--random-seed=1", *json.loads(os.environ["PEER_SERVER_FLAGS"]))

    def __init__(self, model: str, args: Sequence[str] = (), **options: Any) -> None:
        self.host = "127.0.0.1"
        self.port = options.get("port") or free_port()
        flags = [f"--port={self.port}", f"--served-model-name={model}", *self.OWN_FLAGS]
        words = [str(word) for word in args]
        for word, value in itertools.zip_longest(words, words[1:], fillvalue=""):
            name, _, given = word.partition("=")
            ours, takes_value = FLAGS.get(name, (None, False))
            if ours is not None:
                flags += [ours, given or value] if takes_value else [ours]
            if name == "--max-queued-requests":
                # The router would wait for a busy worker; these tests want the worker's own refusal.
                flags.append("--router-queue-size=0")
        environment = os.environ | {"PYTHONPATH": os.environ["PEER_SERVER_PATH"]}
        self._log = (Path(os.environ["PEER_LOGS"]) / f"server-{self.port}.log").open("w")
        self.process = subprocess.Popen(
            [os.environ["PEER_SERVER_PYTHON"], "-m", "mla_router.launch_server", *flags],
            env=environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.pid = self.process.pid
        _running[self.pid] = self
        self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url_root}/readiness", timeout=1).close()
                return
            time.sleep(0.2)
        self.stop()
        raise RuntimeError(f"no server: {self._log.name}")

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *parts])

    def get_client(self, **options: Any) -> openai.OpenAI:
        options.setdefault("timeout", 600)
        key = options.pop("api_key", self.DUMMY_API_KEY)
        return openai.OpenAI(base_url=self.url_for("v1"), api_key=key, max_retries=0, **options)

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        options.setdefault("timeout", 600)
        key = options.pop("api_key", self.DUMMY_API_KEY)
        return openai.AsyncOpenAI(
            base_url=self.url_for("v1"), api_key=key, max_retries=0, **options
        )

    def get_async_client_anthropic(self) -> Any:
        import anthropic  # not every suite needs it

        return anthropic.AsyncAnthropic(
            base_url=self.url_root, api_key=self.DUMMY_API_KEY, max_retries=0, timeout=600
        )

    def poll(self) -> int | None:
        return self.process.poll()

    def stop(self) -> None:
        _running.pop(self.pid, None)
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


_running: dict[int, Server] = {}


@atexit.register
def _stop_all() -> None:
    for server in list(_running.values()):
        server.stop()


def popen_launch_server(
    model: str,
    base_url: str,
    timeout: float = 0.0,  # noqa: ARG001 (it is given by name)
    api_key: str | None = None,
    other_args: Sequence[str] = (),
    **_: Any,
) -> Server:
    """SGLang's way to start one."""
    args = [*map(str, other_args), *(["--api-key", api_key] if api_key else [])]
    return Server(model, args, port=int(base_url.rpartition(":")[2]))


def kill_process_tree(pid: int, *_: Any, **__: Any) -> None:
    if server := _running.get(pid):
        server.stop()


class _Anything:
    """An attribute of an engine that no test of a server should need: it can be named, and nothing else."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(f"{self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"{self._name} is a part of another engine, and has no stand-in")

    def __bool__(self) -> bool:
        return False  # `current_platform.is_rocm` and the like


class ModelConfig:
    def __init__(self, **_: Any) -> None:
        pass

    def get_vocab_size(self) -> int:
        return int(json.loads((TOKENIZER / "config.json").read_text())["vocab_size"])


class _Base:
    """A class of an engine from which a test's own classes come, which it sends to the server."""


class _Hub:
    def snapshot_download(self, repo_id: str) -> str:
        return repo_id  # of adapters, which are named to a server and never read here


class _Platform:
    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: False


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def functions_of(file: str, *names: str) -> dict[str, Any]:
    """Returns functions of a module that cannot be imported without its engine; nothing if the sources lack the file.

    Runs the source of these functions and the module's imports of packages other than engines.
    """
    path = Path(os.environ["PEER_SOURCES"], file)
    if not path.exists():
        return {}
    scope: dict[str, Any] = {"__name__": path.stem}
    for node in ast.parse(path.read_text()).body:
        code = compile(ast.Module([node], []), str(path), "exec")
        if isinstance(node, DEFINITIONS) and node.name in names:
            exec(code, scope)  # noqa: S102 (their tests run here as well)
        elif isinstance(node, ast.Import | ast.ImportFrom) and not _imports_engine(node):
            with contextlib.suppress(ImportError):  # of a package that these functions do not need
                exec(code, scope)  # noqa: S102
    return {name: scope[name] for name in names}


def _imports_engine(node: ast.Import | ast.ImportFrom) -> bool:
    names = [alias.name for alias in node.names]
    modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
    return any(module.partition(".")[0] in ENGINES for module in modules)


REAL: dict[str, dict[str, Any]] = {
    "tests.utils": {
        "RemoteOpenAIServer": Server,
        "RemoteVLLMServer": Server,
        "ROCM_EXTRA_ARGS": [],
    },
    "vllm.config": {"ModelConfig": ModelConfig},
    "vllm.transformers_utils.repo_utils": {"hf_api": lambda: _Hub()},
    "vllm.platforms": {"current_platform": _Platform()},
    "vllm.tokenizers": {"get_tokenizer": tokenizer},
    "sglang.srt.utils": {"kill_process_tree": kill_process_tree, "is_hip": lambda: False},
    "sglang.srt.utils.hf_transformers_utils": {"get_tokenizer": tokenizer},
    "sglang.test.test_utils": {
        "CustomTestCase": unittest.TestCase,
        "kill_process_tree": kill_process_tree,
        "popen_launch_server": popen_launch_server,
        "DEFAULT_URL_FOR_TEST": f"http://127.0.0.1:{free_port()}",
        "DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH": START_S,
        "DEFAULT_MODEL_NAME_FOR_TEST": "peer-model",
        "DEFAULT_SMALL_MODEL_NAME_FOR_TEST": "peer-model",
        "is_in_ci": lambda: False,
        "is_in_amd_ci": lambda: False,
        "is_rust_server_built": lambda: False,
        "STDOUT_FILENAME": str(Path(os.environ["PEER_LOGS"]) / "stdout.txt"),
        "STDERR_FILENAME": str(Path(os.environ["PEER_LOGS"]) / "stderr.txt"),
        **functions_of(
            "sglang/test/test_utils.py",
            "run_logprob_check",
            "send_generate_requests",
            "send_concurrent_generate_requests",
            "send_concurrent_generate_requests_with_custom_params",
        ),
    },
    "sglang.srt.sampling.custom_logit_processor": {"CustomLogitProcessor": _Base},
    "sglang.test.ci.ci_register": {
        "register_cuda_ci": lambda *_, **__: None,
        "register_amd_ci": lambda *_, **__: None,
        "register_cpu_ci": lambda *_, **__: None,
    },
}


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.startswith(TESTS):
            file = Path(os.environ["PEER_SOURCES"], *name.split(".")).with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        if name in REAL or name.partition(".")[0] in ENGINES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__dict__.update(REAL.get(spec.name, {}))
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@pytest.fixture(scope="class")
def setup_backend() -> Iterator[tuple[str, str, openai.OpenAI, Any]]:
    """Replaces a fixture of sgl-model-gateway's tests: a server behind their client of a gateway."""
    from infra import Gateway

    with Server(str(TOKENIZER)) as server:
        gateway = Gateway(host=server.host, port=server.port)
        with contextlib.closing(server.get_client()) as client:
            yield "http", str(TOKENIZER), client, gateway


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("model", "gateway", "e2e", "slow", "thread_unsafe", "workers"):
        config.addinivalue_line("markers", f"{marker}: theirs")
    if fixtures := os.environ.get("PEER_FIXTURES"):
        spec = importlib.util.spec_from_file_location("peer_fixtures", fixtures)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config.pluginmanager.register(module)


sys.meta_path.insert(0, _Finder())
_outcomes: dict[str, str] = {}


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # A test has failed if any of its phases has.
    counts = report.when == "call" or report.outcome != "passed"
    if counts and _outcomes.get(report.nodeid) != "failed":
        _outcomes[report.nodeid] = report.outcome


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _outcomes[report.nodeid] = "failed"


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish() -> Iterator[None]:
    Path(os.environ["PEER_REPORT"]).write_text(json.dumps(_outcomes))
    return (yield)
