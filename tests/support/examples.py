"""Settings of Hypothesis for a test that sets its number of examples."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

SEARCH = "search"  # the profile of `make test-search`
FACTOR = 10


def examples(count: int, **others: Any) -> settings:
    """Returns settings with `count` examples, and ten times as many in a search: a number of a test takes precedence over
    that of a profile."""
    is_search = settings.get_current_profile_name() == SEARCH
    return settings(max_examples=count * (FACTOR if is_search else 1), **others)
