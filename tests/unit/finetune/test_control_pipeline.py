"""A new ControlNet is that of diffusers' `from_transformer`, in a pipeline folder that diffusers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from lightning_cp.finetune import new_controlnet
from tests.families.cases import made

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {"flux": {"num_layers": 1, "num_single_layers": 2}, "qwen_image": {"num_layers": 1}}


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flux")
    made("flux").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("case", "kind"), [("flux", "FluxControlNetModel"), ("qwen_image", "QwenImageControlNetModel")]
)
@pytest.mark.default(1)
def test_it_has_the_weights_of_the_first_blocks(case: str, kind: str, tmp_path: Path) -> None:
    pipe = made(case)
    pipe.save_pretrained(tmp_path / "base", max_shard_size="50KB")  # several files
    folder = new_controlnet(tmp_path / "base", tmp_path / "new", **SIZES[case])
    loaded: Any = diffusers.DiffusionPipeline.from_pretrained(folder)
    assert type(loaded).__name__ == kind.replace("Model", "Pipeline")
    config = pipe.transformer.config
    expected = getattr(diffusers, kind).from_transformer(
        pipe.transformer,
        attention_head_dim=config.attention_head_dim,
        num_attention_heads=config.num_attention_heads,
        **SIZES[case],
    )
    found, wanted = loaded.controlnet.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], x) for name, x in wanted.items())
    assert dict(loaded.controlnet.config).keys() - {"_name_or_path"} <= set(dict(expected.config)) | {"_class_name"}
    assert torch.equal(loaded.transformer.proj_out.weight, pipe.transformer.proj_out.weight)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_layers": 3}, r"has no transformer_blocks\.2\.\S+: make the ControlNet with fewer blocks"),
        ({"layers": 1}, "layers is no size of FluxControlNetModel: set num_layers or num_single_layers"),
    ],
)
def test_wrong_sizes(flux: Path, tmp_path: Path, sizes: dict[str, int], message: str) -> None:
    given: dict[str, int] = {"num_single_layers": 1, **sizes}
    with pytest.raises(ValueError, match=message):
        new_controlnet(flux, tmp_path / "new", **given)
    assert not (tmp_path / "new").exists()


def test_what_is_no_pipeline(flux: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"exists: choose another one"):
        new_controlnet(flux, tmp_path)
    with pytest.raises(ValueError, match=r"pretrained=owner/name must be a pipeline's folder: download it first"):
        new_controlnet("owner/name", tmp_path / "new")
    made("sd3").save_pretrained(tmp_path / "sd3")
    with pytest.raises(ValueError, match=r"has the transformer SD3Transformer2DModel, but must have one of FluxTra"):
        new_controlnet(tmp_path / "sd3", tmp_path / "new")
