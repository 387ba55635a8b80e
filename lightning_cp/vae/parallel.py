"""Make a diffusers VAE decode and encode in parallel over a context group (`parallelize_vae`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.comm.transforms import refuse_tangents
from lightning_cp.mesh.groups import MeshGroups
from lightning_cp.nest import replace
from lightning_cp.undoable import Undo, intercept_method, set_attribute, undo_all
from lightning_cp.vae.rows import by_rows, reach_of
from lightning_cp.vae.tiles import CallQueue, Rehearsal, TileWorker, resolve_deferred

_IMAGE_LOOPS = ("_tiled_encode", "tiled_encode", "tiled_decode")
_VIDEO_LOOPS = ("tiled_encode", "_temporal_tiled_encode", "tiled_decode", "_temporal_tiled_decode")
_PROCESSORS = ("AttnProcessor2_0", "FusedAttnProcessor2_0")  # they call F.scaled_dot_product_attention


@dataclass(frozen=True)
class VaeClass:
    """Properties of one class for parallel decode and encode.

    Attributes:
        halos: True if an untiled decode or encode can be split by rows, with halos.
        caches: True if encoder and decoder return a feature cache with the result.
        patched: True if patches of `config.patch_size` pixels are packed before the encoder, not in it.
        loops: its methods that loop over tiles.
        encodes: False if only the decoder can be split by rows; every rank then encodes the whole input.
        keeps_frames: True if its convolutions keep frames of the last call, until `_clear_conv_cache`.
        fills_buffers: True if its loops write the tiles into a buffer, which they then read.
        drops_frames: name of the VAE's setting that makes the loop drop the first frames of each decoded tile.
    """

    halos: bool = True
    caches: bool = False
    patched: bool = False
    loops: tuple[str, ...] = ("tiled_encode", "tiled_decode")
    encodes: bool = True
    keeps_frames: bool = False
    fills_buffers: bool = False
    drops_frames: str = ""


_TILES_ONLY = VaeClass(halos=False)
CLASSES: dict[str, VaeClass] = {
    "AutoencoderDC": _TILES_ONLY,  # linear attention: sums over all positions, by torch.matmul
    "AutoencoderKL": VaeClass(loops=_IMAGE_LOOPS),
    # diffusers implements no untiled decode or encode.
    "AutoencoderKLAllegro": VaeClass(halos=False, fills_buffers=True),
    "AutoencoderKLCogVideoX": VaeClass(halos=False, caches=True),  # frame chunks depend on the local size
    "AutoencoderKLFlux2": VaeClass(loops=_IMAGE_LOOPS),
    "AutoencoderKLHunyuanImage": VaeClass(),
    "AutoencoderKLHunyuanVideo": VaeClass(loops=_VIDEO_LOOPS),
    "AutoencoderKLHunyuanVideo15": VaeClass(),
    "AutoencoderKLLTX2Video": VaeClass(loops=_VIDEO_LOOPS),
    "AutoencoderKLLTXVideo": VaeClass(loops=_VIDEO_LOOPS),
    "AutoencoderKLMagvit": VaeClass(keeps_frames=True),
    # Its encoder attends in chunks of positions, which are not whole rows.
    "AutoencoderKLMochi": VaeClass(caches=True, encodes=False, drops_frames="drop_last_temporal_frames"),
    "AutoencoderKLQwenImage": VaeClass(),
    "AutoencoderKLQwenImage21": VaeClass(patched=True),
    "AutoencoderKLWan": VaeClass(patched=True),
}


def vae_class_of(vae: nn.Module) -> VaeClass:
    """Return the properties of a VAE. Raises: ValueError: unsupported class, noise, attention or compilation."""
    name = type(vae).__name__
    vae_class = next((CLASSES[c.__name__] for c in type(vae).__mro__ if c.__name__ in CLASSES), None)
    if vae_class is None:
        raise ValueError(
            f"{name} cannot be split over ranks: leave out parallelize_vae (or set vae=False), so that every rank "
            f"decodes everything. Supported: {', '.join(CLASSES)}"
        )
    for path, module in vae.named_modules():
        if getattr(module, "per_channel_scale1", None) is not None:
            raise ValueError(
                f"{name} adds random noise while it decodes ({path}), which ranks would draw differently: leave out "
                "parallelize_vae (or set vae=False), so that every rank decodes everything"
            )
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(f"{name} is compiled ({path or 'as a whole'}): make it parallel without torch.compile")
        processor = type(getattr(module, "processor", None)).__name__
        splits = vae_class.halos and (vae_class.encodes or not path.startswith("encoder."))
        if splits and processor != "NoneType" and processor not in _PROCESSORS:
            raise ValueError(
                f"{name} computes attention with {processor} ({path}): call vae.set_default_attn_processor(), "
                "which uses F.scaled_dot_product_attention"
            )
    return vae_class


def compression_of(vae: Any, kind: VaeClass) -> int:
    """Return the number of rows of an encoder's input per row of its output."""
    config = vae.config
    ratio = vae.__dict__.get("spatial_compression_ratio") or config.get("spatial_compression_ratio")
    if ratio is None:
        ratio = 2 ** (len(config["block_out_channels"]) - 1)
    return int(ratio) // (config.get("patch_size") or 1 if kind.patched else 1)


