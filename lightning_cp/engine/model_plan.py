"""A plan fitted to one model: the actions at each module. Built by `fit_plan`, executed by the hooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_cp.plans import Attention, Modalities, Pad, Patches, Spec


@dataclass(frozen=True)
class Arguments:
    """Arguments of some modules that are split or gathered before the forward.

    paths: paths of the modules in the model.
    specs: spec of each argument, by name.
    positions: index of each argument in the forward's signature, -1 if it is passed through `**kwargs`.
    gathers: gather the arguments instead of splitting them.
    """

    paths: tuple[str, ...]
    specs: Mapping[str, Spec]
    positions: Mapping[str, int]
    is_block: bool = False
    gathers: bool = False
    always: bool = False  # split every tensor (diffusers' format), not only those that are still whole


@dataclass(frozen=True)
class Outputs:
    """Outputs of a module that are split or gathered after its forward."""

    path: str
    spec: Spec
    gathers: bool
    always: bool = False


AttentionSpecs = tuple[Attention, ...]


@dataclass(frozen=True)
class Halo:
    """A convolution that needs a halo of `reach` rows on both sides, in `dim` of its input."""

    path: str
    dim: int
    modality: str
    reach: int


@dataclass(frozen=True)
class Embedding:
    """A module that embeds each patch of `modality` alone, unless a user has replaced it."""

    path: str
    modality: str


@dataclass(frozen=True)
class ModelPlan:
    """A plan fitted to one model: the actions at each module.

    attention: kinds of attention of each module that attends across ranks, by path; None: derived from token counts.
    scopes: kinds of attention of each block, and of each module in a block that the plan's `attention` names. Other
        modules attend as the module around them. (): LOCAL.
    unplanned: paths of modules outside the blocks that attend. Their keys must be whole.
    not_followed: paths in `attention` of modules with a replaced or decorated forward: a hook checks that it calls the
        processor.
    dividers: patch sizes of the model, by name in its config: input rows for each row of tokens.
    patches: settings for computation in patches; None: the model does not support it.
    feed_forwards: modules in the blocks that compute each token alone, in addition to those of diffusers.
    """

    arguments: tuple[Arguments, ...]
    outputs: tuple[Outputs, ...]
    attention: Mapping[str, AttentionSpecs | None]
    main: str
    required: Mapping[str, str]
    refused: Mapping[str, str]
    keeps_keys: Mapping[str, str] = field(default_factory=dict)
    refused_backends: Mapping[str, str] = field(default_factory=dict)
    pads: tuple[Pad, ...] = ()
    embeddings: tuple[Embedding, ...] = ()
    halos: tuple[Halo, ...] = ()
    dividers: Mapping[str, int] = field(default_factory=dict)
    optional: Modalities = ()
    needed: Modalities = ()
    leading: Mapping[str, str] = field(default_factory=dict)
    unplanned: tuple[str, ...] = ()
    not_followed: tuple[str, ...] = ()
    scopes: Mapping[str, AttentionSpecs] = field(default_factory=dict)
    patches: Patches | None = None
    feed_forwards: tuple[str, ...] = ()

    @property
    def blocks(self) -> frozenset[str]:
        """Paths of the blocks."""
        return frozenset(path for rule in self.arguments if rule.is_block for path in rule.paths)
