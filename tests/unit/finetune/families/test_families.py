"""Families: the registry, batches of stored samples, grids, and what Lightning does to a batch."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import HalfPrecision
from lightning.fabric.utilities import move_data_to_device

from lightning_cp.errors import FamilyError
from lightning_cp.finetune.families import (
    Facts,
    Grid,
    ResolutionShift,
    StoredBatch,
    TextStorage,
    collate,
    family_for,
    load_family,
    register_family,
    registry,
)
from lightning_cp.finetune.families.latents import pack, positions, unpack
from lightning_cp.recipes.digits.family import LabelledClips

FLUX: Facts = {
    "pixels": 16,
    "shift_factor": 0.1,
    "scaling_factor": 0.3,
    "guidance_embeds": True,
    "text_length": 512,
    "shift": {"base_tokens": 256, "max_tokens": 4096, "base_shift": 0.5, "max_shift": 1.15, "exponential": True},
}


def text(length: int, value: float) -> dict[str, torch.Tensor]:
    return {"prompt_embeds": torch.full((length, 2), value), "latents": torch.zeros(1)}


def test_text_with_a_mask_is_padded_to_the_longest() -> None:
    storage = TextStorage("masked", 512)
    joined = collate([text(2, 1.0), text(3, 2.0)], storage, {"prompt_embeds": torch.ones(1, 2)})
    assert joined["prompt_embeds"].shape == (2, 3, 2)
    assert joined["prompt_mask"].tolist() == [[True, True, False], [True, True, True]]
    dropped = joined.without_text(torch.tensor([False, True]), storage)
    assert dropped["prompt_mask"].tolist() == [[True, True, False], [True, False, False]]
    assert dropped["prompt_embeds"][1].tolist() == [[1, 1], [0, 0], [0, 0]]


def test_text_with_zeros_is_padded_to_the_full_length() -> None:
    joined = collate([text(2, 1.0), text(3, 2.0)], TextStorage("zeros", 5))
    assert joined["prompt_embeds"].shape == (2, 5, 2)
    assert joined["prompt_embeds"][0, 2:].abs().sum() == 0
    assert "prompt_mask" not in joined


def test_samples_of_other_shapes_are_refused_by_name() -> None:
    with pytest.raises(FamilyError, match="latents: samples of a batch must have equal shapes"):
        collate([text(2, 1.0), {**text(2, 1.0), "latents": torch.zeros(2)}], TextStorage("padded", 2))
    with pytest.raises(FamilyError, match="has no 'mask', only latents, prompt_embeds"):
        collate([text(2, 1.0)], TextStorage("padded", 2))["mask"]


def test_text_without_padding_has_no_mask() -> None:
    storage = TextStorage("masked", 512)
    assert "prompt_mask" not in collate([text(3, 1.0), text(3, 2.0)], storage)
    assert collate([text(3, 1.0)], storage, {"prompt_embeds": torch.ones(1, 2)})["prompt_mask"].all()


def test_text_is_padded_to_a_few_lengths() -> None:
    def length(*texts: int) -> int:
        return collate([text(n, 1.0) for n in texts], TextStorage("masked", 512), lengths=(4, 8))["prompt_mask"].shape[
            1
        ]

    assert [length(2, 3), length(4, 1), length(5, 2), length(9, 3)] == [4, 4, 8, 9]


def test_each_sequence_is_padded_by_its_own_length() -> None:
    sample = {"a": torch.ones(2, 3), "b": torch.ones(4, 3)}
    joined = collate([sample], TextStorage("zeros", 5, sequences=("a", "b")))
    assert joined["a"].sum(dim=2)[0].tolist() == [3, 3, 0, 0, 0]
    assert joined["b"].sum(dim=2)[0].tolist() == [3, 3, 3, 3, 0]


@pytest.mark.parametrize(
    ("samples", "storage", "message"),
    [
        ([], TextStorage("padded", 2), "at least one sample"),
        ([text(2, 1.0), {**text(2, 1.0), "extra": torch.ones(1)}], TextStorage("padded", 2), "0 and 1 differ in extra"),
        ([{"latents": torch.ones(1)}], TextStorage("padded", 2), "the stored sample has no prompt_embeds"),
        ([text(6, 1.0)], TextStorage("zeros", 5), "prompt_embeds has 6 positions, more than the 5"),
        (
            [{"a": torch.ones(2, 1), "b": torch.ones(3, 1)}],
            TextStorage("masked", 5, sequences=("a", "b")),
            "sequences with one mask must have equal lengths",
        ),
    ],
)
def test_samples_that_do_not_fit_are_refused(samples: Any, storage: TextStorage, message: str) -> None:
    with pytest.raises(FamilyError, match=message):
        collate(samples, storage)


def test_the_text_of_the_empty_caption_must_be_complete() -> None:
    with pytest.raises(FamilyError, match="the stored empty caption has no prompt_embeds"):
        collate([text(2, 1.0)], TextStorage("padded", 2), {})


def test_stored_tensors_keep_no_graph() -> None:
    class Encoding(LabelledClips):
        name = "encoding"

        def encode_text(self, pipe: Any, captions: Any, media: Any = None) -> list[dict[str, torch.Tensor]]:
            return [{"labels": 2 * pipe} for _ in captions]

    (sample,) = Encoding({}).encode_text(torch.ones(1, requires_grad=True), ["a"])
    assert not sample["labels"].requires_grad


def test_a_reference_picture_must_fit_the_grid() -> None:
    family = load_family("flux_kontext", FLUX)
    pixels = torch.zeros(1, 3, 1, 16, 32)
    with pytest.raises(FamilyError, match="height=24 must be a multiple of 16"):
        family.encode_media(None, {"pixels": pixels, "reference": torch.zeros(1, 3, 1, 24, 16)})
    with pytest.raises(FamilyError, match='needs a "reference" picture'):
        family.encode_media(None, {"pixels": pixels})


@pytest.mark.parametrize("size", [(48, 64), (64, 1040), (1040, 1024)])
def test_a_reference_that_flux2_would_resize_is_refused(size: tuple[int, int]) -> None:
    family = load_family("flux2", {**FLUX, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4})
    assert family.reference_size(height=512, width=768) == (512, 768)
    assert family.reference_size(height=2048, width=1024) == (1440, 720)
    vae = SimpleNamespace(device="cpu", dtype=torch.float32, encode=lambda x: SimpleNamespace(latent_dist=_Still(x)))
    media = {"pixels": torch.zeros(1, 3, 1, 16, 16), "reference": torch.zeros(1, 3, 1, *size)}
    with pytest.raises(FamilyError, match=f"the reference has height={size[0]}, width={size[1]}: both must be at le"):
        family.encode_media(SimpleNamespace(vae=vae), media)


class _Still:
    """A distribution of latents that are the pixels."""

    def __init__(self, pixels: torch.Tensor) -> None:
        self.mode, self.std = lambda: pixels, torch.ones_like(pixels)


def test_a_distilled_krea2_has_one_shift_at_every_size() -> None:
    facts: Facts = {**FLUX, "latents_mean": [0.0], "latents_std": [1.0]}
    shifts = {
        distilled: load_family("krea2", {**facts, "is_distilled": distilled}).shift_for((1, 1, 128, 128))
        for distilled in (True, False)
    }
    assert isinstance(shifts[True], ResolutionShift)
    assert [shifts[True].factor(n) for n in (256, 9000)] == [pytest.approx(math.exp(1.15))] * 2
    assert shifts[False] == ResolutionShift(**FLUX["shift"])
    assert load_family("krea2", {**facts, "shift": 3.0, "is_distilled": True}).objective.shift == 3.0
    pipe = SimpleNamespace(config=SimpleNamespace(patch_size=4))
    with pytest.raises(FamilyError, match="patch_size=4 of the pipeline must be 2"):
        type(load_family("krea2", facts)).read_facts(pipe)


@pytest.mark.parametrize(("conditions", "side"), [(True, 64), (None, 128)])
def test_a_transformer_of_pixart_alpha_is_refused(conditions: bool | None, side: int) -> None:
    config = SimpleNamespace(use_additional_conditions=conditions, sample_size=side)
    pipe = SimpleNamespace(transformer=SimpleNamespace(config=config))
    with pytest.raises(FamilyError, match=f"sample_size={side}: it is a transformer of PixArt-Alpha"):
        type(load_family("pixart_sigma", {})).read_facts(pipe)


def test_a_distilled_hunyuan_video_is_refused() -> None:
    pipe = SimpleNamespace(transformer=SimpleNamespace(config=SimpleNamespace(use_meanflow=True)))
    with pytest.raises(FamilyError, match="the transformer has use_meanflow=True: it is distilled"):
        type(load_family("hunyuan_video15", {})).read_facts(pipe)


def test_the_empty_caption_of_sana_has_no_instruction() -> None:
    given = []

    class Pipe:
        def encode_prompt(self, captions: list[str], **settings: Any) -> Any:
            given.append((captions, settings.get("complex_human_instruction")))
            return torch.ones(len(captions), 2, 1) * len(given), torch.ones(len(captions), 2), None, None

    family = load_family("sana", {"text_length": 2, "instruction": ["Describe: "]})
    texts = family.encode_text(Pipe(), ["a cat", ""])
    assert [float(text["prompt_embeds"].mean()) for text in texts] == [1, 2]
    assert given == [(["a cat", ""], ["Describe: "]), ([""], None)]


def test_a_clip_whose_frames_are_all_given_is_refused() -> None:
    facts = {"expand_timesteps": True, "patch": [1, 2, 2], "spatial": 8, "temporal": 4}
    family = load_family("wan_image_to_video", facts)
    assert family.given_mask({}, torch.zeros(1, 1, 2, 4, 4)).flatten().tolist() == [True, False]  # type: ignore[union-attr]
    with pytest.raises(FamilyError, match="more than one latent frame"):
        family.given_mask({}, torch.zeros(1, 1, 1, 4, 4))
    with pytest.raises(FamilyError, match="more than one latent frame"):
        family.encode_media(None, {"pixels": torch.zeros(1, 3, 1, 32, 32)})


def test_shifts_that_cannot_be_are_refused() -> None:
    with pytest.raises(FamilyError, match="base_tokens=256 must be below max_tokens=256"):
        ResolutionShift(max_tokens=256)
    with pytest.raises(FamilyError, match=r"the linear timestep shift of 16 tokens is -0\.1"):
        ResolutionShift(base_shift=0.0, max_shift=2.0, exponential=False).factor(16)


def test_lightning_moves_a_batch_and_does_not_round_it() -> None:
    stored = StoredBatch({"latents": torch.tensor([123.456])}, {"prompt_embeds": torch.tensor([[0.1]])})
    assert HalfPrecision("bf16-true").convert_input(stored)["latents"].dtype == torch.float32
    moved = move_data_to_device(stored, torch.device("meta"))
    assert isinstance(moved, StoredBatch)
    assert moved["latents"].is_meta
    assert moved.empty is not None
    assert moved.empty["prompt_embeds"].is_meta


def test_packing_is_inverted_and_ordered_by_row_and_column() -> None:
    x = torch.arange(2 * 3 * 4 * 6.0).view(2, 3, 4, 6)
    assert torch.equal(unpack(pack(x), 4, 6), x)
    assert pack(x)[0, 1].tolist() == x[0, :, :2, 2:4].flatten().tolist()
    assert positions(2, 3, device=torch.device("cpu"))[4].tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"height": 24, "width": 32}, "height=24 must be a multiple of 16"),
        ({"height": 32, "width": 0}, "width=0 must be a multiple of 16"),
        ({"height": 32, "width": 32, "frames": 8}, "frames=8 must be 4·n [+] 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(FamilyError, match=message):
        Grid(pixels=16, frame_step=4, patch=(1, 2, 2)).check(**sizes)
    with pytest.raises(FamilyError, match="frames=5 must be 1"):
        Grid(pixels=16, frame_step=0, patch=(1, 2, 2)).check(height=16, width=16, frames=5)


def test_tokens_are_counted_after_patching() -> None:
    assert Grid(pixels=16, frame_step=0, patch=(1, 2, 2)).tokens((16, 8, 6)) == 12
    assert Grid(pixels=16, frame_step=4, patch=(1, 2, 2)).tokens((16, 5, 8, 6)) == 60
    assert Grid(pixels=16, frame_step=4, patch=(2, 2, 2), frames_first=True).tokens((5, 16, 8, 6)) == 36


def test_a_family_is_rebuilt_from_plain_facts() -> None:
    family = load_family("flux", json.loads(json.dumps(FLUX)))
    assert family.objective.guidance == 1.0
    stored = StoredBatch({"latents": torch.ones(1, 4, 2, 2), "latents_std": torch.ones(1, 4, 2, 2)})
    assert family.clean(stored).flatten()[0].item() == pytest.approx(0.27)
    assert family.clean(stored, torch.full((1, 4, 2, 2), 2.0)).flatten()[0].item() == pytest.approx(0.87)


def test_unknown_pipelines_and_names_are_refused_by_name() -> None:
    with pytest.raises(FamilyError, match=r"no family is registered for SimpleNamespace, only for .*FluxPipeline"):
        family_for(SimpleNamespace())
    with pytest.raises(FamilyError, match=r"there is no family 'flxu', only .*flux"):
        load_family("flxu", {})


def test_a_family_from_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})

    class MyPipeline:
        pass

    @register_family
    class Mine(LabelledClips):
        name, pipelines = "mine", ("MyPipeline",)

        @classmethod
        def read_facts(cls, pipe: Any) -> Facts:
            return {"num_classes": 3}

    assert isinstance(family_for(MyPipeline()), Mine)
    assert isinstance(load_family("mine", {"num_classes": 3}), Mine)


def test_a_family_without_pipelines_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    register_family(LabelledClips)
    assert isinstance(load_family("labelled_clips", {"num_classes": 3}), LabelledClips)
