"""Every Python file of examples/ runs by the command of its docstring, against real servers."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from file_sizes import ROOT
from support import processes
from support.processes import Running

EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT / "python")} | environment,
        capture_output=True,
        text=True,
        timeout=processes.EVENT_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def workers_of(server: Running) -> list[str]:
    return [worker["url"] for worker in processes.get_json(server.url + "/workers")["workers"]]


def test_a_chat_is_answered_and_streamed(small_server: Running) -> None:
    printed = run("openai_client.py", MLA_ROUTER_URL=small_server.url)
    assert re.search(r"^answer: .*42", printed, re.MULTILINE), printed
    assert re.search(r"^streamed: .*42", printed, re.MULTILINE), printed
    assert re.search(r"^of \d+ prompt tokens [1-9]\d* were cached", printed, re.MULTILINE), printed


def test_a_tool_is_called(small_server: Running) -> None:
    printed = run("tools.py", MLA_ROUTER_URL=small_server.url)
    assert 'call: get_weather {"city": "Paris"}\n' in printed, printed
    assert "answer: It is sunny in Paris, and 21 degrees.\n" in printed, printed


def test_an_answer_follows_its_schema(small_server: Running) -> None:
    printed = run("json_schema.py", MLA_ROUTER_URL=small_server.url)
    assert printed == "name='Maria' age=34 role='doctor'\n"


def test_the_bindings_serve_and_stop(small_server: Running) -> None:
    urls = workers_of(small_server)
    printed = run("bindings.py", *urls)
    assert printed.startswith("42\n"), printed
    assert all(f"{url} healthy" in printed for url in urls), printed


def test_a_router_stands_in_front_of_engines(small_server: Running) -> None:
    program = f"import front; front.main({workers_of(small_server)!r}, seconds=3)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'python'}:{EXAMPLES}"},
        capture_output=True,
        text=True,
        timeout=processes.EVENT_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "'healthy'" in done.stdout, done.stdout


def test_the_list_of_examples_is_complete() -> None:
    listed = set(re.findall(r"\]\(([\w/.]+)\)", (EXAMPLES / "README.md").read_text()))
    there = {path.name for path in EXAMPLES.glob("*.py")}
    assert there == {name for name in listed if name.endswith(".py")}
    assert all((EXAMPLES / name).exists() for name in listed)
