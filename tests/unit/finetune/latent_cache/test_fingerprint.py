"""A fingerprint is stable, and differences are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cp.errors import CacheError, StaleCacheError
from lightning_cp.families import Components
from lightning_cp.finetune.latent_cache import LatentCache, differences, fingerprint, fingerprint_of, prepare_cache
from tests.unit.finetune.latent_cache.made import check, index, make

SETTINGS = {"sizes": [[512, 512]], "dtype": "bfloat16"}
COMPONENTS = Components(text=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))


def pipe() -> Any:
    from tests.pipelines import PIPES

    torch.manual_seed(3)
    return PIPES["flux"].make()


@pytest.fixture(scope="module")
def made() -> Any:
    return pipe()


@pytest.fixture(scope="module")
def stored(made: Any) -> dict[str, str]:
    found = json.loads(json.dumps(fingerprint_of(made, COMPONENTS, SETTINGS)))
    assert isinstance(found, dict)
    return found


def test_the_same_pipeline_has_the_same_fingerprint(made: Any, stored: dict[str, str], tmp_path: Path) -> None:
    made.tokenizer_2.save_pretrained(tmp_path)
    made.encode_prompt("a cat", "a dog", max_sequence_length=16)  # fast tokenizers remember the call's padding
    made.scheduler = None
    assert fingerprint_of(made, COMPONENTS, SETTINGS) == stored
    assert differences(stored, fingerprint_of(made, COMPONENTS, SETTINGS)) == []
    again = SimpleNamespace(**{name: getattr(made, name) for name in (*COMPONENTS.text, *COMPONENTS.media)})
    again.tokenizer_2 = type(made.tokenizer_2).from_pretrained(tmp_path)
    assert fingerprint_of(again, COMPONENTS, SETTINGS) == {**stored, "pipeline": "SimpleNamespace"}
    assert stored["package.torch"].startswith(torch.__version__.split("+")[0])
    assert "scheduler" not in {name.split(".")[0] for name in stored}


def _nudge(module: nn.Module) -> None:
    with torch.no_grad():
        list(module.parameters())[-1].mul_(1.01)


def _template(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages[0] }}"


CHANGES: list[tuple[Callable[[Any], object], dict[str, Any], str]] = [
    (lambda p: _nudge(p.vae), {}, "the weights of vae changed"),
    (lambda p: _nudge(p.text_encoder_2), {}, "the weights of text_encoder_2 changed"),
    (lambda p: p.vae.register_to_config(scaling_factor=9.0), {}, "the config of vae changed"),
    (lambda p: p.tokenizer_2.add_tokens(["qqq"]), {}, r"the files of tokenizer_2 changed \(vocabulary, chat template"),
    (lambda p: _template(p.tokenizer), {}, "the files of tokenizer changed"),
    (lambda p: None, {"dtype": "float32"}, 'settings.dtype was "bfloat16" and is "float32"'),
    (lambda p: None, {"sizes": [[64, 64]]}, r"settings.sizes was \[\[512, 512\]\] and is \[\[64, 64\]\]"),
    (lambda p: None, {"crop": 1}, "settings.crop was absent and is 1"),
    (lambda p: setattr(p, "text_encoder", None), {}, "text_encoder was CLIPTextModel and is absent"),
]


@pytest.mark.parametrize(("change", "settings", "message"), CHANGES)
def test_what_changed_is_named(
    stored: dict[str, str], change: Callable[[Any], object], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    other = pipe()
    change(other)
    new = fingerprint_of(other, COMPONENTS, SETTINGS | settings)
    make(tmp_path)
    with pytest.raises(StaleCacheError, match=f"{message}.*Choose another output, or delete this cache"):
        fingerprint.check_fresh(tmp_path, stored, new)


def test_a_change_of_dtype_is_named(stored: dict[str, str]) -> None:
    other = pipe()
    other.vae.to(torch.bfloat16)
    named = differences(stored, fingerprint_of(other, COMPONENTS, SETTINGS))
    assert named[0] == "vae.dtype was torch.float32 and is torch.bfloat16"
    assert named[1] == "names, shapes or dtypes of the weights of vae changed"


def test_versions_and_ftfy_count(monkeypatch: pytest.MonkeyPatch, made: Any) -> None:
    old, torch_version = fingerprint_of(made, (), {}), fingerprint.metadata.version("torch")
    missing = fingerprint.metadata.PackageNotFoundError

    def version(package: str) -> str:
        if package == "ftfy":
            raise missing
        return "9.9"

    monkeypatch.setattr(fingerprint.metadata, "version", version)
    named = differences(old, fingerprint_of(made, (), {}))
    assert f"the version of torch was {torch_version} and is 9.9" in named
    assert f"the version of ftfy was {old['package.ftfy']} and is not installed" in named
    assert len(named) == 5


def test_tensors_of_any_dtype_and_memory_format_are_sampled() -> None:
    def found(x: torch.Tensor) -> str:
        module = nn.Module()
        module.register_buffer("x", x)
        return fingerprint_of(SimpleNamespace(vae=module), ["vae"], {})["vae.weights"]

    x = torch.arange(2 * 3 * 50 * 70).view(2, 3, 50, 70)
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float64, torch.bool, torch.uint8, torch.complex64):
        y = (x % 5).to(torch.float32).to(dtype)
        assert found(y) == found(y.to(memory_format=torch.channels_last)) != found((x % 7).to(torch.float32).to(dtype))
    assert found(torch.zeros(0)) == found(torch.zeros(0))
    assert found(torch.tensor(1.0)) != found(torch.tensor(2.0))
    with pytest.raises(CacheError, match=r"vae.x is not in memory: compute the fingerprint before the pipeline is off"):
        found(torch.zeros(3, device="meta"))
    with pytest.raises(CacheError, match="vae is a int: a fingerprint needs a torch module"):
        fingerprint_of(SimpleNamespace(vae=3), ["vae"], {})


def test_a_stale_cache_is_not_continued_and_stays_as_it_is(tmp_path: Path) -> None:
    make(tmp_path)
    for changes, message in (
        ({"fingerprint": {"vae.weights": "xyz", "package.torch": "2.11.0"}}, "the weights of vae changed. Choose an"),
        ({"fingerprint": {"vae.weights": "abc", "package.torch": "3"}}, "the version of torch was 2.11.0 and is 3. Ch"),
        ({"family": "flux"}, "family was qwen_image and is flux"),
        ({"facts": {**index().facts, "text_length": 77}}, "facts.text_length was 512 and is 77"),
    ):
        with pytest.raises(StaleCacheError, match=message):
            prepare_cache(tmp_path, index(**changes))
    check(LatentCache(tmp_path), 8)
