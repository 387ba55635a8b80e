"""Table of diffusers' autoencoders that several ranks can decode and encode, and their properties."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_cp.compat.versions import incompatible


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


_IMAGE_LOOPS = ("_tiled_encode", "tiled_encode", "tiled_decode")
_VIDEO_LOOPS = ("tiled_encode", "_temporal_tiled_encode", "tiled_decode", "_temporal_tiled_decode")
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
_PROCESSORS = ("AttnProcessor2_0", "FusedAttnProcessor2_0")  # they call F.scaled_dot_product_attention


def vae_class_of(vae: nn.Module) -> VaeClass:
    """Return the properties of a VAE. Raises: ValueError: unsupported class, noise, attention or compilation."""
    name = type(vae).__name__
    vae_class = next((CLASSES[c.__name__] for c in type(vae).__mro__ if c.__name__ in CLASSES), None)
    if vae_class is None:
        raise ValueError(
            f"{name} cannot be split over ranks: leave out parallelize_vae (or set vae=False), so that every rank "
            f"decodes everything. Supported: {', '.join(CLASSES)}"
        )
    _check_loops(vae, vae_class)
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


def _check_loops(vae: nn.Module, kind: VaeClass) -> None:
    """Check the names of the loops over tiles. A loop that is not known would compute every tile on every rank.

    Raises: IncompatibleVersionError: the installed version has other loops.
    """
    loops = {name for name in dir(type(vae)) if "tiled_" in name and name.endswith(("encode", "decode"))}
    changed = sorted(loops ^ set(kind.loops))
    if changed:
        raise incompatible("diffusers", f"{type(vae).__name__} differs in its loops over tiles: {', '.join(changed)}")


def compression_of(vae: Any, kind: VaeClass) -> int:
    """Return the number of rows of an encoder's input per row of its output."""
    config = vae.config
    ratio = vae.__dict__.get("spatial_compression_ratio") or config.get("spatial_compression_ratio")
    if ratio is None:
        ratio = 2 ** (len(config["block_out_channels"]) - 1)
    return int(ratio) // (config.get("patch_size") or 1 if kind.patched else 1)
