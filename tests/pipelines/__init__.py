"""Tiny pipelines of diffusers, by name."""

from __future__ import annotations

from tests.pipelines import pictures, videos
from tests.pipelines.tiny import TinyPipe

PIPES: dict[str, TinyPipe] = {**pictures.TINY, **videos.TINY}
