"""Settings of fine-tuning: every experiment composes, and mistakes are one clear error before anything is loaded."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_cp.compat import versions
from lightning_cp.launch import Machine
from lightning_cp.recipes.runs.recipe import CheckedRun, _forget_encoded, check_config
from lightning_cp.recipes.settings.table import SettingsError
from tests.unit.recipes.composed import CONF, composed

EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("finetune_*.yaml"))
SIDES = {f"finetune_{name}": name for name in ("flux_controlnet", "qwen_image_controlnet", "wan_vace")}
# experiments with the settings of the makers' trainers
RANKS = {"finetune_ltx": 128, "finetune_ltx2": 32, "finetune_minimax_h3": 16}


class NoGpu(Machine):
    gpus = 0


BOTH = "model.pretrained=HERE/experts model.component=[transformer,transformer_2]"
HEADS = {"num_attention_heads": 4}


def _pipeline(kind: str, *, configs: dict[str, Any] | None = None, **models: str) -> dict[str, Any]:
    """Files of a pipeline. Args: configs: of its components, and `index` for more entries of the index."""
    configs = {"index": {}, **(configs or {})}
    index = {"_class_name": kind, **{name: ["diffusers", model] for name, model in models.items()}, **configs["index"]}
    return {"model_index.json": index, **{f"{name}/config.json": configs.get(name, HEADS) for name in models}}


_EXPERTS = {"transformer": "WanTransformer3DModel", "transformer_2": "WanTransformer3DModel"}
_FLUX_SIZES = {**HEADS, "attention_head_dim": 16}
_MODULAR = {
    "_class_name": "MiniMaxH3ModularPipeline",
    "transformer": ["diffusers", "MiniMaxH3Transformer3DModel", {"subfolder": "transformer"}],
    "transformer_ref": [None, None, {"subfolder": ""}],
    "vae": ["diffusers", "AutoencoderKLMiniMaxH3", {"subfolder": "vae"}],
}
_MEDIA = [{"tokens": 12}]
_FILES: dict[str, dict[str, Any]] = {
    "pipe": _pipeline("WanPipeline", transformer="WanTransformer3DModel", vae="AutoencoderKLWan"),
    "control": _pipeline(
        "FluxControlNetPipeline",
        configs={"transformer": _FLUX_SIZES, "controlnet": {**_FLUX_SIZES, "num_mode": None}},
        transformer="FluxTransformer2DModel",
        controlnet="FluxControlNetModel",
    ),
    "int8": _pipeline(
        "WanPipeline",
        configs={"transformer": {**HEADS, "quantization_config": {"quant_method": "quanto"}}},
        transformer="WanTransformer3DModel",
    ),
    "experts": _pipeline(
        "WanPipeline",
        configs={"index": {"boundary_ratio": 0.875}, "transformer_2": {"num_attention_heads": 2}},
        **_EXPERTS,
    ),
    "no_boundary": _pipeline("WanPipeline", configs={"index": {"boundary_ratio": None}}, **_EXPERTS),
    "empty": {"model_index.json": {}},
    "modular": {"modular_model_index.json": _MODULAR, "transformer/config.json": HEADS, "vae/config.json": {}},
    "other_family": {"index.json": {"family": "flux"}, "contents.json": {"media": _MEDIA}},
    "other_vae": {
        "index.json": {"family": "wan", "settings": {"pipeline_files": {"vae": "0" * 32}}},
        "contents.json": {"media": _MEDIA},
    },
    "cache": {"index.json": {}, "contents.json": {"media": _MEDIA * 5 + [{"tokens": 6, "source": "validation"}]}},
    "damaged": {"index.json": {}, "contents.json": {"media": [{"tokens": "12"}]}},
    "own_validation": {"index.json": {}, "contents.json": {"media": [{"tokens": 12, "use": "validation"}] * 6}},
    "partial": {"index.json": {}},
    "media": {},
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Folder with pipelines of one transformer and of two experts, a cache of six samples, and damaged ones."""
    for name, files in _FILES.items():
        (tmp_path / name).mkdir()
        for file, values in files.items():
            (tmp_path / name / file).parent.mkdir(exist_ok=True)
            (tmp_path / name / file).write_text(json.dumps(values))
    for name, text in (("broken", "{"), ("list", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model_index.json").write_text(text)
    return tmp_path


def check(here: Path, *overrides: str, experiment: str = "finetune_wan") -> CheckedRun:
    """Check `experiment` on the folder's pipeline and cache, with `overrides`."""
    given = [f"experiment={experiment}"]
    given += [] if "model=wan_tiny" in overrides else [f"model.pretrained={here}/pipe"]  # other groups lack the key
    given += [] if "data=digits" in overrides else [f"data.path={here}/cache"]
    changed = [override.replace("HERE", str(here)) for override in overrides]
    config = composed("train", "run_dir=/runs/here", "output_root=/runs", *given, *changed)
    return check_config(config, NoGpu(cores=4), None)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.default(2)
def test_every_experiment_composes(here: Path, experiment: str) -> None:
    folder = "control" if "controlnet" in experiment else "experts" if experiment == "finetune_wan22" else None
    config = check(here, *([f"model.pretrained=HERE/{folder}"] if folder else []), experiment=experiment).config
    if experiment in ("finetune_pixart_sigma", *SIDES):  # no adapters
        assert config.lora is None
    else:
        assert (config.lora.rank, config.lora.dropout) == (RANKS.get(experiment), 0.0)
    assert config.data.kind == "latents"


@pytest.mark.parametrize(
    "overrides",
    [
        "lora=null",
        "lora=null precision=bf16-true",
        "lora.targets=[to_q,to_v]",
        "lora.targets='.*to_[qk]'",
        "lora.lokr=-1 lora.targets=[default,text] strategy=cp_fsdp ring=2",
        "lora.ranks={attn1.to_q:8,to_v:4} lora.dora=true lora.targets=all-linear strategy=cp ring=2",
        "objective.sigma_range=[0.875,1.0]",
        "model.pretrained=HERE/experts model.component=[transformer_2,transformer]",
        "model.pretrained=HERE/no_boundary model.component=[transformer,transformer_2] "
        "objective.sigma_range=[[0.9,1.0],[0.0,0.8]]",
        "model.pretrained=organisation/pipeline model.component=[transformer,transformer_2]",
        "objective.time_range=[0,500]",
        "objective.weighting=min_snr objective.min_snr_gamma=1 lr_schedule=cosine_with_restarts lr_cycles=3",
        "data.validation=2 validation.every=10",
        "data=folder data.path=HERE/media data.sizes=[[16,24]] data.frames=[1,5]",
        "data=folder data.path=[HERE/media,{path:HERE/empty,weight:0.5,use:validation}] validation.every=5",
        "data=folder data.path={path:HERE/media,repeats:2}",
        "data.path=HERE/own_validation validation.every=5",
        "strategy=cp ring=2 ulysses=2",
        "strategy=cp_fsdp ring=2 data_parallel=2",
        "model.pretrained=organisation/pipeline",
        "model.dtype=bfloat16 precision=bf16-mixed",
        "model.quantize=int8 strategy=cp ring=2",
        "model.quantize=nf4 strategy=cp_fsdp ring=2 lora.lokr=4",
        "model.offload=true model.quantize=fp8 strategy=cp ring=2 activation_checkpointing=selective",
        "model.pretrained=HERE/int8 strategy=cp ring=2",
        "model.pretrained=HERE/modular strategy=cp ring=2",
    ],
)
@pytest.mark.default(4)
def test_valid_settings_pass(here: Path, overrides: str) -> None:
    check(here, *overrides.split())


REFUSED = [
    ("model.pretrained=HERE/modular model.component=transformer_ref", "model.component=transformer_ref is not in"),
    ("model.pretrained=HERE/modular model.component=vae", "is AutoencoderKLMiniMaxH3, no transformer: use one of tran"),
    ("data.path=HERE/other_family", "data.path=HERE/other_family was encoded for flux, but model.pretrained=HERE/pipe"),
    ("data.path=HERE/other_family model.pretrained=HERE/modular", "is a MiniMaxH3ModularPipeline, of the family"),
    ("data.path=HERE/other_vae", "data.path=HERE/other_vae was encoded with another vae than model.pretrained=HERE/pi"),
    ("strategy=cp ring=4 ulysses=2", "shards a sequence over 8 ranks, but a sample of HERE/cache has 6 tokens: the"),
    ("model.component=vae", "model.component=vae is AutoencoderKLWan, no transformer: use one of transformer"),
    ("data=digits", "model=pretrained needs data=latents or data=folder"),
    ("model=wan_tiny", "data=latents and data=folder need model=pretrained, or experiment=finetune_<family>"),
    ("model.pretrained=???", "model.pretrained must be given, for example model.pretrained=my-pipeline"),
    ("data.path=???", "data.path must be given, for example data.path=latents"),
    ("model.component=null", "model.component=null is not valid"),
    ("model.component=[transformer]", "model.component=['transformer'] is not valid: must be the name of a trans"),
    ("model.component=[transformer,transformer]", "model.component=['transformer', 'transformer'] is not valid"),
    (f"{BOTH} model.pretrained=HERE/pipe", "model.component=transformer_2 is not in HERE/pipe, which has transformer"),
    (f"{BOTH} model.pretrained=HERE/no_boundary", "model.component=['transformer', 'transformer_2'] are experts for"),
    (f"{BOTH} ulysses=3 strategy=cp", "ulysses=3 is not valid: must be at most 2, the attention heads of HERE/experts"),
    (f"{BOTH} objective.sigma_range=[0.5,1.0]", "objective.sigma_range=[0.5, 1.0] is not valid: must be null, or two"),
    (f"{BOTH} objective.sigma_range=[[0.5,1.0]]", "objective.sigma_range=[[0.5, 1.0]] is not valid: must have a range"),
    (f"{BOTH} objective.sigma_range=[[0.5,1.0],[0.0,0.6]]", "objective.sigma_range=[[0.5, 1.0], [0.0, 0.6]] is not"),
    (f"{BOTH} objective.sigma_range=[[1.0,0.5],[0.0,0.5]]", "is not valid: the sigma range [1, 0.5] of"),
    ("objective.sigma_range=[[0.5,1.0],[0.0,0.5]]", "is not valid: must be null, or two numbers from 0 to 1"),
    ("model.offload=true", "model.offload=true does not work with activation_checkpointing=none: backward would keep"),
    ("model.offload=true lora=null", "model.offload=true does not work with lora=null: only frozen weights"),
    ("model.offload=true strategy=cp_fsdp", "model.offload=true does not work with strategy=cp_fsdp: it shards"),
    ("model.offload=true model.compile=true", "model.offload=true does not work with model.compile=true: compiled"),
    ("model.quantize=int8 lora=null", "model.quantize=int8 gives quantised weights, which cannot be trained: train a"),
    ("model.pretrained=HERE/int8 strategy=cp_fsdp", "HERE/int8/transformer has quantised weights, which FSDP cannot"),
    ("model.pretrained=HERE/int8 model.quantize=nf4", "has quantised weights: leave model.quantize=nf4 out"),
    ("model.pretrained=HERE/int8 lora=null", "HERE/int8/transformer has quantised weights, which cannot be trained"),
    ("lora.lokr=8 lora.lr_ratio=16", "lora.lr_ratio=16 does not work with lora.lokr: leave one out"),
    ("lora.lokr=8 lora.file=HERE/pipe", "lora.lokr does not work with lora.file: only a plain LoRA of one rank"),
    ("lora.ranks={to_q:2} lora.file=HERE/pipe", "lora.ranks does not work with lora.file: only a plain LoRA of one"),
    ("lora.dora=true lora.file=HERE/pipe", "lora.dora does not work with lora.file: only a plain LoRA of one rank"),
    ("lora.dora=true strategy=cp_fsdp ring=2", "lora.dora=true does not work with strategy=cp_fsdp, which shards"),
    ("lora.dora=true model.quantize=int8", "lora.dora=true does not work with model.quantize: use model.quantize=null"),
    ("lora=5", "lora=5 is not valid: must be null, or settings such as lora.rank=16"),
    ("lora.targets='('", "lora.targets=( is not a valid regular expression"),
    ("lora.file=HERE/none", "lora.file=HERE/none does not exist"),
    ("precision=bf16-true", "precision=bf16-true would also convert the adapters"),
    ("objective.sigma_range=[0.5]", "objective.sigma_range=[0.5] is not valid"),
    ("objective.sigma_range=[0.9,0.1]", "objective.sigma_range=[0.9, 0.1] is not valid: the sigma range"),
    ("objective.time_range=[5,5]", "objective.time_range=[5, 5] is not valid: must be"),
    ("objective.min_snr_gamma=5", "objective.min_snr_gamma=5 has no effect with objective.weighting=null: leave"),
    ("objective.weighting=cosmap objective.min_snr_gamma=5", "objective.min_snr_gamma=5 has no effect with"),
    ("lr_schedule=cosine lr_cycles=3", "lr_cycles=3 has no effect with lr_schedule=cosine: leave it out, or use"),
    ("validation.quantiles=[]", "validation.quantiles=[] is not valid: must be a list of different numbers"),
    ("validation.quantiles=[0,1]", "validation.quantiles=[0, 1] is not valid: must be a list of different numbers"),
    ("data.validation=1", "validation.every=null and data.validation=1 belong together: set both, or neither"),
    ("validation.every=5", "validation.every=5 and data.validation=0 belong together: set both, or neither"),
    ("validation.every=5 data.validation=6", "data.validation=6 must be less than 6, the number of samples"),
    ("data=folder data.path=HERE/media data.frames=0", "data.frames=0 is not valid: must be null or"),
    ("data=folder data.path=HERE/media data.sizes=[48,64]", "data.sizes=[48, 64] is not valid: must be null or"),
    ("data.path=HERE/own_validation data.validation=1 validation.every=5", "data.validation=1 must be 0: the data"),
    ("data.path=[HERE/cache]", "data.path=['HERE/cache'] is not valid: must be a text"),
    ("data=folder data.path=[HERE/media,HERE/none]", "data.path[1]=HERE/none does not exist: it must be a folder of"),
    ("data.path=HERE/none", "data.path=HERE/none does not exist"),
    ("data.path=HERE/media", "data.path=HERE/media is no latent cache: make one with lightning-cp precompute"),
    ("data.path=HERE/partial", "data.path=HERE/partial is not complete: run lightning-cp precompute again"),
    ("data.path=HERE/damaged", "HERE/damaged/contents.json is damaged: run lightning-cp precompute again"),
    ("batch_size=3 strategy=cp data_parallel=2", "batch_size=3 is the global batch and must be a multiple of 2 groups"),
    ("model.pretrained=HERE/none", "model.pretrained=HERE/none must be a pipeline's folder"),
    ("model.pretrained=pipe", "model.pretrained=pipe must be a pipeline's folder, or the id of one on the Hub"),
    ("model.pretrained=HERE/media", "model.pretrained: HERE/media/model_index.json cannot be read"),
    ("model.pretrained=HERE/broken", "model.pretrained: HERE/broken/model_index.json cannot be read"),
    ("model.pretrained=HERE/list", "model.pretrained: HERE/list/model_index.json must hold a JSON object"),
    ("model.pretrained=HERE/empty", "model.component=transformer is not in HERE/empty, which has no models"),
    ("model.component=transformer_2", "model.component=transformer_2 is not in HERE/pipe, which has transformer, vae"),
    ("strategy=cp ulysses=5", "ulysses=5 is not valid: must be at most 4, the attention heads of HERE/pipe"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[overrides for overrides, _ in REFUSED])
def test_mistakes_are_one_clear_error(here: Path, overrides: str, message: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(message.replace("HERE", str(here)))) as raised:
        check(here, *overrides.split())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("package", "given", "message"),
    [
        (
            "bitsandbytes",
            "optim=adamw_8bit",
            "needs the package bitsandbytes, which is not installed: pip install 'bits",
        ),
        (
            "tensorboard",
            "logger=tensorboard",
            "logger=tensorboard needs the package tensorboard, which is not installed",
        ),
        ("wandb", "logger=wandb", "logger=wandb needs the package wandb, which is not installed: pip install 'wandb"),
    ],
)
@pytest.mark.default(1)
def test_a_missing_package_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, package: str, given: str, message: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    with pytest.raises(SettingsError, match=re.escape(message)):
        check(here, given)


def test_sharded_bytes_are_refused_with_an_older_torch(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda _: "2.11.0+cu130")
    check(here, "model.quantize=nf4", "strategy=cp", "ring=2")
    with pytest.raises(SettingsError, match=r"quantize=nf4 does not work with strategy=cp_fsdp: FSDP2 of torch 2\.11"):
        check(here, "model.quantize=nf4", "strategy=cp_fsdp", "ring=2")


@pytest.mark.parametrize(("kind", "stays"), [("folder", False), ("latents", True)])
def test_the_mark_of_an_earlier_encoding_is_renamed_before_ranks_wait_for_it(
    tmp_path: Path, kind: str, stays: bool
) -> None:
    mark = tmp_path / "latents" / "contents.json"
    mark.parent.mkdir()
    for _ in range(2):
        mark.write_text("{}")
        _forget_encoded(OmegaConf.create({"run_dir": str(tmp_path), "data": {"kind": kind}}))
        assert mark.exists() == stays != mark.with_name("previous.json").exists()
    _forget_encoded(OmegaConf.create({"run_dir": str(tmp_path)}))


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("FluxControlNetModel", {"num_mode": 10}, "has no family for training: it is a union of"),
        ("FluxControlNetModel", {"conditioning_embedding_channels": 3}, "it takes pixels (conditioning_embedding_cha"),
        ("QwenImageControlNetModel", {"extra_condition_channels": 4}, "it is for inpainting (extra_condition"),
        ("FluxControlNetModel", {"num_attention_heads": 24}, "has num_attention_heads=24, but the transformer has 4"),
        ("FluxMultiControlNetModel", {}, "the controlnet is a FluxMultiControlNetModel, but must be one model: Flux"),
        ("SD3ControlNetModel", {}, "the controlnet is a SD3ControlNetModel, but must be one model: Flux"),
    ],
)
def test_other_controlnets_are_refused(here: Path, kind: str, config: dict[str, int], message: str) -> None:
    index = json.loads((here / "control/model_index.json").read_text())
    (here / "control/model_index.json").write_text(json.dumps({**index, "controlnet": ["diffusers", kind]}))
    (here / "control/controlnet/config.json").write_text(json.dumps({"num_attention_heads": 4, **config}))
    with pytest.raises(SettingsError, match=re.escape(message)):
        check(here, "model.pretrained=HERE/control", experiment="finetune_flux_controlnet")
