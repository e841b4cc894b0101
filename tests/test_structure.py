"""Rules of the sources: allowed imports, and text that must not occur."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from file_sizes import ROOT, lines, sources

MAX_LINES = 500

# Bottom first: a module imports from its own layer and from those before it.
LAYERS = (
    "worker.generation worker.images worker.messages worker.step worker.settings worker.tree_shape worker.config worker.config_checks worker.child",
    "worker.heartbeat worker.heartbeat_watch worker.lasting_imports worker.log_format worker.log_lines worker.logs worker.mask_memory",
    "worker.bounded_file worker.host worker.host_limits",
    "worker.model_folder worker.tokenizer_files",
    "worker.sglang_flags worker.flags",
    "worker.nodes",
    "worker.dp_group",
    "worker.kernels",
    "worker.kv_cache",
    "worker.model",
    "worker.engine",
    "worker.ranks",
    "worker.grammar",
    "worker.scheduler",
    # The rooms of the server. It talks with a scheduler and imports nothing of it: see SERVER_MAY_NOT.
    "worker.server.errors worker.server.daemon_thread",
    "worker.server.schema",
    "worker.server.text",
    "worker.server.media",
    "worker.server.ipc",
    "worker.server.metrics worker.server.request_names",
    "worker.server.state",
    "worker.server.http",
    "worker.server.validation",
    "worker.server.requests",
    "worker.server.endpoints",
    "worker.server.routes worker.server.app",
    "worker.server.processes",
    "worker.server",
    "worker.preflight worker.__main__",
    "launch",
)
# The server runs without torch.
SERVER_MAY_NOT = tuple(
    f"mla_router.worker.{room}."
    for room in ("step", "kernels", "kv_cache", "model", "engine", "ranks", "grammar", "scheduler")
)
# Modules that can execute data.
EXECUTES_DATA = frozenset({"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"})
UNFINISHED = re.compile(
    "|".join((r"\bTO" + r"DO\b", r"\bFIX" + r"ME\b", r"\bXX" + r"X\b", "Not" + "ImplementedError"))
    + r"|\bunimplemented!|\btodo!"
)
# Absolute paths of a machine.
MACHINE_PATH = re.compile(r"(?<![\w.$}/-])/(?:work|root|home|Users)/\w")

PYTHON = [path for path in sources() if path.suffix == ".py"]
PACKAGE = [
    path for path in PYTHON if path.relative_to(ROOT).parts[0] in ("worker", "launch", "python")
]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def layer_of(module: str) -> int | None:
    """Returns the index in LAYERS of a module such as `worker.engine.slots`."""
    for rank, members in enumerate(LAYERS):
        for member in members.split():
            if module == member or module.startswith(member + "."):
                return rank
    return None


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    """Returns all imports, at the top or inside a function: `a.b` for `from a import b`."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_dependencies_point_one_way() -> None:
    offenders = []
    for path in PACKAGE:
        module = module_of(path)
        own = layer_of(module)
        if module == "worker" or (own is None and "python" in path.parts):
            continue  # the package's docstring, and the facade, which may use everything
        if own is None:
            offenders.append(f"{name(path)} is in no layer: add it to LAYERS")
            continue
        for imported in imports(path):
            other = layer_of(imported.removeprefix("mla_router."))
            if imported.startswith("mla_router.") and other is not None and other > own:
                offenders.append(f"{name(path)} imports {imported}, which is above it")
    assert offenders == []


def test_a_worker_never_imports_the_router() -> None:
    router = ("mla_router._router", "mla_router.Router", "mla_router.RouterConfig")
    offenders = [
        f"{name(path)} imports {imported}"
        for path in PACKAGE
        if path.relative_to(ROOT).parts[0] == "worker"
        for imported in imports(path)
        if imported in router or imported.startswith("mla_router._router.")
    ]
    assert offenders == []


def test_a_server_imports_nothing_of_the_scheduler() -> None:
    offenders = [
        f"{name(path)} imports {imported}"
        for path in PACKAGE
        if path.relative_to(ROOT).parts[:2] == ("worker", "server")
        for imported in imports(path)
        if imported.startswith(SERVER_MAY_NOT)
    ]
    assert offenders == []


def test_only_config_modules_read_the_environment() -> None:
    offenders = []
    for path in PACKAGE:
        if path.stem == "config":
            continue
        offenders += [
            f"{name(path)}:{node.lineno}: make it a setting"
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
        ]
        offenders += [
            f"{name(path)} imports {imported}: make it a setting"
            for imported in imports(path)
            if imported in ("os.environ", "os.getenv")
        ]
    assert offenders == []


def test_no_module_can_execute_data() -> None:
    offenders = []
    for path in PYTHON:
        # A test may check that eval(repr(x)) == x.
        builtins = () if path.relative_to(ROOT).parts[0] == "tests" else ("eval", "exec")
        if not any(word in path.read_text() for word in (*EXECUTES_DATA, *builtins, "torch.load")):
            continue  # parsing takes most of the time
        offenders += [
            f"{name(path)} imports {imported}"
            for imported in imports(path)
            if imported.split(".")[0] in EXECUTES_DATA
        ]
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Name) and node.func.id in builtins:
                offenders.append(f"{name(path)}:{node.lineno}: {node.func.id}")
            is_load = isinstance(node.func, ast.Attribute) and node.func.attr == "load"
            if is_load and ast.unparse(node.func) == "torch.load":
                offenders.append(f"{name(path)}:{node.lineno}: torch.load unpickles; safetensors")
    assert offenders == []


def test_every_module_has_a_docstring() -> None:
    assert [name(path) for path in PACKAGE if not ast.get_docstring(parsed(path))] == []


def test_no_source_is_too_long() -> None:
    """A longer file must be split by concept."""
    counts = {name(path): lines(path) for path in sources()}
    assert {path: count for path, count in counts.items() if count > MAX_LINES} == {}


def test_no_source_is_unfinished() -> None:
    found = {name(path): UNFINISHED.search(path.read_text()) for path in sources()}
    assert {path: match for path, match in found.items() if match} == {}


def test_no_file_has_an_absolute_path_of_a_machine() -> None:
    listed = subprocess.run(
        ["git", "grep", "--cached", "-I", "-n", "-P", MACHINE_PATH.pattern],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert listed.returncode in (0, 1), listed.stderr
    own = Path(__file__).relative_to(ROOT).as_posix() + ":"
    found = [line for line in listed.stdout.splitlines() if not line.startswith(own)]
    assert found == []
