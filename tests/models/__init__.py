"""Tiny models of every class with a plan."""

from __future__ import annotations

from tests.models import controlnets, flux, pictures, sound, videos, wan
from tests.models.tiny import Tiny

TINY: dict[str, Tiny] = {**flux.TINY, **pictures.TINY, **videos.TINY, **wan.TINY, **sound.TINY, **controlnets.TINY}
FIRST: dict[str, str] = {tiny.kind: name for name, tiny in reversed(TINY.items())}  # of each class, its first entry
