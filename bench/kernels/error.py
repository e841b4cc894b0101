"""The distance between two results."""

from torch import Tensor


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Returns the norm of the difference over the norm of `expected`."""
    return ((got.float() - expected.float()).norm() / expected.float().norm()).item()
