"""Modular pipelines of diffusers are loaded from folders without a model_index.json, and called like others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from lightning_cp.errors import FamilyError
from lightning_cp.families import family_for
from lightning_cp.finetune.encoders import load_encoders, pipeline_class
from lightning_cp.finetune.modular import is_modular
from lightning_cp.finetune.pipeline import load_pipeline
from tests.families.cases import made

pytestmark = pytest.mark.filterwarnings("ignore")
PLAIN = {  # case -> its modular pipeline
    "flux": "FluxModularPipeline",
    "wan_two_experts": "Wan22ModularPipeline",
    "flux2_klein": "Flux2KleinBaseModularPipeline",
    "qwen_image": "QwenImageModularPipeline",
    "wan_image": "WanImage2VideoModularPipeline",
}
SIZE = {"height": 16, "width": 32, "num_frames": 124}


def _saved_modular(folder: Path, case: str, kind: str) -> Path:
    """Save the components of a case as a modular pipeline; move it, so that its index names another folder."""
    pipe, modular = made(case), getattr(diffusers, kind)()
    components = {name: x for name, x in pipe.components.items() if x is not None}
    settings = [x.name for x in modular.blocks.expected_configs if x.name in pipe.config]
    modular.update_components(**{name: pipe.config[name] for name in settings})
    modular.update_components(**{name: x for name, x in components.items() if name in modular.component_names})
    modular.save_pretrained(str(folder / "made"))
    return shutil.move(folder / "made", folder / "pipe")


@pytest.mark.parametrize("case", PLAIN)
@pytest.mark.default(1)
def test_a_modular_folder_is_loaded_as_the_pipeline_of_its_name(case: str, tmp_path: Path) -> None:
    folder, pipe = _saved_modular(tmp_path, case, PLAIN[case]), made(case)
    loaded = load_pipeline(str(folder), torch.float32)
    assert type(loaded) is type(pipe) is pipeline_class(str(folder))
    assert family_for(loaded).facts == family_for(load_encoders(str(folder), torch.float32)).facts
    assert family_for(loaded).facts == family_for(pipe).facts
    for name, x in pipe.components.items():
        assert (x is None) == (getattr(loaded, name) is None), name


def test_a_pipeline_lacks_a_component_of_its_modular_form(tmp_path: Path) -> None:
    """Its modular form has a processor only."""
    folder = _saved_modular(tmp_path, "qwen_image_edit", "QwenImageEditModularPipeline")
    with pytest.raises(FamilyError, match="has no tokenizer, which encode the data"):
        load_encoders(str(folder), torch.float32)


def test_a_modular_pipeline_is_called_like_others(tmp_path: Path) -> None:
    made("minimax_h3").save_pretrained(str(tmp_path / "pipe"))
    pipe = load_pipeline(str(tmp_path / "pipe"), torch.float32)
    pipe.set_progress_bar_config(disable=True)
    assert is_modular(pipe)
    assert pipe.transformer_ref is None

    def drawn(**others: Any) -> Any:
        generator = [torch.Generator().manual_seed(0)]
        return pipe(prompt=["a cat"], generator=generator, num_inference_steps=3, output_type="pt", **SIZE, **others)

    result = drawn()
    assert list(result) == ["frames", "audio", "sampling_rate"]
    assert result.frames.shape == (1, 124, 3, 16, 32)
    assert result.audio.shape == (1, 2, 207 * 200)
    assert result.sampling_rate == 8000
    assert torch.equal(drawn(return_dict=False)[0], result.frames)
    with pytest.raises(TypeError, match="MiniMaxH3ModularPipeline has no argument frames, only references, height"):
        drawn(frames=1)


def test_a_modular_pipeline_draws_from_text_that_was_encoded_before() -> None:
    from tests.pipelines import PIPES

    torch.manual_seed(0)
    pipe, call = PIPES["minimax_h3"].make(), {"prompt": "a cat", **SIZE, "num_inference_steps": 3}
    expected = pipe(**call, output_type="pt", generator=torch.Generator().manual_seed(0)).frames
    encoded = pipe.encode_prompt(prompt="a cat")
    assert encoded["prompt_embeds"].shape[1] == len(encoded["text_token_tags"])
    pipe.encode_prompt = lambda **given: encoded if given == {"prompt": "a cat"} else None
    pipe.text_encoder = None
    again = pipe(**call, output_type="pt", generator=torch.Generator().manual_seed(0)).frames
    assert torch.equal(again, expected)
