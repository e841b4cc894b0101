"""Any rank of a worker or of a group of DP ranks is killed or stopped for good, while 16 streams run.

The streams continue on a worker outside, the rank and its group end and start again by themselves, and nothing is left behind.
The router with the streams is in front of the ranks, or of the router of their launcher, as in the Helm chart.
"""

from __future__ import annotations

import asyncio
import signal

import pytest

from support import processes
from support.processes import Flag, Running, wait_until
from support.procfs import Pid, descendants
from support.streams import answers, interrupted

STREAMS = 16
# A stopped rank is killed after four times as long
WATCHDOG_S = 1.5
DIVISIONS: dict[str, tuple[int, dict[str, Flag]]] = {  # workers, flags
    "tp": (1, {"tp_size": 2}),
    "dp": (2, {"tp_size": 2, "ep_size": 2, "enable_dp_attention": True}),
    "dp_tp": (2, {"tp_size": 4, "ep_size": 4, "enable_dp_attention": True}),
}


def ranks_of(server: Running) -> list[Pid]:
    """Returns the processes of all ranks, in an order that stays the same after a restart."""
    names = "mla_router scheduler", "mla_router rank"
    found = [pid for pid in descendants(server.pid) if pid.command.startswith(names)]
    return sorted(found, key=lambda pid: pid.command)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=lambda fault: fault.name)
@pytest.mark.parametrize("division", DIVISIONS)
def test_no_fault_of_a_rank_shows(division: str, fault: signal.Signals, small_worker: str) -> None:
    workers, flags = DIVISIONS[division]
    expected = asyncio.run(answers(small_worker, STREAMS))
    limits: dict[str, Flag] = {
        "watchdog_timeout": WATCHDOG_S,
        # The router of the launcher waits for the return of its group, which takes long on a busy machine
        "router_queue_timeout_secs": 300,
    }
    with processes.server(dp_size=workers, **limits, **flags) as server:
        urls = [worker["url"] for worker in processes.workers(server.url)]
        if division == "dp_tp":
            urls = [server.url]
        with processes.router([*urls, small_worker], policy="round_robin") as router:
            for number in range(int(str(flags["tp_size"]))):
                wait_until(
                    lambda: len(processes.healthy_workers(router.url)) == len(urls) + 1, "ready"
                )
                ranks, before = ranks_of(server), descendants(server.pid)
                assert len(ranks) == flags["tp_size"]
                found = asyncio.run(interrupted(router.url, STREAMS, ranks[number], fault))
                assert found == expected, ranks[number].command
                wait_until(lambda: not any(pid.alive for pid in before), "all of it ends")  # noqa: B023
        wait_until(lambda: len(processes.healthy_workers(server.url)) == workers, "it is back")
        assert asyncio.run(answers(server.url, STREAMS)) == expected
