"""`RouterConfig`: every setting of the Rust `Config`, by keyword, by flag and in the stub."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mla_router import RouterConfig, RouterError
from mla_router._router import router_flags
from support.processes import ROOT

OTHER_VALUES: dict[str, Any] = {
    "worker_urls": ["http://127.0.0.1:1", "http://localhost:2"],
    "host": "0.0.0.0",
    "policy": "round_robin",
    "health_check_endpoint": "/healthz",
    "api_key": "sesame",
    "log_level": "debug",
}


# What the stub forbids is asked for here, too.
untyped: Any = RouterConfig


def defaults() -> dict[str, Any]:
    return dict(RouterConfig().to_dict())


def test_defaults_are_those_of_the_command_line() -> None:
    assert RouterConfig() == RouterConfig.from_argv([])
    assert RouterConfig(port=None, worker_urls=[]) == RouterConfig()
    settings = defaults()
    assert (settings["host"], settings["port"], settings["api_key"]) == ("127.0.0.1", 30000, None)


def test_every_setting_goes_in_and_comes_out() -> None:
    for name, default in defaults().items():
        value = OTHER_VALUES[name] if name in OTHER_VALUES else type(default)(default + 1)
        config = untyped(**{name: value})
        assert config.to_dict()[name] == value
        assert config != RouterConfig()
        assert untyped(**config.to_dict()) == config
        values = value if isinstance(value, list) else [value]
        flag = f"--{name.replace('_', '-')}"
        assert RouterConfig.from_argv([flag, *map(str, values)]) == config


def test_flags_are_the_settings() -> None:
    settings = defaults()
    flags = {flag["name"].replace("-", "_"): flag for flag in router_flags()}
    assert list(flags) == list(settings)
    for name, flag in flags.items():
        assert flag["help"] and flag["value_name"], name
        if flag["default"] is not None:
            assert RouterConfig.from_argv([f"--{flag['name']}", flag["default"]]) == RouterConfig()
        else:
            assert settings[name] in (None, []), name
        for choice in flag["choices"]:
            assert untyped(**{name: choice}).to_dict()[name] == choice
    assert flags["policy"]["choices"] == ["cache_aware", "round_robin"]


def test_an_unknown_name_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'prot'"):
        untyped(prot=1)
    with pytest.raises(ValueError, match="--prot"):
        RouterConfig.from_argv(["--prot", "1"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 70000),
        ("port", 1.5),
        ("policy", "magic"),
        ("worker_urls", ["ftp://a"]),
        ("request_timeout_secs", 0),
        ("request_timeout_secs", float("nan")),
        ("health_failure_threshold", 0),
    ],
)
def test_a_bad_value_is_a_value_error_that_names_the_flag(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}") as error:
        untyped(**{name: value})
    assert "\n" not in str(error.value)


def test_a_value_of_the_wrong_type_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="'port' cannot be of type dict"):
        untyped(port={})


def test_repr_shows_everything_but_the_key() -> None:
    text = repr(RouterConfig(api_key="sesame", port=31))
    assert "port=31" in text and "api_key='***'" in text and "sesame" not in text
    assert eval(repr(RouterConfig()), {"RouterConfig": RouterConfig}) == RouterConfig()


def test_the_stub_lists_every_setting() -> None:
    stub = ast.parse((ROOT / "python/mla_router/_router.pyi").read_text())
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    fields = [node for node in classes["_Settings"].body if isinstance(node, ast.AnnAssign)]
    settings = [ast.unparse(field.target) for field in fields]
    new = next(n for n in classes["RouterConfig"].body if isinstance(n, ast.FunctionDef))
    assert settings == [argument.arg for argument in new.args.kwonlyargs]
    assert settings == list(defaults())


def test_the_stub_fits_the_module(tmp_path: Path) -> None:
    check = [sys.executable, "-m", "mypy.stubtest", "mla_router._router"]
    environment = {"PYTHONPATH": str(ROOT / "python"), "MYPYPATH": str(ROOT / "python")}
    result = subprocess.run(
        check, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_error_is_an_exception_of_its_own() -> None:
    assert RouterError.__bases__ == (Exception,)
    assert f"{RouterError.__module__}.{RouterError.__name__}" == "mla_router.RouterError"
