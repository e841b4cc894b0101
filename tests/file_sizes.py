"""The lengths of the sources: small files with one concept each are a rule here.

python tests/file_sizes.py
"""

from __future__ import annotations

import statistics
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def sources() -> list[Path]:
    """Returns all .py and .rs files of the project, new ones included."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py", "*.rs"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    paths = {ROOT / name for name in listed.stdout.split("\0") if name}
    return sorted(path for path in paths if path.is_file())  # a deleted file is listed as well


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def main() -> None:
    by_size = sorted(((lines(path), path) for path in sources()), reverse=True)
    for suffix in (".py", ".rs"):
        sizes = [size for size, path in by_size if path.suffix == suffix]
        if sizes:
            print(
                f"{suffix}  {len(sizes):4} files  {sum(sizes):6} lines"
                f"  median {statistics.median(sizes):4.0f}  max {max(sizes):4}"
            )
    print("longest:")
    for size, path in by_size[:10]:
        print(f"{size:6}  {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
