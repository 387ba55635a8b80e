"""LoRA settings, the layers that are adapted, and files that are continued."""

from __future__ import annotations

import json
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lightning_cp.export import LORA_FILE, save_lora
from lightning_cp.families import family_for
from lightning_cp.finetune.adapters.lora import add_lora, check_lora
from lightning_cp.finetune.adapters.lora_file import load_loras
from lightning_cp.finetune.card import ModelCard
from lightning_cp.finetune.families.image.sd3 import StableDiffusion3
from lightning_cp.finetune.settings import LoraSettings
from tests.families.cases import made
from tests.models import TINY
from tests.pretrained import inputs, lora_state

Q = "blocks.0.attn1.to_q"


def wan(dtype: torch.dtype = torch.float32) -> Any:
    return TINY["wan"].build().to(dtype)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A LoRA of rank 2, with alpha 6. Its second matrices are not zero."""
    model = wan()
    add_lora(model, LoraSettings(rank=2, alpha=6, targets=["attn1.to_q"]))
    with torch.no_grad():
        for x in model.parameters():
            if x.requires_grad:
                x.normal_()
    save_lora(model, tmp_path / "lora")
    return tmp_path / "lora"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"targets": "blocks.(0"}, "lora.targets=blocks.(0 is not a valid regular expression: missing )"),
        ({"ranks": {"to_q": 2}, "file": "x"}, "lora.ranks does not work with lora.file: only a plain LoRA"),
        ({"dora": True, "file": "x"}, "lora.dora does not work with lora.file: only a plain LoRA"),
    ],
)
def test_settings_that_are_not_valid_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="lora") as caught:
        LoraSettings(**settings)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["attn1.to_q"], {"blocks.0.attn1.to_q", "blocks.1.attn1.to_q"}),
        (["to_out.0"], {f"blocks.{i}.attn{j}.to_out.0" for i in (0, 1) for j in (1, 2)}),
        ([Q, "proj_out"], {Q, "proj_out"}),
        (r"blocks\.1\.ffn\..*", {"blocks.1.ffn.net.0.proj", "blocks.1.ffn.net.2"}),
        ("patch_embedding", {"patch_embedding"}),
        (
            None,
            {f"blocks.{i}.attn{j}.{x}" for i in (0, 1) for j in (1, 2) for x in ("to_q", "to_k", "to_v", "to_out.0")},
        ),
    ],
)
def test_targets_choose_layers(targets: Any, expected: set[str]) -> None:
    model = wan()
    names = add_lora(model, LoraSettings(rank=2, targets=targets))
    assert set(names) == expected
    trained = {name.partition(".lora_")[0] for name, x in model.named_parameters() if x.requires_grad}
    assert trained == expected
    assert {name.partition(".lora_")[0] for name in lora_state(model)} == expected
    assert model(**inputs("wan")).sample.isfinite().all()


def test_a_family_chooses_targets() -> None:
    model: Any = TINY["sd3"].build().float()
    names = add_lora(model, LoraSettings(rank=2), family=StableDiffusion3)
    assert any(name.endswith("add_q_proj") for name in names)
    with pytest.raises(ValueError, match="already has adapters \\(default\\)"):
        add_lora(model, LoraSettings(rank=2))


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (
            ["to_q", "to_qq"],
            "lora.targets: 'to_qq' matches no layer of WanTransformer3DModel; the closest layers are to_q",
        ),
        (r".*\.attn3\..*", r"the regular expression '.*\\.attn3\\..*' matches no layer"),
        (["attn1"], "'attn1' matches no layer"),  # a module with layers
        (
            ["zzzz"],
            "'zzzz' matches no layer of WanTransformer3DModel; the closest layers are linear_1, linear_2, net.2",
        ),
    ],
)
def test_a_target_without_a_layer_is_refused(targets: Any, said: str) -> None:
    model = wan()
    before = set(model.state_dict())
    with pytest.raises(ValueError, match="lora") as caught:
        add_lora(model, LoraSettings(targets=targets))
    assert said in str(caught.value)
    assert set(model.state_dict()) == before
    assert all(x.requires_grad for x in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_are_in_float32_and_depend_on_the_seed_only(dtype: torch.dtype) -> None:
    states = []
    for global_seed, seed, targets in ((0, 0, None), (1, 0, [Q]), (1, 1, None)):
        model = wan(dtype)
        torch.manual_seed(global_seed)
        drawn = torch.random.get_rng_state()
        add_lora(model, LoraSettings(rank=3, targets=targets), seed=seed)
        assert torch.equal(drawn, torch.random.get_rng_state())
        assert all((x.dtype == torch.float32) for x in model.parameters() if x.requires_grad)
        states.append(lora_state(model))
    first, second, other = (state[f"{Q}.lora_A.weight"] for state in states)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert first.std() == pytest.approx(1 / (3 * 48) ** 0.5, rel=0.3)  # uniform on ±1/√48, as peft draws it
    assert not states[0][f"{Q}.lora_B.weight"].any()
    assert not torch.equal(first, states[0]["blocks.1.attn1.to_q.lora_A.weight"])


def test_adapters_have_values_on_a_meta_base() -> None:
    kind = type(wan())
    with torch.device("meta"):
        model: Any = kind(**TINY["wan"].config)
    add_lora(model, LoraSettings(rank=2))
    expected = wan()
    add_lora(expected, LoraSettings(rank=2))
    found = lora_state(model)
    assert found.keys() == lora_state(expected).keys()
    assert all(torch.equal(found[name], x) for name, x in lora_state(expected).items())
    assert model.proj_out.weight.is_meta


@pytest.mark.parametrize("alpha", [None, 6.0])
@pytest.mark.parametrize("as_folder", [True, False])
def test_a_file_is_continued_with_its_layers_and_alpha(file: Path, alpha: float | None, as_folder: bool) -> None:
    model = wan(torch.bfloat16)
    path = file if as_folder else file / LORA_FILE
    assert add_lora(model, LoraSettings(rank=2, alpha=alpha, file=path)) == [Q, "blocks.1.attn1.to_q"]
    saved = load_file(file / LORA_FILE)
    found = {f"transformer.{name}": x for name, x in lora_state(model).items()}
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], x) for name, x in saved.items())
    assert model.get_submodule(Q).scaling == {"default": 3.0}


def test_a_file_without_metadata_takes_alpha_from_the_settings(file: Path) -> None:
    save_file(load_file(file / LORA_FILE), file / LORA_FILE)
    for alpha, scaling in ((None, 1.0), (4, 2.0)):
        model = wan()
        add_lora(model, LoraSettings(rank=2, alpha=alpha, file=file))
        assert model.get_submodule(Q).scaling == {"default": scaling}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rank": 4}, "lora.rank=4 differs from the rank 2 of lora.file="),
        ({"alpha": 2}, "lora.alpha=2 differs from alpha=6 of lora.file="),
        ({"targets": ["attn1.to_q", "attn2.to_q"]}, "blocks.0.attn2.to_q is not adapted in the file"),
        ({"targets": [Q]}, "blocks.1.attn1.to_q is adapted in the file"),
    ],
)
def test_settings_that_contradict_the_file_are_refused(file: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="lora") as caught:
        add_lora(wan(), LoraSettings(**{"rank": 2, "file": file, **settings}))
    assert said in str(caught.value)


def _rewritten(file: Path, change: Any, **metadata: Any) -> None:
    state = load_file(file / LORA_FILE)
    change(state)
    written = {f"transformer.{key}": x for key, x in metadata.items()}
    save_file(state, file / LORA_FILE, {"format": "pt", "lora_adapter_metadata": json.dumps(written)})


_A, _B = f"transformer.{Q}.lora_A.weight", f"transformer.{Q}.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "metadata", "said"),
    [
        (lambda s: s.update({_A: torch.ones(2, 7)}), {}, f"is of another model: {Q} has the shapes [2, 7] and [48, 2]"),
        (
            lambda s: s.update({_B: torch.ones(7, 2)}),
            {},
            "the layer of WanTransformer3DModel has [48] inputs and 48 outputs",
        ),
        (lambda s: s.update({_B: torch.ones(48, 3)}), {}, "has the shapes [2, 48] and [48, 3]"),
        (
            lambda s: s.update({x.replace("blocks.0", "layers.9"): s.pop(x) for x in (_A, _B)}),
            {},
            "is of another model: WanTransformer3DModel has no layer layers.9.attn1.to_q",
        ),
        (lambda s: s.pop(_B), {}, f"is incomplete: {Q} has only lora_A"),
        (
            lambda s: s.update({_A: torch.ones(3, 48)}),
            {},
            f"layers of several ranks, which cannot be continued: 3 ({Q})",
        ),
        (lambda s: s.update({f"transformer.{Q}.alpha": torch.ones(())}), {}, f"has the weight {Q}.alpha"),
        (lambda s: None, {"use_dora": True}, "cannot be continued, because it has use_dora=True"),
        (lambda s: None, {"lora_alpha": -1}, "its metadata has lora_alpha=-1"),
        (
            lambda s: s.update({x.replace("transformer.", "diffusion_model."): s.pop(x) for x in list(s)}),
            {},
            "has no weights of 'transformer'; its first is diffusion_model.blocks.",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused(file: Path, change: Any, metadata: dict[str, Any], said: str) -> None:
    _rewritten(file, change, **metadata)
    model = wan()
    with pytest.raises(ValueError, match="lora") as caught:
        add_lora(model, LoraSettings(rank=2, file=file))
    assert said in str(caught.value)
    assert all(x.requires_grad for x in model.parameters())


def test_a_file_that_is_missing_or_damaged_is_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lora.file=.*absent does not exist"):
        add_lora(wan(), LoraSettings(rank=2, file=tmp_path / "absent"))
    damaged = file / LORA_FILE
    damaged.write_bytes(damaged.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"lora.file=.* is damaged or not a safetensors file"):
        add_lora(wan(), LoraSettings(rank=2, file=file))


def test_the_second_transformers_adapter_is_continued_by_its_name(tmp_path: Path) -> None:
    model = wan()
    add_lora(model, LoraSettings(rank=2))
    save_lora(model, tmp_path, component="transformer_2")
    with pytest.raises(ValueError, match="has no weights of 'transformer'; its first is transformer_2"):
        add_lora(wan(), LoraSettings(rank=2, file=tmp_path))
    assert len(add_lora(wan(), LoraSettings(rank=2, file=tmp_path), component="transformer_2")) == 16
    second = load_file(tmp_path / LORA_FILE)
    both = {name.replace("_2.", "."): x.clone() for name, x in second.items()} | second
    save_file(both, tmp_path / LORA_FILE)
    for one, other in (("transformer", "transformer_2"), ("transformer_2", "transformer")):
        settings = LoraSettings(rank=2, file=tmp_path)
        with pytest.raises(ValueError, match=f"has weights of {other}, which are not trained and would be missing"):
            add_lora(wan(), settings, component=one)
        assert len(add_lora(wan(), settings, component=one, trained=["transformer", "transformer_2"])) == 16


def test_frozen_weights_have_no_gradient() -> None:
    model: nn.Module = wan()
    add_lora(model, LoraSettings(rank=2))
    model(**inputs("wan"), return_dict=False)[0].square().mean().backward()
    assert all((x.grad is not None) == (".lora_" in name) for name, x in model.named_parameters())


def load_line(component: str) -> str:
    """The line of the model card that loads the adapter."""
    settings: dict[str, Any] = {"base": "b", "family": "wan", "command": "c", "steps": 1, "topology": "t", "samples": 1}
    text = ModelCard(**settings, adapter={"rank": 2}, component=component).text()
    return text.partition("```python\n")[2].partition("\n```")[0].splitlines()[-1]


def test_a_lora_is_loaded_into_the_expert_it_was_trained_for(tmp_path: Path) -> None:
    trained = deepcopy(made("wan_two_experts"))
    settings = LoraSettings(rank=2, alpha=8)
    add_lora(trained.transformer_2, settings, family=family_for(trained), component="transformer_2")
    with torch.no_grad():
        for name, x in trained.transformer_2.named_parameters():
            if "lora_" in name:
                x.normal_(generator=torch.Generator().manual_seed(len(name)))
    save_lora(trained.transformer_2, tmp_path, component="transformer_2")
    pipe = deepcopy(made("wan_two_experts"))
    load_loras(pipe, [tmp_path / "pytorch_lora_weights.safetensors"], [1])
    assert not getattr(pipe.transformer, "peft_config", None)
    by_card = deepcopy(made("wan_two_experts"))
    exec(load_line("transformer_2"), {"pipe": by_card, "folder": str(tmp_path)})
    channels = pipe.transformer.config.in_channels, pipe.transformer.config.text_dim
    inputs = (torch.ones(1, channels[0], 1, 4, 4), torch.tensor([500.0]), torch.ones(1, 3, channels[1]))
    pipes = (trained, pipe, by_card, made("wan_two_experts"))
    outputs = [one.transformer_2(*inputs, return_dict=False)[0] for one in pipes]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.allclose(outputs[0], outputs[3])
    with pytest.raises(ValueError, match="was trained for transformer_2, which this WanPipeline does not have"):
        load_loras(deepcopy(made("wan")), [tmp_path / "pytorch_lora_weights.safetensors"], [1])


def test_layers_have_ranks_of_their_own() -> None:
    for alpha, scalings in ((None, (1.0, 1.0, 1.0)), (6.0, (2.0, 1.2, 3.0))):
        model = wan()
        add_lora(model, LoraSettings(rank=3, alpha=alpha, ranks={"to_q": 5, "blocks.1.attn1.to_q": 2}))
        layers = [model.get_submodule(name) for name in ("blocks.0.attn1.to_k", Q, "blocks.1.attn1.to_q")]
        assert [layer.lora_A["default"].weight.shape[0] for layer in layers] == [3, 5, 2]
        assert tuple(layer.scaling["default"] for layer in layers) == pytest.approx(scalings)
    with pytest.raises(ValueError, match=r"lora\.ranks: 'to_x' matches no layer of WanTransformer3DModel that lora"):
        add_lora(wan(), LoraSettings(ranks={"to_x": 2}))
    with pytest.raises(ValueError, match=r"lora\.ranks: 'ffn\.net\.2' matches no layer"):  # not adapted
        add_lora(wan(), LoraSettings(ranks={"ffn.net.2": 2}))


@pytest.mark.parametrize("settings", [{"rank": 49}, {"ranks": {"attn1.to_q": 49}}])
def test_a_rank_above_the_width_of_a_layer_is_refused_without_weights(settings: dict[str, Any]) -> None:
    model = wan().to("meta")
    with pytest.raises(ValueError, match=r"lora.rank=49 .* is above the width of blocks.0.attn1.to_q, which has 48"):
        check_lora(model, LoraSettings(targets=["attn1.to_q"], **settings), family=None, component="transformer")


def test_all_linear_layers_are_adapted() -> None:
    model = wan()
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    assert add_lora(model, LoraSettings(rank=2, targets="all-linear")) == linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dora_starts_at_the_base_with_norms_in_float32(dtype: torch.dtype) -> None:
    model, base = wan(dtype), wan(dtype)
    add_lora(model, LoraSettings(rank=2, dora=True))
    norms = {name: x for name, x in lora_state(model).items() if name.endswith(".lora_magnitude_vector")}
    assert len(norms) == 16
    for name, x in norms.items():
        weight = base.get_submodule(name.rpartition(".")[0]).weight
        torch.testing.assert_close(x, weight.float().norm(dim=1))
    values = inputs("wan", dtype)
    found, expected = (x(**values, return_dict=False)[0].float() for x in (model, base))
    assert (found - expected).norm() < (1e-6 if dtype == torch.float32 else 2e-2) * expected.norm()
    with torch.device("meta"):
        empty: Any = type(model)(**TINY["wan"].config)
    with pytest.raises(ValueError, match=r"lora.dora=true needs the weights .* \(strategy=cp_fsdp\)"):
        add_lora(empty, LoraSettings(dora=True))


def test_several_loras_add_their_outputs_by_strength_and_drop_nothing(tmp_path: Path) -> None:
    pipe, expected, strengths = deepcopy(made("wan")), deepcopy(made("wan").transformer), (0.5, -2.0)
    files = []
    for i, (strength, targets) in enumerate(zip(strengths, (["attn1.to_q"], ["attn1.to_q", "attn1.to_v"]))):
        model = deepcopy(made("wan").transformer)
        names = add_lora(model, LoraSettings(rank=2 + i, alpha=3, targets=targets, dropout=0.9))
        for name in names:
            layer = model.get_submodule(name)
            a, b = layer.lora_A["default"].weight.data.normal_(), layer.lora_B["default"].weight.data.normal_()
            expected.get_submodule(name).weight.data += strength * 3 / (2 + i) * b @ a
        save_lora(model, tmp_path / f"{i}")
        files.append(tmp_path / f"{i}" / LORA_FILE)
    load_loras(pipe, files, strengths)
    assert not any(layer.training for layer in pipe.transformer.modules())
    channels = expected.config.in_channels, expected.config.text_dim
    values = torch.ones(1, channels[0], 1, 4, 4), torch.tensor([500.0]), torch.ones(1, 3, channels[1])
    found, summed, base = (
        x(*values, return_dict=False)[0] for x in (pipe.transformer, expected, made("wan").transformer)
    )
    torch.testing.assert_close(found, summed, rtol=1e-4, atol=1e-5)
    assert (found - base).norm() > 0.01 * base.norm()
    plain = deepcopy(made("wan"))
    plain.load_lora_weights(files[0])  # by diffusers alone, which adds layers in training mode
    outputs = [plain.transformer(*values, return_dict=False)[0] for _ in range(2)]
    assert torch.equal(*outputs)


def _replaced(*pairs: tuple[str, str]) -> Any:
    def rename(name: str) -> str:
        for old, new in pairs:
            name = name.replace(old, new)
        return name

    return lambda tensors: {rename(name): x for name, x in tensors.items()}


OF_COMFYUI = _replaced(("transformer.", "diffusion_model."), ("attn1.to_q", "self_attn.q"))
OF_OLD_DIFFUSERS = _replaced(("lora_A", "lora.down"), ("lora_B", "lora.up"))


def _with(name: str, value: float) -> Any:
    return lambda tensors: {**OF_COMFYUI(tensors), f"diffusion_model.{name}": torch.full([16], float(value))}


NO_BLOCK = _replaced(("blocks.1.", "blocks.7."))
HALF = "loaded 2 of its 4 weights, and not transformer.blocks.7.attn1.to_q.lora_A.weight, transformer.b"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (OF_COMFYUI, None),
        (OF_OLD_DIFFUSERS, None),
        (_with("blocks.0.norm3.diff", 0), None),
        (_with("blocks.0.norm3.diff", 1), "loaded 4 of its 5 weights, and not diffusion_model.blocks.0.norm3.diff"),
        (_with("time_projection.1.diff_b", 1), "4 of its 5 weights, and not diffusion_model.time_projection.1.diff_b"),
        (NO_BLOCK, HALF),
        (lambda x: NO_BLOCK(OF_COMFYUI(x)), HALF),
        (lambda x: NO_BLOCK(OF_OLD_DIFFUSERS(x)), HALF),
        (_replaced(("blocks.", "layers.")), "is of another model: this WanPipeline cannot load it"),
        (_replaced(("transformer.", "")), "loaded 0 of its 4 weights, and not blocks.0.attn1.to_q.lora_A.weight"),
        (_replaced(("transformer.", "controlnet.")), "loaded 0 of its 4 weights, and not controlnet.blocks.0."),
        (lambda x: {**x, **_replaced(("transformer.", "unet."))(x)}, "loaded 4 of its 8 weights, and not unet."),
        (lambda x: {**x, **_replaced(("transformer.", "text_encoder."))(x)}, "loaded 4 of its 8 weights, and not text"),
        (
            lambda x: {n: v for n, v in x.items() if "1.attn1.to_q.lora_B" not in n},
            "loaded 3 of its 4 weights, and not transformer.blocks.1",
        ),
        (lambda x: {n: v[:, 1:] if "lora_A" in n else v for n, v in x.items()}, r"size mismatch for .*to_q\.lora_A"),
        (lambda x: {n: v[1:] if "lora_B" in n else v for n, v in x.items()}, r"size mismatch for .*to_q\.lora_B"),
    ],
)
def test_a_lora_is_loaded_whole_or_refused(change: Any, said: str | None, tmp_path: Path) -> None:
    model = deepcopy(made("wan").transformer)
    add_lora(model, LoraSettings(rank=2, targets=["attn1.to_q"]))
    save_lora(model, tmp_path)
    tensors = change(load_file(tmp_path / LORA_FILE))
    save_file(
        {name: x.clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}, tmp_path / LORA_FILE
    )
    pipe = deepcopy(made("wan"))
    with nullcontext() if said is None else pytest.raises(ValueError, match=f"lora={tmp_path}/.* {said}"):
        load_loras(pipe, [tmp_path / LORA_FILE], [1])
    if said is None:
        assert sum(".lora_" in name for name, _ in pipe.transformer.named_parameters()) == 4


def test_weights_of_text_encoders_and_norms_are_loaded_or_refused(tmp_path: Path) -> None:
    pipe = deepcopy(made("flux"))
    size, layer = pipe.text_encoder.config.hidden_size, "text_encoder.text_model.encoder.layers.0.self_attn.q_proj"
    norm = "transformer.transformer_blocks.0.attn.norm_q.weight"
    down, up = torch.randn(2, size), torch.randn(size, 2)
    old = {f"{layer}.lora_linear_layer.down.weight": down, f"{layer}.lora_linear_layer.up.weight": up}
    new = {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
    add_lora(pipe.transformer, LoraSettings(rank=2))
    save_lora(pipe.transformer, tmp_path)
    tensors = load_file(tmp_path / LORA_FILE)
    norms = {norm: torch.full_like(pipe.transformer.state_dict()[norm.partition(".")[2]], 2)}
    for more, lost in (
        (old | norms, None),
        (new, None),
        (new | {name.replace("layers.0", "layers.5"): x.clone() for name, x in new.items()}, "layers.5"),
        ({name.replace("encoder.t", "encoder_2.t"): x for name, x in new.items()}, "text_encoder_2"),
        ({norm.replace("blocks.0", "blocks.9"): x for name, x in norms.items()}, "blocks.9.attn.norm_q"),
        ({"transformer.x_embedder.dora_scale": torch.ones(2)}, "dora_scale"),
    ):
        save_file({**tensors, **more}, tmp_path / LORA_FILE)
        pipe = deepcopy(made("flux"))
        with nullcontext() if lost is None else pytest.raises(ValueError, match=f"weights, and not .*{lost}"):
            load_loras(pipe, [tmp_path / LORA_FILE], [1])
    save_file({**tensors, **new}, tmp_path / LORA_FILE)
    with pytest.raises(ValueError, match="has weights of text_encoder, which are not trained"):
        add_lora(deepcopy(made("flux").transformer), LoraSettings(file=tmp_path))


def test_lokr_starts_at_the_base_and_its_values_depend_on_seed_and_name_only() -> None:
    states = []
    for seed, dtype in ((0, torch.float32), (0, torch.bfloat16), (1, torch.float32)):
        torch.manual_seed(seed + 5)
        model, base = wan(dtype), wan(dtype)
        names = add_lora(model, LoraSettings(rank=3, lokr=4), seed=seed)
        values = inputs("wan", dtype)
        assert torch.equal(*(x(**values, return_dict=False)[0] for x in (model, base)))
        states.append(lora_state(model))
    state = states[0]
    assert len(state) == 3 * len(names)
    kinds = {"lokr_w1": (4, 4), "lokr_w2_a": (12, 3), "lokr_w2_b": (3, 12)}
    assert {name.removeprefix(f"{Q}."): tuple(x.shape) for name, x in state.items() if name.startswith(Q)} == kinds
    assert {x.dtype for x in state.values()} == {torch.float32}
    assert not any(x.any() for name, x in state.items() if name.endswith("w1"))
    assert all(torch.equal(x, states[1][name]) for name, x in state.items())
    drawn = [name for name in state if not name.endswith("w1")]
    assert not any(torch.equal(state[name], states[2][name]) for name in drawn)
    assert not torch.equal(state[f"{Q}.lokr_w2_a"], state[f"{Q.replace('0', '1', 1)}.lokr_w2_a"])


@pytest.mark.parametrize("settings", [{"rank": 3, "lokr": 4}, {"rank": 3, "dora": True}], ids=["lokr", "dora"])
def test_the_recipe_loads_lokr_and_dora(settings: dict[str, Any], tmp_path: Path) -> None:
    pipe, trained = deepcopy(made("wan_two_experts")), deepcopy(made("wan_two_experts"))
    for model in (trained.transformer, trained.transformer_2):
        add_lora(model, LoraSettings(**settings, targets=["attn1.to_v"]))
        for layer in (x for x in model.parameters() if x.requires_grad):
            layer.data.normal_()
    save_lora({"transformer": trained.transformer, "transformer_2": trained.transformer_2}, tmp_path)
    load_loras(pipe, [tmp_path / LORA_FILE], [1])
    channels = pipe.transformer.config.in_channels, pipe.transformer.config.text_dim
    values = torch.ones(1, channels[0], 1, 4, 4), torch.tensor([500.0]), torch.ones(1, 3, channels[1])
    for name in ("transformer", "transformer_2"):
        found, expected, base = (
            getattr(one, name)(*values, return_dict=False)[0] for one in (pipe, trained, made("wan_two_experts"))
        )
        assert torch.equal(found, expected)
        assert (found - base).norm() > 0.01 * base.norm()


@pytest.mark.parametrize(
    ("name", "text", "count"), [("flux", "ff_context", 12), ("qwen_image", "txt_mlp", 12), ("sd3", "ff_context", None)]
)
def test_the_text_stream_is_adapted_by_name(name: str, text: str, count: int | None) -> None:
    model: Any = TINY[name].build()
    both = add_lora(deepcopy(model), LoraSettings(rank=2, targets=["default", "text"]))
    alone = add_lora(deepcopy(model), LoraSettings(rank=2, targets="text"))
    default = add_lora(deepcopy(model), LoraSettings(rank=2))
    assert set(both) == {*alone, *default}
    assert not {*alone} & {*default}
    assert any(f".{text}." in layer for layer in alone)
    assert any(layer.endswith("attn.add_q_proj") for layer in alone)
    assert {layer.split(".")[0] for layer in alone} == {"transformer_blocks"}
    assert count in (None, len(alone))


def test_a_model_without_a_text_stream_has_no_such_layers() -> None:
    with pytest.raises(ValueError, match="'text' matches no layer of WanTransformer3DModel, which has no text stream"):
        add_lora(wan(), LoraSettings(targets=["default", "text"]))
    with pytest.raises(ValueError, match="'to_x' matches no layer of FluxTransformer2DModel"):
        add_lora(TINY["flux"].build(), LoraSettings(targets=["text", "to_x"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lokr": 1}, r"lora\.lokr=1 must be one of None, -1 or a whole number, at least 2"),
        ({"lokr": True}, r"lora\.lokr=True must be one of None, -1"),
        ({"lokr": 4, "dora": True}, r"lora\.dora does not work with lora\.lokr"),
        ({"lokr": 4, "dropout": 0.1}, r"lora\.dropout does not work with lora\.lokr"),
        ({"lokr": 4, "file": "x"}, r"lora\.lokr does not work with lora\.file"),
    ],
)
def test_settings_that_lokr_does_not_have_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoraSettings(**settings)
