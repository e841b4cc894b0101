"""Decides by measured times whether drafts pay, for each range of batch sizes.

A step with drafts takes longer: by the verified rows, and by the drafter. How much depends on the device, the model and the
batch; how many tokens it gives depends on the text. So both are measured while the worker serves. A draft changes no token,
and neither does this choice.
"""

from __future__ import annotations

from dataclasses import dataclass

# Steps without drafts that are measured first, and steps with drafts before a decision.
LEARNT, TRIED = 8, 24
# Steps without drafts after a trial that did not pay. They double from trial to trial, so that trials take little time in all;
# the text may change, so there are always further ones.
SHORTEST_PAUSE, LONGEST_PAUSE = 128, 4096
_SMOOTHING = 0.2


@dataclass(slots=True)
class _Range:
    """Decode steps of a range of batch sizes. Times are smoothed, and 0 before the first."""

    plain_s: float = 0.0
    with_drafts_s: float = 0.0
    tokens: float = 0.0  # of a request with drafts in a step
    tried: int = 0  # steps of the current trial
    pause: int = SHORTEST_PAUSE  # after the next trial that does not pay
    left: int = LEARNT  # steps without drafts until the next trial


class DraftChoice:
    """The choice between steps with and without drafts. Ranges end at powers of two."""

    def __init__(self) -> None:
        self._ranges: dict[int, _Range] = {}

    def wants(self, requests: int) -> bool:
        """Returns whether the next step, of so many decoding requests, is to have drafts."""
        found = self._of(requests)
        if found.left:
            found.left -= 1
            return False
        return True

    def learn_plain(self, requests: int, seconds: float) -> None:
        """Learns from a step that neither verified nor made drafts."""
        found = self._of(requests)
        found.plain_s = _smoothed(found.plain_s, seconds)

    def learn(self, requests: int, seconds: float, tokens: float) -> None:
        """Learns from a step that verified drafts, and gave `tokens` to a request with drafts."""
        found = self._of(requests)
        found.with_drafts_s = _smoothed(found.with_drafts_s, seconds)
        found.tokens = _smoothed(found.tokens, tokens)
        found.tried += 1
        if found.tried < TRIED or not found.plain_s:
            return
        if found.with_drafts_s > found.tokens * found.plain_s:
            self._ranges[requests.bit_length()] = _Range(
                found.plain_s, pause=min(2 * found.pause, LONGEST_PAUSE), left=found.pause
            )
        else:
            found.pause = SHORTEST_PAUSE

    def _of(self, requests: int) -> _Range:
        return self._ranges.setdefault(requests.bit_length(), _Range())


def _smoothed(before: float, now: float) -> float:
    # One slow step must not decide
    return before + _SMOOTHING * (min(now, 2 * before) - before) if before else now
