"""Decides by measured times whether drafts pay, for each range of batch sizes.

A step with drafts takes longer: by the verified rows, and by the drafter. How much depends on the device, the model and the
batch; how many tokens it gives depends on the text. So both are measured while the worker serves. A draft changes no token,
and neither does this choice.

The choice keeps an account. Its unit is the time of a step without drafts. A step with drafts adds its tokens of a request
and subtracts its time, so the account is the time that drafts have saved. Steps have drafts while the account is positive.
Once it is empty, each step without drafts adds a small share of its time. When these shares reach a stake, drafts are tried
again, because the text may have changed. So for any text drafts lose at most this share and the first stake, and a trial
that loses much is short.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Steps without drafts that are measured before the first trial, and again after RELEARNT_AFTER steps with drafts, since the
# requests grow
LEARNT, RELEARNT_AFTER = 8, 1024
# The stake of a trial, in steps without drafts. For one request: about four steps whose drafts are all wrong. For many
# it is less, since chance moves a mean over many requests less
STAKE, LEAST_STAKE = 6.0, 2.0
# Upper bound of the account, in steps without drafts: drafts would go on for that long after a change of the text
MOST_WON = 24.0
# Share of the time without drafts that trials may lose. Half of it would find a change of the text half as fast
ALLOWANCE = 0.01
_SMOOTHING = 0.2


@dataclass(slots=True)
class _Range:
    """Decode steps of a range of batch sizes."""

    stake: float
    account: float
    plain_s: float = 0.0  # smoothed time of a step without drafts; 0 before the first
    has_drafts: bool = True
    left: int = LEARNT  # steps without drafts, to measure them
    drafted: int = 0  # steps with drafts since they were measured

    def pay(self, gain: float) -> None:
        """Adds `gain`, which may be negative, to the account. One slow step must not decide."""
        self.account = min(self.account + max(gain, -STAKE / 2), MOST_WON)
        self.has_drafts = self.has_drafts and self.account > 0


class DraftChoice:
    """The choice between steps with and without drafts. Ranges end at powers of two."""

    def __init__(self) -> None:
        self._ranges: dict[int, _Range] = {}

    def wants(self, requests: int) -> bool:
        """Returns whether the next step, of this many decoding requests, is to have drafts."""
        found = self._of(requests)
        if found.has_drafts and found.drafted >= RELEARNT_AFTER:
            found.left, found.drafted = LEARNT, 0
        if found.left:
            found.left -= 1
            return False
        return found.has_drafts

    def expects(self, requests: int) -> bool:
        """Returns whether the next step of this many requests will have drafts, if the step before it makes some."""
        found = self._of(requests)
        return found.has_drafts and not found.left

    def learn_plain(self, requests: int, seconds: float) -> None:
        """Learns from a step that neither verified nor made drafts, and followed one that made none."""
        found = self._of(requests)
        found.plain_s = _smoothed(found.plain_s, seconds)
        if not found.has_drafts:
            found.account += ALLOWANCE
            found.has_drafts = found.account >= found.stake

    def learn(self, requests: int, seconds: float, tokens: float) -> None:
        """Learns from a step that verified or made drafts, or followed one that made them, and gave `tokens` to a
        request."""
        found = self._of(requests)
        found.drafted += 1
        if found.plain_s:
            found.pay(tokens - seconds / found.plain_s)

    def _of(self, requests: int) -> _Range:
        bits = requests.bit_length()
        if bits not in self._ranges:
            stake = stake_of(1 << max(bits - 1, 0))
            self._ranges[bits] = _Range(stake, account=stake)
        return self._ranges[bits]


def stake_of(requests: int) -> float:
    """Returns the stake of a trial with this many requests, in steps without drafts."""
    return max(LEAST_STAKE, STAKE / math.sqrt(requests))


def _smoothed(before: float, now: float) -> float:
    # One slow step must not decide
    return before + _SMOOTHING * (min(now, 2 * before) - before) if before else now
