"""The Helm chart agrees with the code. The tests need no Helm; `make test-kubernetes` renders and applies the chart."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from file_sizes import ROOT
from mla_router._router import router_flags
from mla_router.launch.arguments import launch_parser
from mla_router.worker.__main__ import worker_parser
from support import chart


def leaves(values: Any, path: str = "") -> Iterator[str]:
    """Yields the paths of the values that are no sections."""
    if isinstance(values, dict) and values:
        for name, value in values.items():
            yield from leaves(value, f"{path}.{name}")
    else:
        yield path.removeprefix(".")


VALUES = yaml.safe_load((chart.CHART / "values.yaml").read_text())
SCHEMA = yaml.safe_load((chart.CHART / "values.schema.json").read_text())
# Values that templates read as a whole.
WHOLE = re.compile(r"((?:router|worker)\.resources)\..*")
SETTINGS = {WHOLE.sub(r"\1", path) for path in leaves(VALUES)}
ALL_TEMPLATES = "\n".join(chart.TEMPLATES.values())


def changed(path: str, value: Any) -> dict[str, Any]:
    """Returns the values of the chart with one other value."""
    values = copy.deepcopy(VALUES)
    *sections, last = path.split(".")
    place = values
    for section in sections:
        place = place[section]
    place[last] = value
    return values


def test_every_flag_in_the_templates_exists() -> None:
    worker = {name for action in worker_parser()._actions for name in action.option_strings}
    assert {"tp-size", "worker-id"} <= chart.flags_in(chart.WORKER)
    assert {"nnodes", "node-rank", "dist-init-addr"} == chart.flags_in(chart.NODES)
    used = chart.flags_in(chart.WORKER) | chart.flags_in(chart.NODES)
    assert {f"--{name}" for name in used} - worker == set()
    launcher = launch_parser(router_flags())._actions
    known = {name for action in launcher for name in action.option_strings}
    assert {"enable-dp-attention", "dp-size"} <= chart.flags_in(chart.DP_ATTENTION)
    assert {f"--{name}" for name in chart.flags_in(chart.DP_ATTENTION)} - known == set()
    router = {flag["name"] for flag in router_flags()}
    assert {"service-discovery", "selector"} <= chart.flags_in(chart.ROUTER)
    assert chart.flags_in(chart.ROUTER) - router == set()


def test_every_variable_is_read_by_router_or_worker() -> None:
    named = set(re.findall(r'"(MLA_ROUTER_\w+)"', ALL_TEMPLATES))
    assert len(named) == 5
    sources = [ROOT / "router/src/config/mod.rs", ROOT / "worker/settings.py"]
    known = "".join(path.read_text() for path in sources)
    assert [name for name in named if f'"{name}"' not in known] == []


def test_every_metric_exists() -> None:
    documented = (ROOT / "docs" / "metrics.md").read_text()
    texts = [*chart.TEMPLATES.values(), (chart.CHART / "README.md").read_text()]
    named = {name for text in texts for name in re.findall(r"\bmla_router_\w+[a-z]\b", text)}
    named -= {"mla_router_launch"}
    assert {"mla_router_requests_in_flight", "mla_router_requests_waiting"} <= named
    assert [name for name in named if f"| `{name}` |" not in documented] == []


def test_templates_read_every_value_and_no_other() -> None:
    text = ALL_TEMPLATES
    # `$router := .Values.router` and the like, `.cache` in helpers, and the value of mla.scheduling.
    for alias, section in set(re.findall(r"(\$\w+) := (?:\.root)?\.Values\.(\w+)", text)):
        text = re.sub(re.escape(alias) + r"\.(?=\w)", f".Values.{section}.", text)
    text = text.replace(".cache.", ".Values.modelCache.")
    scheduled = re.findall(r"with \.(\w+) }}", chart.TEMPLATES["_helpers.tpl"])
    text += "".join(
        f" .Values.{part}.{name}" for part in ("router", "worker") for name in scheduled
    )
    assert set(re.findall(r"\.Values\.(\w+\.\w+(?:\.\w+)*)", text)) == SETTINGS


def test_the_values_fit_the_schema() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("worker.modelpath", "a", "modelpath"),
        ("worker.flags", {"mem-fraction": 0.5}, "mem-fraction"),
        ("worker.flags", {"page-size": 17}, "17"),
        ("worker.flags", {"tp-size": 2}, "tp-size"),  # the chart sets it
        ("worker.flags", {"api-key": "k"}, "api-key"),  # keys are in a Secret
        ("worker.tpSize", 0, "0"),
        ("worker.dpAttention", 0, "0"),
        ("worker.device", "gpu", "gpu"),
        ("router.flags", {"policy": "best"}, "best"),
        ("router.flags", {"worker-api-key": "k"}, "worker-api-key"),
        ("router.replicas", "2", "2"),
        ("router.drainSeconds", 0, "0"),  # no value of --shutdown-grace-period-secs
        ("modelCache.size", "200 GB", "200 GB"),
        ("autoscaling.enabled", "no", "no"),
    ],
)
def test_a_wrong_value_is_refused_by_name(path: str, value: Any, named: str) -> None:
    with pytest.raises(jsonschema.ValidationError, match=re.escape(repr(named).strip("'"))):
        jsonschema.validate(changed(path, value), SCHEMA)


def test_good_flags_are_accepted() -> None:
    worker = {"mem-fraction-static": 0.9, "page-size": 32, "disable-cuda-graph": True}
    jsonschema.validate(changed("worker.flags", worker), SCHEMA)
    router = {"policy": "round_robin", "queue-size": 10, "tls-key-path": "/tls/key.pem"}
    jsonschema.validate(changed("router.flags", router), SCHEMA)


def test_the_version_is_the_packages() -> None:
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version
    assert yaml.safe_load((chart.CHART / "Chart.yaml").read_text())["appVersion"] == version[1]


def test_values_named_in_the_readme_exist() -> None:
    named = re.findall(r"--set(?:-json)? ([\w.-]+)=", (chart.CHART / "README.md").read_text())
    assert named
    paths = set(leaves(VALUES))
    flags = {
        f"{part}.flags.{name}"
        for part in ("router", "worker")
        for name in SCHEMA["definitions"][f"{part}Flags"]["properties"]
    }
    assert [name for name in named if name not in paths | flags] == []
