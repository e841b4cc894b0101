"""deploy/ uses existing metrics, labels, files and versions. The tests need no container engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from file_sizes import ROOT

DEPLOY = ROOT / "deploy"
METRICS = (ROOT / "docs" / "metrics.md").read_text()
SUFFIX = re.compile(r"_(bucket|sum|count)$")


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def alert_rules() -> list[dict[str, Any]]:
    return [rule for group in load(DEPLOY / "alerts.yml")["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    board = json.loads((DEPLOY / "grafana" / "board.json").read_text())
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return shown + [rule["expr"] for rule in alert_rules()]


@pytest.mark.parametrize("expression", expressions())
def test_every_metric_and_label_exists_in_the_router(expression: str) -> None:
    named = set(re.findall(r"\b(?:mla_router|process)_\w+", expression))
    assert named
    for name in named:
        assert f"| `{SUFFIX.sub('', name)}` |" in METRICS, name
    values = re.findall(r'\{(\w+)(?:=~|!=|=)"([^"]+)"\}', expression)
    labels = (ROOT / "router/src/metrics/labels.rs").read_text()
    for _label, alternatives in values:
        for value in alternatives.split("|"):
            assert f'"{value}"' in labels, value


def test_every_alert_has_a_severity_and_a_description() -> None:
    for rule in alert_rules():
        assert rule["labels"]["severity"] in ("page", "ticket"), rule
        assert rule["annotations"]["summary"], rule


def test_files_that_compose_mounts_exist() -> None:
    services = load(DEPLOY / "compose.yaml")["services"]
    mounted = [volume for service in services.values() for volume in service.get("volumes", ())]
    for volume in mounted:
        source = volume.partition(":")[0]
        if source.startswith("."):
            assert (DEPLOY / source).exists(), volume
    for service in services.values():
        if build := service.get("build"):
            assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()


def test_the_image_is_built_with_the_projects_versions() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    rust = re.search(r'rust-version = "([\d.]+)"', (ROOT / "Cargo.toml").read_text())
    uv = re.search(r"^UV_VERSION := (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert rust and uv
    assert f"FROM rust:{rust[1]}-" in text
    assert f"uv=={uv[1]}" in text
    for line in re.findall(r"^COPY (?!--from)(.+)", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), line
