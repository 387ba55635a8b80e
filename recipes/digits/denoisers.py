"""Class-conditioned denoisers around diffusers transformers.

One module holds all trained weights, so that one wrapped module runs the forward. Inputs and outputs are clips:
`forward(noisy [b, c, f, h, w], times [b] in [0, 1], labels [b]) -> velocity [b, c, f, h, w]`, whole on every rank.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from typing_extensions import override

from lightning_cp.files import writing_new
from lightning_cp.training.ema import full_tensor

PatchSize = tuple[int, int, int]
CONDITIONING_FILE = "conditioning.safetensors"


class ClassTokens(nn.Module):
    """Learned text tokens per class: labels [b] -> [b, tokens, dim]. The last class is "no condition".

    At least two tokens: softmax over one token is constant, so its projections would train on rounding noise.
    """

    def __init__(self, num_classes: int, num_tokens: int, dim: int) -> None:
        super().__init__()
        if num_tokens < 2:
            raise ValueError(f"num_tokens={num_tokens} must be at least 2")
        self.num_tokens, self.dim = num_tokens, dim
        self.table = nn.Embedding(num_classes + 1, num_tokens * dim)

    @override
    def forward(self, labels: Tensor) -> Tensor:
        tokens: Tensor = self.table(labels)
        return tokens.view(-1, self.num_tokens, self.dim)


class WanDenoiser(nn.Module):
    """A Wan transformer (diffusers' WanTransformer3DModel) with learned class tokens as text tokens.

    Args:
        transformer: `in_channels` = `out_channels` = channels of the data; its `patch_size` divides the clip.
        num_classes: number of classes, without the "no condition" class.
        num_tokens: text tokens per class.
    """

    def __init__(self, transformer: nn.Module, *, num_classes: int, num_tokens: int = 4) -> None:
        super().__init__()
        config: Any = transformer.config
        self.transformer = transformer
        self.num_classes = num_classes
        self.class_tokens = ClassTokens(num_classes, num_tokens, config.text_dim)

    @override
    def forward(self, noisy: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        velocity: Tensor = self.transformer(
            hidden_states=noisy,
            timestep=times * 1000,
            encoder_hidden_states=self.class_tokens(labels),
            return_dict=False,
        )[0]
        return velocity


class FluxDenoiser(nn.Module):
    """A Flux transformer (diffusers' FluxTransformer2DModel) on patches of a clip; frames are its first position axis.

    Args:
        transformer: `in_channels` = channels of the data × pixels per patch.
        num_classes: number of classes, without the "no condition" class.
        patch_size: (frames, height, width) of a patch.
        num_tokens: text tokens per class.
    """

    def __init__(
        self, transformer: nn.Module, *, num_classes: int, patch_size: PatchSize = (1, 2, 2), num_tokens: int = 4
    ) -> None:
        super().__init__()
        config: Any = transformer.config
        self.transformer = transformer
        self.num_classes = num_classes
        self.patch_size = tuple(patch_size)
        self.class_tokens = ClassTokens(num_classes, num_tokens, config.joint_attention_dim)
        self.class_pooled = nn.Embedding(num_classes + 1, config.pooled_projection_dim)

    @override
    def forward(self, noisy: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        b, c, *size = noisy.shape
        pf, ph, pw = self.patch_size
        f, h, w = size[0] // pf, size[1] // ph, size[2] // pw
        patches = noisy.view(b, c, f, pf, h, ph, w, pw).permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(b, f * h * w, -1)
        axes = [torch.arange(n, device=noisy.device, dtype=torch.float32) for n in (f, h, w)]
        velocity: Tensor = self.transformer(
            hidden_states=patches,
            encoder_hidden_states=self.class_tokens(labels),
            pooled_projections=self.class_pooled(labels),
            timestep=times,
            img_ids=torch.cartesian_prod(*axes),
            txt_ids=torch.zeros(self.class_tokens.num_tokens, 3, device=noisy.device),
            return_dict=False,
        )[0]
        return velocity.view(b, f, h, w, c, pf, ph, pw).permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(noisy.shape)


def save_conditioning(denoiser: nn.Module, folder: Path, *, writes: bool) -> None:
    """Save the weights of a denoiser that are not the transformer's: the embeddings of the classes.

    Args: writes: True on the rank that writes the file. Ranks: all that hold a shard of the denoiser.
    """
    parameters = dict(denoiser.named_parameters())
    state = {
        name: full_tensor(x.detach()).cpu().contiguous()
        for name, x in parameters.items()
        if not name.startswith("transformer.")
    }
    if writes:
        with writing_new(folder / CONDITIONING_FILE) as path:
            save_file(state, path)
