"""ControlNets, each with the configuration and the inputs of the tiny transformer that it steers."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from torch import nn

from lightning_cp.plans.example_inputs import ExampleInputs
from tests.models import flux, pictures, videos
from tests.models.tiny import Tiny, drawn


@dataclass(frozen=True)
class Control(Tiny):
    """A ControlNet.

    Attributes:
        steers: the transformer that it steers.
        fed: names of the transformer's arguments that take its outputs.
    """

    steers: Tiny = flux.TINY["flux"]
    fed: tuple[str, ...] = ("controlnet_block_samples",)

    def make(self, **config: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`FluxPosEmbed` is deprecated", FutureWarning)
            return super().make(
                **{**_known(getattr(diffusers, self.kind).__init__, self.steers.config), **self.config, **config}
            )

    def build(self, transformer: nn.Module | None = None) -> nn.Module:
        """Args: transformer: the one that it steers, some of its layers are shared with Z-Image's ControlNet."""
        torch.manual_seed(0)
        kind = getattr(diffusers, self.kind)
        control = self.make().double().eval()
        for parameter in control.parameters():
            if not parameter.abs().sum():  # its last layers are zero at first
                nn.init.normal_(parameter, std=0.2)
        if self.kind == "ZImageControlNetModel":
            kind.from_transformer(control, transformer or self.steers.build())
            control.gradient_checkpointing = False  # diffusers 0.42.1 forgets to set it
        if self.kind == "CosmosControlNetModel":
            _without_torchvision()
        return control

    def arguments(self) -> dict[str, Any]:
        given = {name: x for name, x in self.steers.arguments().items() if name not in self.fed}
        known = _known(getattr(diffusers, self.kind).forward, given)
        values = {**self.steers.config, **self.config, **self.steers.sizes, "batch": 2}
        return {**known, **drawn(ExampleInputs(self.inputs), values, torch.Generator().manual_seed(2))}


def _known(function: Any, values: dict[str, Any]) -> dict[str, Any]:
    names = inspect.signature(function).parameters
    return {name: x for name, x in values.items() if name in names}


def _without_torchvision() -> None:
    """Stands for the one function that Cosmos' ControlNet has from torchvision; the mask is of that size already."""
    from diffusers.models.controlnets import controlnet_cosmos

    resize = SimpleNamespace(resize=lambda x, size, interpolation: x)
    controlnet_cosmos.transforms = SimpleNamespace(functional=resize, InterpolationMode=SimpleNamespace(NEAREST=None))


_FLUX = Control(
    "FluxControlNetModel",
    {"num_layers": 2, "num_single_layers": 1},
    inputs={"controlnet_cond": "float batch 15 in_channels", "conditioning_scale": 0.7},
    steers=flux.TINY["flux"],
    fed=("controlnet_block_samples", "controlnet_single_block_samples"),
)
_PICTURE = {"controlnet_cond": "float batch in_channels height width", "conditioning_scale": 0.7}
_SD3 = Control(
    "SD3ControlNetModel",
    {"num_layers": 2, "dual_attention_layers": ()},
    inputs=_PICTURE,
    steers=pictures.TINY["sd3"],
    fed=("block_controlnet_hidden_states",),
)
_Z_IMAGE = Control(
    "ZImageControlNetModel",
    {
        "control_in_dim": 16,
        "control_layers_places": [0, 1],
        "control_refiner_layers_places": [0],
        "add_control_noise_refiner": "control_noise_refiner",
    },
    inputs={"control_context": pictures.TINY["z_image"].inputs["x"], "conditioning_scale": 0.7},
    steers=pictures.TINY["z_image"],
)

TINY: dict[str, Tiny] = {
    "control_flux": _FLUX,
    "control_flux_mode": _FLUX.but(
        inputs={"controlnet_mode": torch.tensor([[2], [1]])}, num_layers=2, num_single_layers=0, num_mode=4
    ),
    "control_flux_single": _FLUX.but(num_layers=0, num_single_layers=2),
    "control_sd3": _SD3,
    "control_sd3_dual": _SD3.but(dual_attention_layers=(0,)),
    "control_sd3_without_text": replace(
        _SD3,
        config={"num_layers": 2, "joint_attention_dim": None, "use_pos_embed": False},
        inputs={**_PICTURE, "hidden_states": "float batch 15 32", "encoder_hidden_states": None},
    ),
    "control_qwen_image": Control(
        "QwenImageControlNetModel",
        {"num_layers": 1, "extra_condition_channels": 1},
        inputs={"controlnet_cond": "float batch 15 17", "conditioning_scale": 0.7},
        steers=pictures.TINY["qwen_image"],
    ),
    "control_hunyuan_dit": Control(
        "HunyuanDiT2DControlNetModel",
        {"transformer_num_layers": 6},
        inputs=_PICTURE,
        steers=pictures.TINY["hunyuan_dit"].but(num_layers=6),
    ),
    "control_sana": Control(
        "SanaControlNetModel", {"num_layers": 2}, inputs=_PICTURE, steers=pictures.TINY["sana"].but(num_layers=3)
    ),
    "control_z_image": _Z_IMAGE,
    "control_z_image_unrefined": replace(
        _Z_IMAGE, config={"control_in_dim": 16, "control_layers_places": [0], "n_refiner_layers": 1}
    ),
    "control_cosmos": Control(
        "CosmosControlNetModel",
        {"n_controlnet_blocks": 2, "in_channels": 6, "latent_channels": 6, "model_channels": 48},
        inputs={
            "controls_latents": "float batch 4 frames height width",
            "latents": "float batch 4 frames height width",
            "condition_mask": "time batch 1 frames height width",
            "padding_mask": "time 1 1 height width",
            "conditioning_scale": [0.5, 2.0],
        },
        steers=videos.TINY["cosmos_transfer"],
        fed=("block_controlnet_hidden_states",),
    ),
}
