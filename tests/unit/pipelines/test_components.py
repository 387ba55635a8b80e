"""Load pipelines from folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lightning_cp.finetune.pipeline import load_pipeline
from tests.families.cases import made


@pytest.mark.parametrize("where", ["pipeline", "component", "library"])
def test_a_pipeline_with_code_of_its_own_is_refused_with_the_setting_and_the_files(where: str, tmp_path: Path) -> None:
    index: dict[str, object] = {"_class_name": "DiTPipeline", "_diffusers_version": "0.42.1"}
    ran = tmp_path / "ran"
    code = f"from pathlib import Path\nPath({str(ran)!r}).touch()\n"
    files = {"pipeline": "pipeline.py", "component": "transformer/my_model.py", "library": "transformer/other.py"}
    if where == "pipeline":
        index["_class_name"] = ["pipeline", "MyPipeline"]
    else:
        index["transformer"] = ["my_model" if where == "component" else "a_library_of_nobody", "MyModel"]
    file = tmp_path / files[where]
    file.parent.mkdir(exist_ok=True)
    file.write_text(code)
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"source=.* \(files: {files[where]}\).*trust_remote_code=True") as refused:
        load_pipeline(str(tmp_path), torch.float32)
    assert "\n" not in str(refused.value)
    assert not ran.exists()


@pytest.mark.filterwarnings("ignore")
def test_a_pipeline_that_was_saved_without_components_is_loaded(tmp_path: Path) -> None:
    made("sd3_without_t5").save_pretrained(tmp_path / "pipe")
    pipe = load_pipeline(str(tmp_path / "pipe"), torch.float32)
    assert (pipe.text_encoder_3, pipe.tokenizer_3) == (None, None)
    assert pipe.text_encoder_2 is not None
