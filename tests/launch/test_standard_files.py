"""Commands without standard files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import socket, sys
from pathlib import Path
from mla_router.launch.standard_files import open_standard_files
open_standard_files()
print("output")
print("error", file=sys.stderr)
Path(sys.argv[1]).write_text(str(socket.socket().fileno()))
"""


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", "2>&-", ""])
def test_no_socket_gets_the_number_of_a_standard_file(closed: str, tmp_path: Path) -> None:
    told = tmp_path / "number"
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", PROGRAM, str(told)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(told.read_text()) > 2
    assert done.stdout == ("" if ">&-" in closed.replace("2>&-", "") else "output\n")
    assert done.stderr == ("" if "2>&-" in closed else "error\n")
