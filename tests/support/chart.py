"""The Helm chart in deploy/helm, read without Helm."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, get_type_hints

from file_sizes import ROOT
from mla_router._router import router_flags
from mla_router.worker.config import WorkerConfig

CHART = ROOT / "deploy" / "helm" / "mla-router"
TEMPLATES = {path.name: path.read_text() for path in sorted((CHART / "templates").iterdir())}
# The templates with the command lines.
ROUTER, WORKER, NODES, DP_ATTENTION = (
    "router.yaml",
    "_worker.tpl",
    "_nodes.tpl",
    "_dp_attention.tpl",
)
SECRET = re.compile(r"(?<!tls)-key$")
# `helm --set` passes fractions as strings.
TYPES = {int: "integer", float: ["number", "string"], bool: "boolean", str: "string"}


def flags_in(template: str) -> set[str]:
    """Returns the flags that a template sets itself, without the dashes."""
    lines = [line for line in TEMPLATES[template].splitlines() if not line.lstrip().startswith("#")]
    return set(re.findall(r'(?<=[\s"]--)([a-z][a-z-]+)', "\n".join(lines)))


def schema() -> str:
    """Returns values.schema.json with the flags of the code. The rest of the file stays as it is."""
    text = json.loads((CHART / "values.schema.json").read_text())
    text["definitions"]["routerFlags"] = _flags(_router_flags(), flags_in(ROUTER))
    text["definitions"]["workerFlags"] = _flags(_worker_flags(), flags_in(WORKER) | flags_in(NODES))
    # One flag a line.
    inner = re.compile(r"\{\n\s+([^{}]{1,80})\n\s+\}")
    return (
        inner.sub(
            lambda found: "{ " + " ".join(found[1].split()) + " }", json.dumps(text, indent=2)
        )
        + "\n"
    )


def _flags(found: dict[str, Any], set_by_chart: set[str]) -> dict[str, Any]:
    """Returns the schema of an object with flags. Keys are in a Secret, not in values."""
    allowed = {
        name: value
        for name, value in found.items()
        if name not in set_by_chart and not SECRET.search(name)
    }
    return {"type": "object", "additionalProperties": False, "properties": allowed}


def _router_flags() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for flag in router_flags():
        if flag["value_name"] is None:
            found[flag["name"]] = {"type": "boolean"}
        elif flag["choices"]:
            found[flag["name"]] = {"enum": flag["choices"]}
        elif flag["nargs"]:
            found[flag["name"]] = {"type": "array", "items": {"type": ["string", "number"]}}
        else:
            found[flag["name"]] = {"type": ["string", "number"]}
    return found


def _worker_flags() -> dict[str, Any]:
    hints = get_type_hints(WorkerConfig)
    found: dict[str, Any] = {}
    for spec in dataclasses.fields(WorkerConfig):
        if spec.metadata.get("hidden"):
            continue
        limits = {"low": "minimum", "high": "maximum", "choices": "enum"}
        schema: dict[str, Any] = {"type": TYPES[hints[spec.name]]}
        schema |= {limits[key]: value for key, value in spec.metadata.items() if key in limits}
        if spec.metadata.get("several"):
            schema = {"type": "array", "items": {"type": ["string", "number"]}}
        found[spec.name.replace("_", "-")] = schema
    return found
