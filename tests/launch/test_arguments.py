from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mla_router.launch import options as launch_options
from mla_router.launch.arguments import parse, with_launcher_flags
from mla_router.launch.options import Options
from mla_router.worker.config import WorkerConfig
from mla_router.worker.host import default_server_processes
from mla_router.worker.host_limits import usable_cores
from support.processes import ROOT


def flag(name: str, value_name: str | None = None, **more: Any) -> dict[str, Any]:
    described = {"name": name, "value_name": value_name, "heading": "Routing", "nargs": None}
    return {**described, "default": None, "help": "", "choices": None, **more}


FLAGS = [
    flag("worker-urls", "URL", nargs="*"),
    flag("host", "HOST", default="127.0.0.1"),
    flag("port", "PORT", default="30000"),
    flag("api-key", "KEY", nargs="*"),
    flag("worker-api-key", "KEY"),
    flag("admin-api-key", "KEY", heading="Serving"),
    flag("insecure", heading="Serving"),
    flag(
        "policy",
        "POLICY",
        default="cache_aware",
        help="How a worker is chosen",
        choices=["cache_aware", "round_robin"],
    ),
    flag("max-retries", "N", default="3", help="At 100%"),
    flag("networks", "CIDR", nargs="*"),
    flag("verbose"),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def parsed(model: Path, *argv: str) -> Options:
    ignored = {"cb-success-threshold": "one success is enough"}
    return parse(["--model-path", str(model), *argv], FLAGS, ignored)


def test_each_worker_has_its_own_port_name_and_devices(model: Path) -> None:
    options = parsed(model, "--dp-size", "3", "--base-gpu-id", "2", "--page-size", "32")
    workers = [options.worker(index, 31000 + index) for index in range(3)]
    assert [worker.port for worker in workers] == [31000, 31001, 31002]
    assert [worker.base_gpu_id for worker in workers] == [2, 3, 4]
    assert [worker.worker_id for worker in workers] == ["worker-0", "worker-1", "worker-2"]
    assert {worker.page_size for worker in workers} == {32}


def test_workers_of_several_ranks_have_as_many_devices_and_share_the_cores(model: Path) -> None:
    options = parsed(model, "--dp-size", "2", "--tp-size", "4", "--base-gpu-id", "1")
    workers = [options.worker(index, 31000 + index) for index in range(2)]
    assert [worker.base_gpu_id for worker in workers] == [1, 5]
    cores = usable_cores()
    assert workers[0].cpu_threads == max(1, cores // 8)


NODES = ["--nnodes", "2", "--dist-init-addr", "10.0.0.1:5000", "--dist-key", "k" * 16]


def test_a_node_has_its_share_of_ranks_devices_and_cores(model: Path) -> None:
    options = parsed(model, "--tp-size", "4", "--base-gpu-id", "1", "--node-rank", "1", *NODES)
    worker = options.worker(0, 31000)
    assert worker.ranks_here == range(2, 4)
    assert worker.ranks_of(0) == range(2)
    assert worker.base_gpu_id == 1
    assert worker.cpu_threads == max(1, usable_cores() // 2)
    assert not any("k" * 16 in argument for argument in worker.to_argv()), "ps would show it"
    assert worker.child_environment()["MLA_ROUTER_DIST_KEY"] == "k" * 16


def test_the_cores_are_shared_by_default(model: Path) -> None:
    cores = usable_cores()
    assert parsed(model, "--dp-size", "1").worker(0, 1).cpu_threads == cores
    assert parsed(model, "--dp-size", "1000").worker(0, 1).cpu_threads == 1
    assert parsed(model, "--cpu-threads", "5").worker(0, 1).cpu_threads == 5


def test_host_and_port_are_the_routers(model: Path) -> None:
    options = parsed(model, "--host", "0.0.0.0", "--port", "8000")
    assert options.router_argv(["http://w:1"]) == [
        "--host=0.0.0.0", "--port=8000", f"--replay-key={options.every_worker.replay_key}",
        "--worker-urls", "http://w:1",
    ]  # fmt: skip
    worker = options.worker(0, 31000)
    assert (worker.host, worker.port) == ("127.0.0.1", 31000)


def test_router_flags_carry_a_prefix(model: Path) -> None:
    options = parsed(
        model, "--router-policy", "round_robin", "--router-max-retries=5", "--router-verbose"
    )
    argv = options.router_argv([])
    assert {"--policy=round_robin", "--max-retries=5", "--verbose"} <= set(argv)
    # Missing flags get the router's defaults.
    assert parsed(model).router_flags == {}


def test_flags_of_sglangs_router_without_effect_are_named(model: Path) -> None:
    options = parsed(model, "--router-cb-success-threshold", "2")
    assert options.without_effect == ["--router-cb-success-threshold (one success is enough)"]
    assert parsed(model).without_effect == []
    assert not any("cb-success" in word for word in options.router_argv([]))


@pytest.mark.parametrize(
    ("others", "named"),
    [
        (["--ep", "2"], ["--moe-a2a-backend (only with --enable-dp-attention and --ep-size)"]),
        (["--ep", "2", "--dp", "2", "--enable-dp-attention"], []),
    ],
)
def test_a_backend_of_exchanges_without_dp_ranks_is_named(
    model: Path, others: list[str], named: list[str]
) -> None:
    options = parsed(model, "--tp", "2", "--moe-a2a-backend", "deepep", *others)
    assert options.every_worker.moe_a2a_backend == "direct"
    assert options.without_effect == named


def test_a_list_takes_all_following_words(model: Path) -> None:
    options = parsed(model, "--router-networks", "10.0.0.0/8", "fd00::/8", "--page-size", "32")
    argv = options.router_argv(["http://w:1"])
    at = argv.index("--networks")
    assert argv[at : at + 3] == ["--networks", "10.0.0.0/8", "fd00::/8"]
    assert parsed(model, "--router-networks").router_flags == {"networks": []}


def test_the_way_in_goes_without_the_prefix(model: Path) -> None:
    argv = parsed(model, "--admin-api-key", "barley", "--insecure").router_argv([])
    assert {"--admin-api-key=barley", "--insecure"} <= set(argv)
    with pytest.raises(SystemExit):
        parsed(model, "--router-insecure")


def test_one_key_for_all(model: Path) -> None:
    options = parsed(model, "--api-key", "sesame")
    assert "--api-key=sesame" in options.router_argv([])
    assert options.worker(0, 1).api_key == "sesame"
    options = parsed(model, "--admin-api-key", "caliph")
    assert {"--admin-api-key=caliph", "--worker-admin-api-key=caliph"} <= set(
        options.router_argv([])
    )
    assert options.worker(0, 1).admin_api_key == "caliph"


def test_each_start_has_a_replay_key_of_its_own(model: Path) -> None:
    first, second = parsed(model), parsed(model)
    key = first.every_worker.replay_key
    assert len(key) == 64
    assert key != second.every_worker.replay_key
    assert f"--replay-key={key}" in first.router_argv([])
    worker = first.worker(0, 1)
    assert worker.child_environment()["MLA_ROUTER_REPLAY_KEY"] == key
    assert not any(key in argument for argument in worker.to_argv()), "ps would show it"


def test_waiting_openmp_threads_sleep_unless_the_user_says_otherwise(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = parsed(model).worker(0, 1)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert worker.child_environment()["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert worker.child_environment()["OMP_WAIT_POLICY"] == "ACTIVE"


def test_ranks_talk_over_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert "NCCL_SOCKET_IFNAME" not in WorkerConfig().child_environment()
    assert WorkerConfig(tp_size=2).child_environment()["NCCL_SOCKET_IFNAME"] == "lo"
    several = WorkerConfig(tp_size=2, nnodes=2, dist_init_addr="a:1", dist_key="k" * 16)
    assert "NCCL_SOCKET_IFNAME" not in several.child_environment()


def test_sglang_short_names(model: Path) -> None:
    options = parse(
        ["--model", str(model), "--tp", "1", "--dp", "2", "--enable-metrics"], FLAGS, {}
    )
    assert options.without_effect == ["--enable-metrics (/metrics is always there)"]
    assert options.every_worker.model_path == str(model)
    assert options.every_worker.tp_size == 1
    assert options.dp_size == 2


@pytest.mark.parametrize(
    ("argv", "mention"),
    [
        (["--dp-size", "0"], "--dp-size/--data-parallel-size/--dp: '0': a whole number from 1 on"),
        (["--port", "70000"], "--port: '70000' is not a port"),
        (["--page-size", "7"], "--page-size"),
        (["--tp", "2", "--ep", "4"], "--ep-size 4: must divide"),
        (["--tp", "3", *NODES], "--nnodes 2: must divide --tp-size 3"),
        (["--tp", "2", "--node-rank", "2", *NODES], "--node-rank 2: must be less than --nnodes 2"),
        (["--node-rank", "1"], "--node-rank 1: set --nnodes"),
        (["--tp", "2", "--nnodes", "2"], "--nnodes 2: give --dist-init-addr"),
        (["--tp", "2", *NODES[:-1], "short"], "--nnodes 2: set MLA_ROUTER_DIST_KEY"),
        (["--tp", "2", "--dp", "2", *NODES], "--dp-size 2: with --nnodes 2 a launcher has one"),
        (["--enable-dp-attention", "--tp", "2"], "--enable-dp-attention with --dp-size 1: give"),
        (
            ["--enable-dp-attention", "--tp", "3", "--dp", "2"],
            "--dp-size 2: must divide --tp-size 3",
        ),
        (
            ["--enable-dp-attention", "--tp", "6", "--dp", "3", *NODES],
            "--nnodes 2: must divide --dp-size 3 with --enable-dp-attention",
        ),
        (
            ["--enable-dp-attention", "--tp", "2", "--dp", "2", "--enable-torch-compile"],
            "--enable-dp-attention with --enable-torch-compile: leave it out",
        ),
        (["--api-key", ""], "--api-key is empty: give a key, or leave it out"),
        (["--router-policy", "magic"], "--router-policy: invalid choice: 'magic'"),
        (["--no-such-flag"], "--no-such-flag (--help shows every flag)"),
        (["--modle-path", "x"], "--modle-path x; did you mean --model-path?"),
        (["--apikey", "s3cret"], "--apikey ***; did you mean --api-key?"),
        (["--worker-api-key=s3cret"], "--worker-api-key=***"),
        (["--policy", "x"], "--policy x; did you mean --router-policy?"),
        (["--router-foo", "3"], "--router-foo 3 (--help shows every flag)"),
        (["--nope"], "--nope (--help shows every flag)"),  # not --nnodes
        (["--max-running", "5"], "--max-running"),  # no abbreviations
        (["--kv-cache-dtype", "fp4_e2m1"], "--kv-cache-dtype"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    argv: list[str], mention: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        parsed(model, *argv)
    assert leaving.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert mention in printed.err


def test_help_shows_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        parse(["--help"], FLAGS, {})
    assert leaving.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--model-path", "--dp-size", "--router-policy", "--router-dp-worker-base-port"):
        assert flag in text
    assert "At 100% (default: 3)" in " ".join(text.split())
    for flag in ("--router-port", "--router-api-key", "--router-worker-api-key"):
        assert flag not in text
    routing = text.index("router, routing")
    assert text.index("router, serving") < text.index("--insecure") < routing
    assert routing < text.index("--router-policy {cache_aware,round_robin}")


def test_the_routers_own_errors_name_the_flag_that_was_typed() -> None:
    message = "invalid value 'x' for '--max-retries <N>'; --port and --insecure are fine"
    expected = "invalid value 'x' for '--router-max-retries <N>'; --port and --insecure are fine"
    assert with_launcher_flags(message) == expected


def test_importing_the_launcher_does_not_import_torch() -> None:
    program = (
        "import sys, json, mla_router.launch.server, mla_router.launch.router\n"
        "print(json.dumps([name for name in ('torch', 'transformers') if name in sys.modules]))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT / "python")},
        check=True,
        capture_output=True,
    )
    assert json.loads(answer.stdout) == []


@pytest.mark.parametrize(
    ("device", "cores", "processes"),
    [
        ("cpu", 64, 1),
        ("cuda", 1, 1),
        ("cuda", 7, 1),
        ("cuda", 8, 2),
        ("cuda", 15, 3),
        ("cuda", 128, 4),
    ],
)
def test_server_processes_by_cores(device: str, cores: int, processes: int) -> None:
    assert default_server_processes(device, cores) == processes


def test_workers_share_the_cores(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_options, "usable_cores", lambda: 24)
    options = parsed(model, "--dp-size", "3", "--device", "cuda")
    assert [options.worker(index, 31000).tokenizer_worker_num for index in range(3)] == [2, 2, 2]
    told = parsed(model, "--dp-size", "3", "--device", "cuda", "--tokenizer-worker-num", "7")
    assert told.worker(0, 31000).tokenizer_worker_num == 7


def test_a_worker_on_a_ray_node_has_the_gpus_that_ray_gives_it(model: Path) -> None:
    options = parsed(model, "--use-ray", "--dp-size", "2", "--tp-size", "4")
    assert options.ray_address == "auto"
    assert parsed(model, "--use-ray", "--ray-address", "head:6379").ray_address == "head:6379"
    assert parsed(model).ray_address == ""
    worker = options.ray_worker(1, "cuda")
    assert (worker.worker_id, worker.base_gpu_id, worker.device) == ("worker-1", 0, "cuda")
    assert options.ray_worker(0, "cpu").cpu_threads == 1, "one core of Ray for each rank"


def test_workers_on_several_ray_nodes_share_a_secret(model: Path) -> None:
    argv = ["--use-ray", "--dp-size", "2", "--tp-size", "4", "--nnodes", "2"]
    first, other = parsed(model, *argv), parsed(model, *argv)
    worker = first.ray_worker(0, "cuda")
    assert (worker.nnodes, worker.ranks_here) == (2, range(2))
    assert len(worker.dist_key) == 64
    assert worker.dist_key != other.ray_worker(0, "cuda").dist_key


@pytest.mark.parametrize(
    ("argv", "mention"),
    [
        (["--use-ray", *NODES, "--tp-size", "2"], "--dist-init-addr"),
        (["--use-ray", "--nnodes", "2", "--tp-size", "2", "--node-rank", "1"], "--node-rank"),
        (["--use-ray", "--nnodes", "2"], "must divide --tp-size"),
        (["--use-ray", "--base-gpu-id", "1"], "--base-gpu-id"),
        (["--ray-address", "auto"], "give --use-ray"),
        (["--use-ray", "--ray-address", "ray://head:10001"], "HOST:PORT"),
    ],
)
def test_what_ray_decides_is_not_a_flag(
    model: Path, argv: list[str], mention: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(model, *argv)
    assert mention in capsys.readouterr().err


def test_each_node_has_its_dp_ranks() -> None:
    flags = ["--enable-dp-attention", "--tp", "8", "--dp", "4", "--base-gpu-id", "1", *NODES]
    nodes = [parse([*flags, "--node-rank", str(node)], FLAGS, {}) for node in range(2)]
    assert [options.workers_here for options in nodes] == [range(2), range(2, 4)]
    workers = [[options.worker(index, 1) for index in options.workers_here] for options in nodes]
    ranks = [[worker.ranks_here for worker in node] for node in workers]
    assert ranks == [[range(2), range(2, 4)], [range(4, 6), range(6, 8)]]
    assert [[worker.base_gpu_id for worker in node] for node in workers] == [[1, 3], [1, 3]]
    assert all(worker.leads_here for node in workers for worker in node)
    # Streams continue on another node
    assert nodes[0].every_worker.replay_key == nodes[1].every_worker.replay_key != ""
    assert len({options.shared_key(purpose) for options in nodes for purpose in "ab"}) == 2