def parallelize_vae(vae: nn.Module, groups: MeshGroups) -> Undo:
    """Distribute a VAE's decode and encode over the ranks of `groups.context`.

    `vae.decode(z)` and `vae.encode(x)` keep their interface: whole tensors in and out on every rank, bitwise equal on
    all ranks. There are two ways to split the work:

    - With tiling (`vae.enable_tiling()` and an input larger than a tile), tiles are assigned to ranks. The result is
      bitwise equal to that of the VAE in one process.
    - Otherwise each rank computes a shard of rows: convolutions exchange halos, norms use statistics over all rows, and
      attention uses the keys of all rows. The result differs by rounding: relative 1e-5 in float32, 1e-12 in float64
      (1e-6 for LTX, because its norms round to float32). With too few rows (usually fewer than two latent rows
      per rank) every rank computes the whole result.

    Call `decode` and `encode` under `torch.no_grad()`: gradients and forward derivatives are refused.

    Args:
        vae: autoencoder of diffusers, whole and equal on every rank, in eval mode. Only this instance is changed.
        groups: context group of the ranks; a group of size 1 changes nothing.
    Returns: a function that restores the VAE exactly.
    Raises: ValueError: the class is not supported (some are only with tiling), the decoder adds noise, a module is
        compiled, attention does not call F.scaled_dot_product_attention, or the VAE is already parallel. `decode` and
        `encode` raise it if a gradient is needed, or if tiling was disabled.
    Ranks: all of the context group, here (no communication) and in every `decode` and `encode`, with equal inputs.
    """
    if groups.context_size == 1:
        return lambda: None
    if isinstance(vae.__dict__.get("_parallel_vae"), _Session):
        raise ValueError(f"this {type(vae).__name__} is already parallel: undo that first")
    session = _Session(vae, vae_class_of(vae), groups)
    session.refuse_untiled()
    undo: list[Undo] = []
    for name, step in (("encoder", compression_of(vae, session.kind)), ("decoder", 1)):
        module = getattr(vae, name)
        undo.append(intercept_method(module, "forward", _CoderCall(session, module, step, reach_of(module))))
    if session.kind.keeps_frames:
        undo.append(intercept_method(vae, "_clear_conv_cache", session.clear))
    for name in session.kind.loops:
        undo.append(intercept_method(vae, name, _TileLoop(session, name)))
    undo.append(set_attribute(vae, "_parallel_vae", session))
    return partial(undo_all, undo)


