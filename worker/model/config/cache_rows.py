"""What a token keeps in the KV cache of one layer: a row, of one of two kinds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatentRows:
    """A latent, from which keys and values of all heads follow, and the rotary key that they share."""

    latent: int
    rotary: int

    @property
    def width(self) -> int:
        return self.latent + self.rotary


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The keys of all key heads, then their values."""

    heads: int
    key_width: int
    value_width: int

    @property
    def width(self) -> int:
        return self.heads * (self.key_width + self.value_width)
