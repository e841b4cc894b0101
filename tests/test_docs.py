"""Links and names between the documents."""

from __future__ import annotations

import re
from pathlib import Path

from file_sizes import ROOT

DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("bench/**/*.md"),
        *ROOT.glob("deploy/**/*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/*.md"),
    ]
)
LINK = re.compile(r"\]\(([^)#\s]+)?(?:#([^)\s]+))?\)")


def anchors(text: str) -> set[str]:
    """Returns the anchors of a document's headings, as on GitHub."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_have_targets() -> None:
    broken = []
    for document in DOCUMENTS:
        for target, anchor in LINK.findall(document.read_text()):
            if ":" in target:
                continue  # an external page
            path = document.parent / target if target else document
            if not path.exists():
                broken.append(f"{document.name}: {target}")
            elif anchor and anchor not in anchors(path.read_text()):
                broken.append(f"{document.name}: {target}#{anchor}")
    assert broken == []


def test_figures_of_the_readme_are_in_docs_measured() -> None:
    """The README's figures, and each row of its tables, are also in docs/measured.md or docs/measured_router.md."""
    readme = (ROOT / "README.md").read_text()
    measured = "".join(path.read_text() for path in ROOT.glob("docs/measured*.md"))
    section = readme.partition("## Measured\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 10
    assert [row for row in rows if row not in measured] == []
    figures = re.findall(r"\d[\d,]*\.?\d+", readme.partition("## Why\n")[2].partition("\n## ")[0])
    assert len(figures) > 10
    measured_figures = set(re.findall(r"\d[\d,]*\.?\d+", measured))
    assert [figure for figure in figures if figure not in measured_figures] == []


def test_every_test_named_in_the_docs_exists() -> None:
    named = re.findall(r"`([\w./]+)::(\w+)`", (ROOT / "docs" / "faults.md").read_text())
    assert named
    for file, test in named:
        path = ROOT / ("router/tests" if file.startswith("serving/") else "") / file
        assert re.search(rf"(fn|def) {test}\(", path.read_text()), f"{file} has no {test}"


def test_every_bench_in_the_list_of_benches_exists() -> None:
    listed = re.findall(r"`((?:\w+/)?\w+\.py)`", (ROOT / "bench/README.md").read_text())
    assert len(listed) > 50
    scripts = {path.name for path in ROOT.glob("bench/*/*.py")}
    assert [name for name in listed if Path(name).name not in scripts] == []
