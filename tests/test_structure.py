"""Rules about the sources themselves: who may import whom, and what must not occur."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from file_sizes import ROOT, lines, sources

MAX_LINES = 500

# Bottom first: a module imports from its own layer and from those before it.
LAYERS = (
    "worker.core worker.messages worker.config worker.child worker.pulse worker.logs worker.model_folder",
    "worker.sglang_flags worker.flags",
    "worker.kernels",
    "worker.model",
    "worker.engine",
    "worker.grammar",
    "worker.scheduler",
    "worker.server",
    "worker.preflight worker.__main__",
    "launch",
)
# Names whose import means that data can be executed.
EXECUTES_DATA = frozenset({"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"})
UNFINISHED = re.compile(
    "|".join((r"\bTO" + r"DO\b", r"\bFIX" + r"ME\b", r"\bXX" + r"X\b", "Not" + "ImplementedError"))
    + r"|\bunimplemented!|\btodo!"
)
# Folders of somebody's machine.
MACHINE_PATH = re.compile(r"(?<![\w.$}/-])/(?:work|root|home|Users)/\w")

PYTHON = [path for path in sources() if path.suffix == ".py"]
PACKAGE = [
    path for path in PYTHON if path.relative_to(ROOT).parts[0] in ("worker", "launch", "python")
]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def layer_of(module: str) -> int | None:
    """Position of `worker.engine.slots` in LAYERS."""
    for rank, members in enumerate(LAYERS):
        for member in members.split():
            if module == member or module.startswith(member + "."):
                return rank
    return None


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Everything imported, whether at the top or inside a function: `a.b` for `from a import b`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", PACKAGE, ids=name)
def test_dependencies_point_one_way(path: Path) -> None:
    own = layer_of(module_of(path))
    if module_of(path) == "worker" or (own is None and "python" in path.parts):
        return  # the package's docstring, and the facade, which may use everything
    assert own is not None, f"{name(path)} is in no layer: add it to LAYERS"
    for imported in imports(path):
        other = layer_of(imported.removeprefix("mla_router."))
        if imported.startswith("mla_router.") and other is not None:
            assert other <= own, f"{name(path)} imports {imported}, which is above it"


@pytest.mark.parametrize("path", PACKAGE, ids=name)
def test_a_worker_never_imports_the_router(path: Path) -> None:
    if path.relative_to(ROOT).parts[0] == "worker":
        router = {"mla_router._router", "mla_router.Router", "mla_router.RouterConfig"}
        assert router.isdisjoint(imports(path))
        assert not any(imported.startswith("mla_router._router.") for imported in imports(path))


@pytest.mark.parametrize("path", PACKAGE, ids=name)
def test_only_config_modules_read_the_environment(path: Path) -> None:
    if path.stem != "config":
        for node in ast.walk(ast.parse(path.read_text())):
            read = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            assert not read, f"{name(path)}:{node.lineno}: make it a setting"
        assert {"os.environ", "os.getenv"}.isdisjoint(imports(path))


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_nothing_executes_what_it_reads(path: Path) -> None:
    is_test = path.relative_to(ROOT).parts[0] == "tests"  # may check that eval(repr(x)) == x
    assert EXECUTES_DATA.isdisjoint(imported.split(".")[0] for imported in imports(path))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not is_test:
            assert node.func.id not in ("eval", "exec"), f"{name(path)}:{node.lineno}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            raise AssertionError(f"{name(path)}:{node.lineno}: torch.load unpickles; safetensors")


@pytest.mark.parametrize("path", PACKAGE, ids=name)
def test_a_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{name(path)} has no docstring"


@pytest.mark.parametrize("path", sources(), ids=name)
def test_a_source_is_short_and_finished(path: Path) -> None:
    assert lines(path) <= MAX_LINES, f"{name(path)}: {lines(path)} lines, split it by concept"
    found = UNFINISHED.search(path.read_text())
    assert found is None, f"{name(path)}: {found}"


def test_no_file_names_a_folder_of_somebodys_machine() -> None:
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
