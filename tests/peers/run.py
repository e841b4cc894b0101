"""Server tests of other engines, unmodified, against a real router and worker of this project.

    make test-peers                                # vLLM's and sglang-router's, from their source packages
    make test-peers ARGS="vllm -k logprobs"        # some tests of one suite
    make test-peers ARGS="vllm --file test_chat*"  # some files of one suite
    SGLANG_SRC=DIR make test-peers ARGS=sglang     # SGLang's, from a checkout of its repository: no package has them
    SGLANG_SRC=DIR make test-peers ARGS="sglang-context --file test_scheduler*"   # those that need a long context

A suite is named in `suites.toml`: where its tests come from, which files apply, which tests are expected to
fail, and which may, with the reason of each. Their imports of the engine under test are answered by `standins.py`,
whose server is ours. Ends with a table, and with 1 if a test failed that is not expected to, or passed that is.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / "target/peers"  # downloads and reports
TIMEOUT_S = 3600.0  # of one suite
TEST_S = 180  # of one test


@dataclass(frozen=True)
class Suite:
    name: str
    version: str
    files: list[str]  # relative to the folder of the sources
    expected: dict[str, str]  # reason by pattern of test names, as `FILE::TEST` in fnmatch's syntax
    needs: list[str]  # packages of its environment
    # The same for tests whose outcome is chance: the model samples without a seed
    chance: dict[str, str] = field(default_factory=dict)
    fixtures: str = ""  # file of pytest fixtures that can be imported without the engine
    path: str = ""  # folder of the sources that the tests import from
    url: str = ""  # of a source package
    sha256: str = ""
    flags: list[str] = field(default_factory=list)  # of the server, besides those of the tests
    # Changes to the small model's config.json, for tests that ask for long contexts or many tokens and not for good
    # answers: the weights are random.
    config: dict[str, int] = field(default_factory=dict)
    variable: str = ""  # of the environment, which names the folder

    def sources(self) -> Path | None:
        """The folder of the sources; None if it is not known."""
        if self.variable:
            named = os.environ.get(self.variable)
            return Path(named).resolve() if named else None
        archive = CACHE / self.url.rpartition("/")[2]
        folder = CACHE / archive.name.removesuffix(".tar.gz")
        if not folder.is_dir():
            print(f"downloading {self.url}", flush=True)
            urllib.request.urlretrieve(self.url, archive)
            digest = hashlib.sha256(archive.read_bytes()).hexdigest()
            assert digest == self.sha256, f"{archive}: sha256 {digest}, not {self.sha256}"
            with tarfile.open(archive) as tar:
                tar.extractall(CACHE, filter="data")
        return folder

    def reason(self, test: str) -> str | None:
        """Why `test` is expected to fail."""
        return _first(self.expected, test)

    def luck(self, test: str) -> str | None:
        """Why `test` may pass or fail."""
        return _first(self.chance, test)


def _first(reasons: dict[str, str], test: str) -> str | None:
    found = (why for pattern, why in reasons.items() if fnmatch.fnmatchcase(test, pattern))
    return next(found, None)


def random_model(name: str, config: dict[str, int]) -> Path:
    """Writes the small model's config.json with the changes of `config`, and its tokenizer with as many tokens."""
    small, folder = ROOT / "worker/model/small", CACHE / f"{name}-model"
    folder.mkdir(exist_ok=True)
    for file in ("chat_template.jinja", "generation_config.json", "tokenizer_config.json"):
        shutil.copy(small / file, folder)
    changed = json.loads((small / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(changed))
    tokenizer = json.loads((small / "tokenizer.json").read_text())
    # No merge makes these tokens of text: they are sampled, and sent as ids.
    vocabulary = tokenizer["model"]["vocab"]
    taken = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocabulary |= {f"Ġw{i}": i for i in range(changed["vocab_size"]) if i not in taken}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def suites() -> list[Suite]:
    with (HERE / "suites.toml").open("rb") as file:
        return [Suite(name=name, **fields) for name, fields in tomllib.load(file).items()]


def run(suite: Suite, sources: Path, files: list[str], arguments: list[str]) -> dict[str, str]:
    """Returns the outcome of each test of `files`: passed, failed or skipped."""
    report = CACHE / f"{suite.name}.json"
    report.unlink(missing_ok=True)
    missing = [file for file in files if not (sources / file.partition("::")[0]).exists()]
    assert not missing, f"{sources} has no {missing}"
    uv = Path(sys.executable).with_name("uv")
    command = [uv, "run", "--quiet", "--no-project", "--python", sys.executable]
    for package in suite.needs:
        command += ["--with", package]
    # No conftest.py of theirs: they import the engine.
    command += ["pytest", "--noconftest", "--import-mode=importlib", "-p", "standins", "-q"]
    command += ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", sources, "--tb=short"]
    command += ["--timeout", str(TEST_S), "-o", "asyncio_default_fixture_loop_scope=function"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
        "PYTHONPATH": os.pathsep.join([str(HERE), str(sources / suite.path)]),
        "PEER_SOURCES": str(sources / suite.path),
        "PEER_FIXTURES": str(sources / suite.fixtures) if suite.fixtures else "",
        "PEER_SERVER_PYTHON": sys.executable,
        "PEER_SERVER_PATH": str(ROOT / "python"),
        "PEER_REPORT": str(report),
        "PEER_LOGS": str(CACHE),
        "HF_HUB_OFFLINE": "1",
    }
    flags = list(suite.flags)
    if suite.config:
        flags += [f"--model-path={random_model(suite.name, suite.config)}", "--load-format=dummy"]
    environment["PEER_SERVER_FLAGS"] = json.dumps(flags)
    log = CACHE / f"{suite.name}.log"
    with log.open("w") as output:
        subprocess.run(
            [*map(str, command), *files, *arguments],
            cwd=sources,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert report.exists(), f"{suite.name} did not run: {log}"
    return dict(json.loads(report.read_text()))


def selected(suite: Suite, patterns: list[str]) -> list[str]:
    """Returns the files of `suite` whose name matches one of `patterns`, in fnmatch's syntax; all files without patterns."""
    if not patterns:
        return suite.files
    return [
        file
        for file in suite.files
        if any(fnmatch.fnmatchcase(file.rpartition("/")[2], f"{pattern}*") for pattern in patterns)
    ]


def judge(suite: Suite, outcomes: dict[str, str]) -> list[str]:
    """Returns a line for each test whose outcome is not as expected."""
    wrong = []
    for test, outcome in outcomes.items():
        if suite.luck(test):
            continue
        reason = suite.reason(test)
        if outcome == "failed" and reason is None:
            wrong.append(f"FAILED {test}")
        elif outcome == "passed" and reason is not None:
            wrong.append(f"PASSED, and was expected to fail ({reason}): {test}")
    return wrong


def main() -> int:
    known = {suite.name: suite for suite in suites()}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("suite", nargs="?", choices=known)
    parser.add_argument(
        "--file",
        action="append",
        default=[],
        metavar="PATTERN",
        help="run the files whose name begins so, as test_chat*.py or test_metrics.py::TestMetrics; can be repeated",
    )
    arguments, for_pytest = parser.parse_known_args()
    bad = False
    CACHE.mkdir(parents=True, exist_ok=True)
    for suite in [known[arguments.suite]] if arguments.suite else known.values():
        sources = suite.sources()
        if sources is None:
            print(f"{suite.name}: not run, ${suite.variable} names no folder")
            continue
        files = selected(suite, arguments.file)
        if not files:
            print(f"{suite.name}: no file matches {' or '.join(arguments.file)}")
            bad |= arguments.suite is not None
            continue
        outcomes = run(suite, sources, files, for_pytest)
        wrong = judge(suite, outcomes)
        bad |= bool(wrong)
        expected = Counter(
            suite.luck(test) or suite.reason(test) or ""
            for test, outcome in outcomes.items()
            if outcome == "failed"
        )
        print(f"\n{suite.name} {suite.version}: {dict(Counter(outcomes.values()))}")
        for reason, number in expected.most_common():
            if reason:
                print(f"  {number:4d} expected to fail: {reason}")
        for line in wrong:
            print(f"  {line}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