@dataclass(eq=False)
class _Session:
    """State of one parallel VAE.

    Attributes:
        vae: the autoencoder.
        kind: properties of its class.
        groups: context group of the ranks.
        queue: tiles while a tile loop runs; otherwise None.
    """

    vae: Any
    kind: VaeClass
    groups: MeshGroups
    queue: CallQueue | Rehearsal | None = None

    def clear(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrap `_clear_conv_cache`: in a tile loop, only begin a new unit, because its calls are computed later."""
        if isinstance(self.queue, CallQueue):
            return self.queue.begin_unit()
        return call(*args, **kwargs)

    def refuse_untiled(self) -> None:
        if not self.kind.halos and not self.vae.use_tiling:
            raise ValueError(
                f"{type(self.vae).__name__} can be split by tiles only: call vae.enable_tiling() first, or leave "
                "out parallelize_vae (or set vae=False)"
            )

    def refuse_gradients(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        inputs = [x for x in args if isinstance(x, Tensor)]
        refuse_tangents(f"a parallel {type(self.vae).__name__}", *inputs)
        if not torch.is_grad_enabled():
            return
        if any(x.requires_grad for x in (*inputs, *module.parameters())):
            raise ValueError(
                f"a parallel {type(self.vae).__name__} has no gradients: call decode and encode under torch.no_grad(), "
                "or undo parallelize_vae to train"
            )


@dataclass(eq=False)
class _TileLoop:
    """Wrapper of a VAE's loop over tiles: the loop runs unchanged on every rank, on deferred tiles."""

    session: _Session
    name: str

    def __call__(self, loop: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session, vae, kind = self.session, self.session.vae, self.session.kind
        if session.queue is not None or not vae.use_tiling or _has_no_samples(*args, *kwargs.values()):
            return loop(*args, **kwargs)
        worker = TileWorker(session.groups)
        drops = bool(kind.drops_frames) and self.name == "tiled_decode" and getattr(vae, kind.drops_frames)
        restore = set_attribute(vae, kind.drops_frames, False) if drops else None
        try:
            if kind.fills_buffers:
                session.queue = Rehearsal(worker)
                return session.queue.run(partial(loop, *args, **kwargs))
            session.queue = CallQueue(worker, clear=self._clear if kind.keeps_frames else None)
            result = resolve_deferred(loop(*args, **kwargs))
            return replace(Tensor, partial(_without_first, vae.temporal_compression_ratio), result) if drops else result
        finally:
            session.queue = None
            if kind.keeps_frames:
                vae._clear_conv_cache()
            if restore is not None:
                restore()

    def _clear(self) -> None:
        """Forget the frames of the tile before, now that tiles are computed."""
        queue, self.session.queue = self.session.queue, None
        try:
            self.session.vae._clear_conv_cache()
        finally:
            self.session.queue = queue


def _has_no_samples(*inputs: Any) -> bool:
    """Return True for an empty batch, which has no rows or tiles to share: SD3 slices one picture per generator."""
    return any(isinstance(x, Tensor) and x.ndim > 0 and not len(x) for x in inputs)


def _without_first(ratio: int, x: Tensor) -> Tensor:
    """Drop the frames before the first one, as Mochi does in each tile; blending treats each frame alone."""
    return x[:, :, ratio - 1 :] if x.shape[2] >= ratio else x


@dataclass(eq=False)
class _CoderCall:
    """Wrapper of an encoder's or decoder's forward: defers a tile; splits a whole input by rows.

    Attributes:
        session: state of the parallel VAE.
        module: the encoder or decoder.
        step: number of input rows per row of the result; shards have a multiple of it.
        reach: widest halo of its convolutions, in rows.
    """

    session: _Session
    module: nn.Module
    step: int
    reach: int

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session, kind = self.session, self.session.kind
        session.refuse_gradients(self.module, (*args, *kwargs.values()))
        if _has_no_samples(*args, *kwargs.values()):
            return forward(*args, **kwargs)
        if session.queue is not None:
            return session.queue.call(forward, args, kwargs, caches=kind.caches)
        if kind.halos and (kind.encodes or self.module is session.vae.decoder):
            min_steps = max(2, self.reach)  # 2: a dim of one row cannot be distinguished from other dims of size 1
            return by_rows(forward, args, kwargs, groups=session.groups, min_steps=min_steps, step=self.step)
        if not kind.halos:
            session.refuse_untiled()
        return forward(*args, **kwargs)
