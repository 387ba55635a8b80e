import pytest
import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel

from lightning_cp.recipes.digits.denoisers import ClassTokens, FluxDenoiser, WanDenoiser


def wan(patch: tuple[int, int, int]) -> WanDenoiser:
    transformer = WanTransformer3DModel(
        patch_size=patch, num_attention_heads=2, attention_head_dim=12, in_channels=1, out_channels=1, text_dim=8,
        freq_dim=8, ffn_dim=16, num_layers=1, rope_max_seq_len=16,
    )  # fmt: skip
    return WanDenoiser(transformer, num_classes=3)


def flux(patch: tuple[int, int, int]) -> FluxDenoiser:
    transformer = FluxTransformer2DModel(
        in_channels=patch[0] * patch[1] * patch[2], num_layers=1, num_single_layers=1, attention_head_dim=12,
        num_attention_heads=2, joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(4, 4, 4),
    )  # fmt: skip
    return FluxDenoiser(transformer, num_classes=3, patch_size=patch)


@pytest.mark.parametrize("make", [wan, flux])
@pytest.mark.parametrize("patch", [(1, 1, 1), (1, 2, 2)])
def test_a_denoiser_keeps_the_shape_and_trains_all_of_its_parameters(make, patch) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model = make(patch)
    noisy, times, labels = torch.randn(4, 1, 2, 4, 6), torch.rand(4), torch.tensor([0, 1, 2, 3])
    velocity = model(noisy, times, labels)
    assert velocity.shape == noisy.shape
    (velocity - noisy).square().mean().backward()
    largest = {name: p.grad.abs().max().item() for name, p in model.named_parameters() if p.grad is not None}
    assert largest.keys() == {name for name, _ in model.named_parameters()}
    assert min(largest.values()) > 1e-10, min(largest, key=largest.__getitem__)


@pytest.mark.parametrize("make", [wan, flux])
def test_label_and_time_matter(make) -> None:  # type: ignore[no-untyped-def]
    model = make((1, 2, 2))
    noisy = torch.randn(1, 1, 1, 4, 4)

    def at(time: float, label: int) -> torch.Tensor:
        return model(noisy, torch.tensor([time]), torch.tensor([label]))

    assert not torch.allclose(at(0.5, 0), at(0.5, 3))
    assert not torch.allclose(at(0.5, 0), at(0.1, 0))


def test_flux_patches_keep_their_places() -> None:
    model = flux((1, 2, 2))

    class Identity(torch.nn.Module):
        def forward(self, *, hidden_states: torch.Tensor, img_ids: torch.Tensor, **rest: object) -> list[torch.Tensor]:
            self.ids = img_ids
            return [hidden_states]

    seen = Identity()
    model.transformer = seen
    clip = torch.randn(2, 1, 3, 4, 6)
    assert torch.equal(model(clip, torch.rand(2), torch.tensor([0, 1])), clip)
    assert seen.ids.tolist()[7] == [1.0, 0.0, 1.0]  # frame 1, row 0, column 1 of 3 × 2 × 3 tokens


def test_one_class_token_is_refused() -> None:
    with pytest.raises(ValueError, match="num_tokens=1"):
        ClassTokens(3, 1, 8)
