"""Commands that a program prints for its user."""

from __future__ import annotations

import shlex


def curl_lines(output: str) -> list[list[str]]:
    """Returns the commands as a shell would run them: the part of each line from `curl` on."""
    joined = output.replace("\\\n", " ")
    return [
        shlex.split(line[line.index("curl ") :]) for line in joined.splitlines() if "curl " in line
    ]
