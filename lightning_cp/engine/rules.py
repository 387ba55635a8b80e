"""What a plan comes to on one model: what to do at which module. Written by `compiling.py`, done by the hooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_cp.plans import Attention, Pad, Spec, Streams


@dataclass(frozen=True)
class Arguments:
    """Arguments of some modules that are split, or made whole, before their forward.

    paths: of the modules. positions: index of each argument in the forward's signature.
    """

    paths: tuple[str, ...]
    specs: Mapping[str, Spec]
    positions: Mapping[str, int]
    is_block: bool = False
    joins: bool = False
    always: bool = False  # split whatever comes (diffusers' format), rather than what is still whole


@dataclass(frozen=True)
class Outputs:
    """Outputs of a module that are split, or gathered, after its forward."""

    path: str
    spec: Spec
    gathers: bool
    always: bool = False


AttentionSpecs = tuple[Attention, ...]


@dataclass(frozen=True)
class Halo:
    """A convolution that sees `reach` neighbouring rows on both sides, in `dim` of its input."""

    path: str
    dim: int
    stream: str
    reach: int


@dataclass(frozen=True)
class Rules:
    """A plan, compiled for one model.

    attention: by path of each module that attends across ranks (None: to be found out).
    dividers: the model's patch sizes by which rows are counted, by their name in its config.
    """

    arguments: tuple[Arguments, ...]
    outputs: tuple[Outputs, ...]
    attention: Mapping[str, AttentionSpecs | None]
    main: str
    required: Mapping[str, str]
    refused: Mapping[str, str]
    refused_backends: Mapping[str, str] = field(default_factory=dict)
    pads: tuple[Pad, ...] = ()
    halos: tuple[Halo, ...] = ()
    dividers: Mapping[str, int] = field(default_factory=dict)
    needed: Streams = ()
    leading: Mapping[str, str] = field(default_factory=dict)
