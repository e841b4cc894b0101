"""The command line of a worker: a flag for each field of `WorkerConfig`, and SGLang's other flags."""

from __future__ import annotations

import argparse
import dataclasses
import re
import textwrap
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, get_type_hints

from mla_router.worker import sglang_flags
from mla_router.worker.config import WorkerConfig, check_secret, secrets_of_environment

_FIELDS = dataclasses.fields(WorkerConfig)


ROUTER_PREFIX = "--router-"


class Parser(argparse.ArgumentParser):
    """Prints errors in one line, with a similar flag if there is one. --help has `examples` (text, flags)."""

    def __init__(
        self, prog: str, usage: str, description: str, examples: Sequence[tuple[str, str]]
    ):
        lines = [f"  # {text}\n  {prog} {flags}".rstrip() for text, flags in examples]
        super().__init__(
            prog=prog,
            usage=f"%(prog)s {usage}",
            description=textwrap.fill(description, 100),
            epilog="\n".join(["examples:", *lines]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            message = re.sub(r"(--[\w-]*key[ =])\S+", r"\1***", message)
        self.exit(2, f"error: {message}{self._hint(message)}\n")

    def _hint(self, message: str) -> str:
        if not (unknown := re.search(r"unrecognized arguments: --([\w-]+)", message)):
            return " (--help shows every flag)"
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        # The flags of the router have a prefix in launch_server, which many leave out. Neither it nor dashes are a
        # similarity.
        names = {
            name.removeprefix(ROUTER_PREFIX).lstrip("-"): name
            for action in reversed(shown)
            for name in action.option_strings
        }
        given = unknown[1].removeprefix(ROUTER_PREFIX.lstrip("-"))
        close = get_close_matches(given, names, n=1, cutoff=0.7)
        return f"; did you mean {names[close[0]]}?" if close else " (--help shows every flag)"


def add_flags(
    parser: argparse.ArgumentParser, *, leave_out: frozenset[str] = frozenset(), prefix: str = ""
) -> None:
    """Adds the flags to `parser`, in groups whose titles begin with `prefix`. `leave_out`: fields and SGLang flags to
    skip, because the caller defines them."""
    hints = get_type_hints(WorkerConfig)
    title = ""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for spec in _FIELDS:
        title = spec.metadata.get("group", title)
        if spec.name in leave_out:
            continue
        if title not in groups:
            groups[title] = parser.add_argument_group(prefix + title)
        _add_flag(groups[title], spec, hints[spec.name])
    sglang_flags.add(parser, leave_out)


def from_namespace(namespace: argparse.Namespace, **fixed: Any) -> WorkerConfig:
    """Returns the config of parsed flags. `fixed` overrides fields. Raises ConfigError."""
    sglang_flags.refuse(namespace)
    values: dict[str, Any] = {}
    for spec in _FIELDS:
        if hasattr(namespace, spec.name):
            value = getattr(namespace, spec.name)
            values[spec.name] = spec.default if _is_elsewhere(spec, value) else value
    for name, secret in secrets_of_environment().items():
        given = values.get(name)
        values[name] = secret if given is None else check_secret(_spelled(name), given)
    return WorkerConfig(**{**values, **fixed})


def without_effect(namespace: argparse.Namespace) -> list[str]:
    """Returns the given flags that have no effect here, each with the reason in brackets."""
    values = [
        f"{_flag_of(spec)} {getattr(namespace, spec.name)} ({spec.default} is used)"
        for spec in _FIELDS
        if _is_elsewhere(spec, getattr(namespace, spec.name, None))
    ]
    if namespace.nnodes == 1 and namespace.dist_init_addr:
        values.append("--dist-init-addr (there is one node)")
    return [*values, *sglang_flags.without_effect(namespace)]


def _add_flag(
    group: argparse._ArgumentGroup, spec: dataclasses.Field[Any], kind: type[Any]
) -> None:
    names = (_flag_of(spec), *spec.metadata.get("also", ()))
    if spec.metadata.get("hidden"):
        group.add_argument(
            *names, dest=spec.name, type=kind, default=spec.default, help=argparse.SUPPRESS
        )
        return
    text = spec.metadata["help"]
    if kind is bool:
        group.add_argument(*names, dest=spec.name, action="store_true", help=text)
        return
    if spec.default != "":
        text += f" (default: {spec.default})"
    choices = spec.metadata.get("choices")
    several = spec.metadata.get("several", False)
    group.add_argument(
        *names,
        dest=spec.name,
        action=_Joined if several else "store",
        nargs="+" if several else None,
        type=_reader(spec, kind),
        default=None if "variable" in spec.metadata else spec.default,
        # The config checks the values, because it accepts aliases as well.
        metavar="{" + ",".join(map(str, choices)) + "}" if choices else kind.__name__.upper(),
        help=text.replace("%", "%%"),
    )


class _Joined(argparse.Action):
    """Joins several words by commas: `1 2 4` is `1,2,4`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        del parser, option_string
        setattr(namespace, self.dest, ",".join(values))


def _reader(spec: dataclasses.Field[Any], kind: type[Any]) -> Any:
    spelled = spec.metadata.get("spelled", {})

    def read(text: str) -> Any:
        return kind(spelled.get(text, text))

    read.__name__ = kind.__name__  # argparse names it in errors
    return read


def _is_elsewhere(spec: dataclasses.Field[Any], value: object) -> bool:
    """Whether SGLang has this value and the field has not: the default is used."""
    return value in spec.metadata.get("elsewhere", ())


def _flag_of(spec: dataclasses.Field[Any]) -> str:
    return _spelled(spec.name)


def _spelled(field: str) -> str:
    return "--" + field.replace("_", "-")
