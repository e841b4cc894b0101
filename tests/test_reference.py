"""docs/reference has every flag and every endpoint of the code, and the schema of the Helm chart every flag.

`UPDATE_DOCS=1 make test-python ARGS=tests/test_reference.py` writes the pages."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from file_sizes import ROOT
from mla_router import Router, RouterConfig
from mla_router._router import router_flags
from mla_router.launch.arguments import LAUNCHERS, launch_parser
from mla_router.worker.__main__ import worker_parser
from mla_router.worker.server.endpoints.openapi import document
from mla_router.worker.server.routes import ROUTES
from support import chart
from support.processes import get_json

REFERENCE = ROOT / "docs" / "reference"
UPDATE = "UPDATE_DOCS=1 make test-python ARGS=tests/test_reference.py"

# An endpoint: (method, path, summary).
Endpoint = tuple[str, str, str]


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(heads)]
    lines.append(["---"] * len(lines[0]))
    lines += [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page(title: str, intro: str, sections: Iterable[tuple[str, str]]) -> str:
    body = "".join(f"\n## {heading}\n\n{text}" for heading, text in sections)
    return f"# {title}\n\n{intro} Generated from the code by `{UPDATE}`.\n{body}"


def parser_sections(parser: argparse.ArgumentParser, heads: str = "") -> Iterator[tuple[str, str]]:
    """Yields the groups of --help whose titles begin with `heads`, each as a table."""
    say = parser._get_formatter()._expand_help
    for group in parser._action_groups:
        shown = [
            action
            for action in group._group_actions
            if action.option_strings and action.help not in (None, argparse.SUPPRESS)
        ]
        if shown and (group.title or "").startswith(heads):
            rows = (
                (" ".join(f"`{name}`" for name in action.option_strings), say(action))
                for action in shown
            )
            title = group.title or ""
            yield title[:1].upper() + title[1:], table(("flag", "meaning"), rows)


def worker_flags() -> str:
    return page(
        "Flags of a worker",
        "`python -m mla_router.launch_worker`; `launch_server` takes them, too.",
        parser_sections(worker_parser()),
    )


def launch_flags() -> str:
    return page(
        "Flags of launch_server",
        "`python -m mla_router.launch_server`. It also takes the flags of [a worker](worker_flags.md), and those "
        "of [the router](router_flags.md) with the prefix `--router-`, except for "
        + ", ".join(f"`--{name}`" for name in sorted(LAUNCHERS))
        + ", which it sets.",
        parser_sections(launch_parser(router_flags()), "launch"),
    )


def router_flag_pages() -> str:
    groups: dict[str, list[tuple[str, str, str]]] = {}
    for flag in router_flags():
        text = flag["help"].replace("\n", " ")
        if flag["choices"]:
            text += ": " + ", ".join(f"`{choice}`" for choice in flag["choices"])
        rows = groups.setdefault(flag["heading"], [])
        rows.append(
            (f"`--{flag['name']}`", f"`{flag['default']}`" if flag["default"] else "", text)
        )
    heads = ("flag", "default", "meaning")
    return page(
        "Flags of the router",
        "`python -m mla_router.launch_router`, the binary `mla-router`, and, with `_` for `-`, the fields of "
        "`RouterConfig`.",
        ((heading, table(heads, rows)) for heading, rows in groups.items()),
    )


def endpoints_of(paths: dict[str, Any]) -> list[Endpoint]:
    return sorted(
        (method.upper(), path, operation["summary"])
        for path, methods in paths.items()
        for method, operation in methods.items()
    )


def endpoints() -> str:
    workers = endpoints_of(document(ROUTES)["paths"])
    with Router(RouterConfig(port=0)) as router:
        own = endpoints_of(get_json(router.url + "/openapi.json")["paths"])
    heads = ("method", "path", "what it does")

    def rows(found: list[Endpoint]) -> Iterator[tuple[str, str, str]]:
        return ((method, f"`{path}`", summary) for method, path, summary in found)

    return page(
        "Endpoints",
        "Bodies and answers are in `/openapi.json` of the router and of each worker.",
        (
            ("Of the router itself", table(heads, rows(own))),
            ("Of a worker, alone or through the router", table(heads, rows(workers))),
        ),
    )


PAGES = {
    REFERENCE / "worker_flags.md": worker_flags,
    REFERENCE / "launch_flags.md": launch_flags,
    REFERENCE / "router_flags.md": router_flag_pages,
    REFERENCE / "endpoints.md": endpoints,
    chart.CHART / "values.schema.json": chart.schema,
}


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_a_page_agrees_with_the_code(file: Path) -> None:
    text = PAGES[file]()
    if os.environ.get("UPDATE_DOCS") == "1":
        REFERENCE.mkdir(exist_ok=True)
        file.write_text(text)
    assert file.read_text() == text
