"""Links and names between the documents."""

from __future__ import annotations

import re
from pathlib import Path

from file_sizes import ROOT, sources

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
    """The last column of the tables of docs/faults.md has names of tests, FILE::NAME or NAME alone, and of files."""
    rows = re.findall(r"^\|.*\| (.+) \|$", (ROOT / "docs/faults.md").read_text(), re.MULTILINE)
    named = re.findall(r"`(?:([\w./]+/[\w.]+)(?:::)?)?(\w*)`", "\n".join(rows))
    assert len(named) > 100
    files = {str(path.relative_to(ROOT)): path.read_text() for path in sources()}
    assert [file for file, _ in named if file and file not in files] == []
    tests = set(re.findall(r"\b(?:fn|def) (\w+)\(", "\n".join(files.values())))
    assert [name for file, name in named if name and name not in tests] == []


def test_every_bench_in_the_list_of_benches_exists() -> None:
    listed = re.findall(r"`((?:\w+/)?\w+\.py)`", (ROOT / "bench/README.md").read_text())
    assert len(listed) > 50
    scripts = {path.name for path in ROOT.glob("bench/*/*.py")}
    assert [name for name in listed if Path(name).name not in scripts] == []
