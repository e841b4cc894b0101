"""`RouterConfig`: every setting of the Rust `Config`, by keyword, by flag and in the stub."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mla_router import RouterConfig, RouterError
from mla_router._router import ignored_router_flags, router_flags
from support.processes import ROOT

OTHER_VALUES: dict[str, Any] = {
    "worker_urls": ["http://127.0.0.1:1", "http://localhost:2"],
    "selector": ["app=worker", "tier=gpu"],
    "worker_networks": ["10.0.0.0/8", "fd00::/8"],
    "host": "0.0.0.0",
    "policy": "round_robin",
    "queue_policy": "fair",
    "health_check_endpoint": "/healthz",
    "api_key": ["sesame", "barley"],
    "cache_threshold": 0.75,
    "max_concurrent_requests": 8,
    "retry_budget": 0.5,
    "log_level": "debug",
    "request_id_headers": ["x-trace"],
    "otlp_traces_endpoint": "http://localhost:4318/v1/traces",
    "allowed_hosts": ["router.example"],
    "cors_allowed_origins": ["https://chat.example"],
}

# Settings that require each other.
TOGETHER = {"tls_cert_path": "tls_key_path", "tls_key_path": "tls_cert_path"}


# These tests also use calls that the stub forbids.
untyped: Any = RouterConfig


def defaults() -> dict[str, Any]:
    return dict(RouterConfig().to_dict())


def test_defaults_are_those_of_the_command_line() -> None:
    assert RouterConfig() == RouterConfig.from_argv([])
    assert RouterConfig(port=None, worker_urls=[]) == RouterConfig()
    settings = defaults()
    assert (settings["host"], settings["port"], settings["api_key"]) == ("127.0.0.1", 30000, [])


def other_value(name: str, default: Any) -> Any:
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    if default is None:
        return f"other-{name}"
    return not default if isinstance(default, bool) else type(default)(default + 1)


def test_every_setting_goes_in_and_comes_out() -> None:
    for name, default in defaults().items():
        value = other_value(name, default)
        given = {name: value}
        if name in TOGETHER:
            given[TOGETHER[name]] = "other"
        config = untyped(**given)
        assert config.to_dict()[name] == value
        assert config != RouterConfig()
        assert untyped(**config.to_dict()) == config
        argv = []
        for key, setting in given.items():
            values = setting if isinstance(setting, list) else [setting]
            argv.append(f"--{key.replace('_', '-')}")
            argv.extend(str(value) for value in values if value is not True)
        assert RouterConfig.from_argv(argv) == config


def test_a_list_may_be_empty_or_one_word_and_a_path_may_be_a_path() -> None:
    assert RouterConfig(request_id_headers=[]).to_dict()["request_id_headers"] == []
    assert RouterConfig(api_key="sesame").to_dict()["api_key"] == ["sesame"]
    config = RouterConfig(worker_urls_file=Path("/etc/workers"))
    assert config.to_dict()["worker_urls_file"] == "/etc/workers"


def test_keys_come_from_the_environment_of_a_command_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_ROUTER_API_KEY", "sesame")
    monkeypatch.setenv("MLA_ROUTER_ADMIN_API_KEY", "barley")
    settings = RouterConfig.from_argv([]).to_dict()
    assert (settings["api_key"], settings["admin_api_key"]) == (["sesame"], "barley")
    assert RouterConfig().to_dict()["api_key"] == []


def test_flags_without_effect_are_accepted_and_are_no_settings() -> None:
    names = ignored_router_flags()
    assert "cb-success-threshold" in names
    assert not {name.replace("-", "_") for name in names} & set(defaults())
    argv = [f"--{name}=1" for name in names]
    assert RouterConfig.from_argv(argv).to_dict() == defaults()


def test_flags_are_the_settings() -> None:
    settings = defaults()
    flags = {flag["name"].replace("-", "_"): flag for flag in router_flags()}
    assert list(flags) == list(settings)
    for name, flag in flags.items():
        assert flag["help"] and flag["heading"], name
        assert (flag["value_name"] is None) == isinstance(settings[name], bool), name
        assert (flag["nargs"] is not None) == isinstance(settings[name], list), name
        if flag["default"] is not None:
            argv = [f"--{flag['name']}", *flag["default"].split()]
            assert RouterConfig.from_argv(argv) == RouterConfig()
        else:
            assert settings[name] in (None, False, []), name
        for choice in flag["choices"]:
            assert untyped(**{name: choice}).to_dict()[name] == choice
    assert {"cache_aware", "round_robin"} < set(flags["policy"]["choices"])


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


@pytest.mark.parametrize(
    ("name", "value"), [("port", {}), ("port", True), ("insecure", "no"), ("insecure", 0)]
)
def test_a_value_of_the_wrong_type_is_a_type_error(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"'{name}' cannot be of type {type(value).__name__}"):
        untyped(**{name: value})


def test_repr_shows_everything_but_the_keys() -> None:
    config = RouterConfig(
        api_key=["sesame"], admin_api_key="barley", worker_api_key="oats", port=31
    )
    text = repr(config)
    assert "port=31" in text and text.count("api_key='***'") == 3
    assert not any(key in text for key in ("sesame", "barley", "oats"))
    assert "replay_key='***'" in repr(RouterConfig(replay_key="rye"))
    assert eval(repr(RouterConfig()), {"RouterConfig": RouterConfig}) == RouterConfig()


def test_the_stub_lists_every_setting_with_its_type() -> None:
    stub = ast.parse((ROOT / "python/mla_router/_router.pyi").read_text())
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    fields = [node for node in classes["_Settings"].body if isinstance(node, ast.AnnAssign)]
    types = {ast.unparse(field.target): ast.unparse(field.annotation) for field in fields}
    new = next(n for n in classes["RouterConfig"].body if isinstance(n, ast.FunctionDef))
    assert list(types) == [argument.arg for argument in new.args.kwonlyargs]
    assert list(types) == list(defaults())
    choices = {
        ast.unparse(node.target): ast.literal_eval(node.value.slice)
        for node in stub.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Subscript)
    }
    argument_types = {
        argument.arg: ast.unparse(argument.annotation)
        for argument in new.args.kwonlyargs
        if argument.annotation
    }
    for flag in router_flags():
        name = flag["name"].replace("-", "_")
        default = defaults()[name]
        accepted = None
        if flag["choices"]:
            assert list(choices[types[name]]) == flag["choices"]
            expected = types[name]
        elif flag["nargs"]:
            expected, accepted = "list[str]", "Sequence[str] | None"
        elif default is None:
            expected = accepted = "str | None"
            if name.endswith(("_path", "_file")):
                accepted = "str | PathLike[str] | None"
        else:
            expected = type(default).__name__
        assert types[name] == expected, name
        assert argument_types[name] == (accepted or f"{expected} | None"), name


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
