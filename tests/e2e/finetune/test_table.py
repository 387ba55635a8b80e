"""Each family with the recipe: losses and files of one process, also after a resume; plain diffusers' pictures."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from numpy.typing import NDArray
from PIL import Image, ImageSequence
from safetensors.torch import load_file

from lightning_cp.finetune.adapters.lora_file import load_loras
from lightning_cp.latent_cache import LatentCache
from tests.e2e.finetune.test_finetune import LORA_FILE, tune
from tests.e2e.finetuning import frames_of, run_recipe, write_cache, write_media, write_pipeline
from tests.families.cases import CASES
from tests.families.cases import made as tiny_pipeline
from tests.unit.finetune.media.encode import noise, write_clip, write_video

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
# With a higher rate, Adam's first step magnifies the rounding of small gradients of Sana's loud weights.
CALL = ("+call.height=16", "+call.width=24", "+call._auto_resize=false", "+call.max_area=384")  # of Kontext
SMALL = ("batch_size=2", "ema_decay=0.5", "optim.lr=0.001", "sampling.num_inference_steps=2", "sampling.every=4")


def with_sound(folder: Path, case: str, count: int) -> Path:
    """Write clips with sound; the first one has none."""
    folder.mkdir()
    for i in range(count):
        if i:
            write_clip(folder / f"{i}.mkv", noise(2, 16_000), frames=max(24, CASES[case].size[0]))
        else:
            write_video(folder / f"{i}.mp4", frames_of(i, CASES[case].size))
        (folder / f"{i}.txt").write_text(f"wave number {i}\n")
    return folder


@dataclass(frozen=True)
class Row:
    """One family or variant.

    Args:
        case: pipeline and sizes, a key of `CASES`.
        experiment: end of the experiment's name; "": the case.
        trained: "lora", or the component of which weights are trained.
        options: further settings.
        call: arguments of the pipeline's call.
        picture: the call takes the reference or the first frame of a sample: name of this argument.
        first: strategy of the run that is compared and resumed.
        second: strategy of the resumed run.
        is_drawn: the run draws a picture, which plain diffusers draws, too.
        write, fps: see `write_cache`.
    """

    case: str
    experiment: str = ""
    trained: str = "lora"
    options: tuple[str, ...] = ("lora.rank=4", "lora.alpha=32")
    call: Mapping[str, Any] = field(default_factory=dict)
    picture: str = ""
    first: str = "cp ring=3"
    second: str = "cp_fsdp ring=2"
    is_drawn: bool = True
    write: Callable[[Path, str, int], Path] = write_media
    fps: float | None = None


_BINNED = {"use_resolution_binning": False}  # the tiny transformers have no table of sizes
_DORA = ("lora.rank=4", "lora.dora=true", "lora.ranks={to_q:2}", "lora.targets=all-linear")
_SOUND: dict[str, Any] = {"write": with_sound, "fps": 24.0}
_GUIDED = {"spatio_temporal_guidance_blocks": [1], "max_sequence_length": 64}
ROWS = [
    Row("flux", first="cp ring=2 data_parallel=2", second="cp ulysses=3"),
    Row("flux2", second="cp ulysses=2 trainer=lightning"),
    Row("wan", options=("lora=null",), trained="transformer"),
    Row("wan", options=_DORA, second="cp ring=2"),
    Row(
        "wan", options=("lora.rank=4", "lora.lokr=4", "lora.ranks={to_q:2}"), first="cp_fsdp ring=2", second="cp ring=3"
    ),
    Row("cogvideox"),
    Row("sana_euler", "sana", call=_BINNED),
    Row("sana_video", call={**_BINNED, "frames": 9}),
    Row("pixart_sigma", trained="transformer", options=(), call={**_BINNED, "clean_caption": False}),
    Row("hunyuan_video"),
    Row("hunyuan_video15_image_to_video", "hunyuan_video15", picture="image"),
    Row("ltx2", call=_GUIDED, **_SOUND),
    Row("minimax_h3", is_drawn=False, **_SOUND),
    Row("flux_kontext", "kontext", call={"_auto_resize": False, "max_area": 384}, picture="image"),
    Row("qwen_image_edit_plus", "qwen_image_edit", is_drawn=False, picture="image"),
    Row("flux2_reference", "flux2", picture="image"),
    Row(
        "flux_controlnet_guidance",
        "flux_controlnet",
        "controlnet",
        (),
        picture="control_image",
        second="cp_fsdp ring=2 activation_checkpointing=full micro_batch_size=1",
    ),
    Row("qwen_image_controlnet", "", "controlnet", (), picture="control_image"),
    Row("wan_vace", "", "transformer", (), {"max_sequence_length": 24}),
    Row("wan_vace_two_experts", "wan_vace", "transformer_2", (), is_drawn=False),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join((row.case, *row.options)))
def test_a_family_trains_resumes_and_is_drawn(row: Row, tmp_path: Path) -> None:
    made = write_cache(tmp_path / "made", row.case, 3, write=row.write, fps=row.fps)
    image = _picture_of(made, row)
    component = () if row.trained == "lora" else (f"model.component={row.trained}",)
    given = (
        *SMALL,
        *row.options,
        *component,
        *(_drawing(made, row, image) if row.is_drawn else ("sampling.every=null",)),
    )

    def run(name: str, steps: int, *options: str) -> Any:
        experiment = f"finetune_{row.experiment or row.case}"
        return tune(made, name, *given, f"max_steps={steps}", *options, experiment=experiment)

    alone = run("alone", 4)
    assert len(set(alone.losses)) == 4
    first = run("first", 2, *f"strategy={row.first}".split())
    assert first.losses == pytest.approx(alone.losses[:2], rel=1e-4)
    resumed = run("resumed", 4, *f"strategy={row.second}".split(), f"resume={first.folder}")
    assert resumed.losses[2:] == pytest.approx(alone.losses[2:], rel=1e-4)
    expected, found = (_weights(run.folder, row) for run in (alone, resumed))
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-3, atol=1e-4)
    _check_trained(made, row, expected)
    if row.write is with_sound:
        cache = LatentCache(made / "latents")
        assert [float(cache.sample(i)["sound_loss_mask"]) for i in range(3)] == [0.0, 1.0, 1.0]
        if not row.is_drawn:  # its shortest clips are long: see the test of the modular pipeline
            return
    pipe = _pipeline(made, row)
    before = _drawn(pipe, row, image)
    if row.trained == "lora":
        load_loras(pipe, [alone.folder / LORA_FILE], [1])
    else:
        trained = type(getattr(pipe, row.trained)).from_pretrained(alone.folder / row.trained)
        pipe.register_modules(**{row.trained: trained})
    after = _drawn(pipe, row, image)
    assert np.abs(after - before).max() > 0
    if row.is_drawn:
        (file,) = (alone.folder / "samples/final").iterdir()
        assert np.abs(_frames(file) - after * 255).mean() < (0.6 if file.suffix == ".png" else 10)  # GIFs: 256 colours


def _picture_of(made: Path, row: Row) -> Image.Image | None:
    """Write the picture of the call to `condition.png`."""
    if not row.picture:
        return None
    reference = made / "media/0.reference.png"
    image = Image.open(reference) if reference.exists() else Image.fromarray(frames_of(1, CASES[row.case].size)[0])
    image.save(made / "condition.png")
    return image.convert("RGB")


def _drawing(made: Path, row: Row, image: Image.Image | None) -> tuple[str, ...]:
    condition = "" if image is None else f", image: {made / 'condition.png'}"
    return (
        f"sampling.prompts=[{{prompt: wave number 1{condition}}}]",
        *(f"+sampling.call.{name}={value}" for name, value in row.call.items()),
    )


def _weights(folder: Path, row: Row) -> dict[str, torch.Tensor]:
    (file,) = [folder / LORA_FILE] if row.trained == "lora" else (folder / row.trained).glob("*.safetensors")
    return load_file(file)


def _check_trained(made: Path, row: Row, trained: dict[str, torch.Tensor]) -> None:
    """Frozen weights are those of the base, others are not."""
    if row.trained == "lora":
        assert all(x.dtype == torch.float32 and x.isfinite().all() for x in trained.values())
        return
    base = _weights(made / "pipe", row)
    prefix = "vace_" if "vace" in row.case else ""
    changed = {name for name, x in trained.items() if not torch.equal(x, base[name])}
    assert changed
    assert all(name.startswith(prefix) for name in changed)


def _pipeline(made: Path, row: Row) -> Any:
    if row.case.startswith("qwen_image_edit"):  # the folder's processor needs torchvision: the test's does not
        return copy.deepcopy(tiny_pipeline(row.case))
    pipe = DiffusionPipeline.from_pretrained(made / "pipe")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _drawn(pipe: Any, row: Row, image: Image.Image | None) -> NDArray[np.float64]:
    """Draw with plain diffusers. Returns: [frames, h, w, 3] in [0, 1]."""
    taken = inspect.signature(type(pipe).__call__).parameters
    size = dict(zip(("num_frames", "height", "width"), CASES[row.case].size, strict=True))
    call = {name: value for name, value in size.items() if name in taken and (name, value) != ("num_frames", 1)}
    call |= {row.picture: image} if row.picture else {}
    seed = torch.Generator().manual_seed(0)
    shown = pipe(
        **{"prompt": "wave number 1", **call, **row.call},
        generator=seed,
        num_inference_steps=2,
        output_type="np",
        return_dict=False,
    )[0][0]
    frames: NDArray[np.float64] = shown.reshape(-1, *shown.shape[-3:])
    return frames


def _frames(path: Path) -> NDArray[np.float64]:
    """Read a picture or a clip. Equal frames of a GIF in a row are stored once, and shown for longer."""
    found, shown = [], []
    with Image.open(path) as image:
        for frame in ImageSequence.Iterator(image):
            found.append(np.asarray(frame.convert("RGB")))
            shown.append(frame.info.get("duration", 1))
    return np.repeat(np.stack(found), [time // min(shown) for time in shown], axis=0).astype(float)


def test_an_edit_is_sampled_with_and_without_the_lora(tmp_path: Path) -> None:
    made = write_cache(tmp_path, "flux_kontext", count=3)
    tuned = tune(
        made, "tuned", *SMALL, "lora.rank=4", "max_steps=2", "sampling.every=null", experiment="finetune_kontext"
    )

    def edited(name: str, *overrides: str, source: int = 0) -> NDArray[np.float64]:
        where = (f"hydra.run.dir={made / name}", f"output_root={made}", f"source={made / 'pipe'}")
        image = f"image={made / f'media/{source}.reference.png'}"
        run_recipe("sample", made, *where, image, "prompts=[a wave]", "num_inference_steps=2", *CALL, *overrides)
        return _frames(made / name / "samples/0000.png")

    lora = f"lora={tuned.folder / LORA_FILE}"
    before, after, other = edited("before"), edited("after", lora), edited("other", lora, source=1)
    assert before.shape == (1, 16, 24, 3)
    assert np.abs(before - after).max() > 0
    assert np.abs(other - after).max() > 0
    assert np.abs(edited("parallel", lora, "strategy=cp", "ring=2") - after).max() <= 1


def test_a_modular_pipeline_is_encoded_trained_and_sampled(tmp_path: Path) -> None:
    """A folder without a model_index.json, from media to a clip with sound."""
    pipe, media = write_pipeline(tmp_path / "pipe", "minimax_h3"), with_sound(tmp_path / "media", "minimax_h3", 2)
    assert not (pipe / "model_index.json").exists()
    sizes = ("precompute.frames=22", "precompute.sizes=[[16,32]]", "precompute.fps=24", "precompute.max_upscale=2")
    where = (f"model.pretrained={pipe}", f"data.path={media}", f"output={tmp_path / 'latents'}")
    run_recipe("precompute", tmp_path, *where, *sizes)
    assert [row.frames for row in LatentCache(tmp_path / "latents").rows] == [22, 22]
    drawing = ("sampling.prompts=[a red fox]", "+sampling.call.num_frames=124")  # the shortest clip that it takes
    given = (*SMALL, "lora.rank=4", "max_steps=4", *drawing, "sampling.num_inference_steps=3", "strategy=cp", "ring=2")
    tuned = tune(tmp_path, "drawn", *given, experiment="finetune_minimax_h3")
    (clip,) = (tuned.folder / "samples/final").iterdir()
    assert _frames(clip).shape == (124, 16, 32, 3)
    call = ("+call.num_frames=124", "+call.height=16", "+call.width=32", "num_inference_steps=3")
    where = (f"source={pipe}", f"lora={tuned.folder / 'lora'}", f"hydra.run.dir={tmp_path / 'sampled'}")
    run_recipe("sample", tmp_path, *where, "prompts=[a red fox]", *call)
    (drawn,) = (tmp_path / "sampled/samples").iterdir()
    assert drawn.suffix == ".mp4"
