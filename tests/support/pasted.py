"""Commands that a program prints for its user to paste."""

from __future__ import annotations

import shlex


def curl_lines(output: str) -> list[list[str]]:
    """As a shell would run them: what a line says from `curl` on."""
    joined = output.replace("\\\n", " ")
    return [
        shlex.split(line[line.index("curl ") :]) for line in joined.splitlines() if "curl " in line
    ]
