"""The DP ranks of a group as child processes of the launcher: workers that start and end together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from mla_router.launch.local_worker import LocalWorker
from mla_router.launch.process import describe_exit
from mla_router.launch.supervisor import End
from mla_router.worker.config import WorkerConfig

Show = Callable[[str], None]


class LocalGroup:
    """A `Worker` of this machine, with a process for each DP rank. Each line of their output goes to its `Show`."""

    def __init__(self, members: Sequence[tuple[WorkerConfig, Sequence[str], Show]]) -> None:
        """`members`: settings, command and output of each DP rank."""
        self._members = members
        self._running: list[LocalWorker] = []

    async def run(self, on_ready: Callable[[str], None]) -> End:
        """Runs the DP ranks until one ends, and kills the others."""
        # Not at the top: without its packages `launch_server` still says which are missing
        from mla_router.worker.dp_group import dp_groups

        ready: list[str] = []

        def one_is_ready(process: str) -> None:
            ready.append(process)
            if len(ready) == len(self._members):
                on_ready(", ".join(ready))

        # They last as long as this run: a group that starts again gets new ones
        with dp_groups(len(self._members)) as groups:
            self._running = [
                LocalWorker(config, [*command, group.to_flag()], show, group.descriptors)
                for (config, command, show), group in zip(self._members, groups, strict=True)
            ]
            ends = [asyncio.create_task(one.run(one_is_ready)) for one in self._running]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                first = next(rank for rank, end in enumerate(ends) if end.done())
                self.kill()
                found = await asyncio.gather(*ends)
            finally:
                for end in ends:
                    end.cancel()
        status = found[first].status
        assert status is not None, "it runs on this machine"
        return End(status, f"is a group whose DP rank {first} {describe_exit(status)}")

    async def stop(self, grace_s: float) -> None:
        await asyncio.gather(*(one.stop(grace_s) for one in self._running))

    def kill(self) -> None:
        for one in self._running:
            one.kill()
