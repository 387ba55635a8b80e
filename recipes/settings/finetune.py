"""Check the settings of fine-tuning (model=pretrained) against the files that they name. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_cp.compat.versions import fsdp_refuses_bytes
from lightning_cp.errors import CacheError
from lightning_cp.finetune.encoder_files import check_made_by
from lightning_cp.finetune.family_table import family_of_pipeline
from lightning_cp.finetune.prompt_list import sample_prompts_of
from lightning_cp.finetune.settings import QUANTILES, DiffusionSettings, FlowSettings, LoraSettings, PrecomputeSettings
from lightning_cp.mesh.degrees import check_degrees
from lightning_cp.pipeline_folder import read_index
from lightning_cp.recipes.settings.components import (
    check_components,
    check_quantised,
    check_transformers,
    components_of,
    read_file,
)
from lightning_cp.recipes.settings.data_folders import data_folders
from lightning_cp.recipes.settings.table import Setting, SettingsError, read, show
from lightning_cp.recipes.settings.world import is_single, shards_weights
from lightning_cp.rules import Either, Integer, Number, OneOf, Text, rules_of

_NULL = OneOf((None,))
_ENCODING = rules_of(PrecomputeSettings)
_SETTINGS = (
    Setting("model.pretrained", Text()),
    Setting("model.dtype", OneOf(("float32", "bfloat16"))),
    Setting("model.compile", OneOf((True, False))),
    Setting("model.offload", OneOf((True, False))),
    Setting("model.quantize", OneOf((None, "int8", "fp8", "nf4"))),
    Setting("lora.lr_ratio", Either(_NULL, Number(above=0))),
    *(
        Setting(f"objective.{name}", rule if rule.passes(None) else Either(_NULL, rule))
        for name, rule in {**rules_of(DiffusionSettings), **rules_of(FlowSettings)}.items()
        if name not in ("cond_dropout", "sigma_range")  # of all runs; of several experts, see `check_components`
    ),
    Setting("data.mixed", OneOf((True, False))),
    Setting("objective.reduction", OneOf(("samples", "tokens"))),
    Setting("save_every", Either(_NULL, Integer(1))),
    Setting("validation.every", Either(_NULL, Integer(1))),
    Setting("data.validation", Integer(0)),
    Setting("validation.quantiles", QUANTILES),
    Setting("data.fps", _ENCODING["fps"]),
    Setting("data.captions", _ENCODING["captions"]),
)


def is_finetuning(config: DictConfig) -> bool:
    """Return True if the model is a pretrained one, or the data are for one."""
    return "pretrained" in _keys(config, "model") or "path" in _keys(config, "data")


def _keys(config: DictConfig, group: str) -> list[str]:
    """Return the keys of a group, including those with a missing value ("???"), which `in` would not find."""
    return list(config[group]) if OmegaConf.is_dict(config.get(group)) else []


def check_groups(config: DictConfig) -> None:
    """Check that model and data are both for fine-tuning, and are given. Raises: SettingsError: they are not."""
    if "pretrained" not in _keys(config, "model"):
        raise SettingsError("data=latents and data=folder need model=pretrained, or experiment=finetune_<family>")
    if "path" not in _keys(config, "data"):
        raise SettingsError("model=pretrained needs data=latents or data=folder")
    for group, name, example in (("model", "pretrained", "my-pipeline"), ("data", "path", "latents")):
        if OmegaConf.is_missing(config[group], name):
            raise SettingsError(f"{group}.{name} must be given, for example {group}.{name}={example}")


def check_finetuning(config: DictConfig, *, data_parallel: int) -> None:
    """Check settings, pipeline folder and data, after `check_groups`. Raises: SettingsError: the first error found."""
    for setting in _SETTINGS:
        setting.check(config)
    check_components(config)
    _check_lora(config)
    _check_weighting(config)
    _check_quantize(config)
    _check_offload(config)
    _check_compile(config)
    check_prompts(config)
    check_transformers(config)
    rows = _check_data(config)
    check_cache(config)
    _check_tokens(config, rows)
    _check_validation(config, rows)
    held_out = read(config, "data.validation")
    if rows and held_out >= len(rows):
        raise SettingsError(f"data.validation={held_out} must be less than {len(rows)}, the number of samples")
    check_mixture(config, data_parallel=data_parallel)


def _check_validation(config: DictConfig, rows: Sequence[Mapping[str, Any]]) -> None:
    every, held_out = read(config, "validation.every"), read(config, "data.validation")
    if read(config, "data.kind") == "latents":
        has_own = any(row.get("use") == "validation" for row in rows)
    else:
        has_own = any(folder.get("use") == "validation" for folder in data_folders(config))
    if has_own and held_out:
        raise SettingsError(
            f"data.validation={held_out} must be 0: the data have a validation set (use=validation), so no other "
            "samples are held out"
        )
    if not has_own and (every is None) != (held_out == 0):
        raise SettingsError(
            f"validation.every={show(every)} and data.validation={held_out} belong together: set both, or neither"
        )


def lora_settings(config: DictConfig) -> LoraSettings | None:
    """Return the settings of the adapters, None without. Raises: SettingsError: the first invalid one."""
    lora = config.get("lora")
    if lora is None:
        return None
    if not OmegaConf.is_dict(lora):
        raise SettingsError(f"lora={show(lora)} is not valid: must be null, or settings such as lora.rank=16")
    for name, rule in rules_of(LoraSettings).items():
        Setting(f"lora.{name}", rule).check(config)
    values: Any = OmegaConf.to_container(lora, resolve=True)
    try:
        return LoraSettings(**{name: value for name, value in values.items() if name != "lr_ratio"})
    except ValueError as error:
        raise SettingsError(str(error)) from None


def _check_lora(config: DictConfig) -> None:
    lora = lora_settings(config)
    if lora is None:
        return
    ratio, precision = read(config, "lora.lr_ratio"), read(config, "precision")
    if lora.lokr is not None and ratio:
        raise SettingsError(f"lora.lr_ratio={ratio} does not work with lora.lokr: leave one out")
    if lora.dora and shards_weights(config):
        raise SettingsError(
            "lora.dora=true does not work with strategy=cp_fsdp, which shards the weights: use strategy=cp"
        )
    if lora.dora and read(config, "model.quantize") is not None:
        raise SettingsError(
            "lora.dora=true does not work with model.quantize: use model.quantize=null or lora.dora=false"
        )
    if lora.file is not None and not Path(lora.file).exists():
        raise SettingsError(f"lora.file={lora.file} does not exist: it must be the folder or file of an adapter")
    if str(precision).endswith("-true") and precision != "32-true":
        raise SettingsError(
            f"precision={precision} would also convert the adapters, which are trained in float32: use "
            "model.dtype=bfloat16 for the base, with precision=32-true or bf16-mixed"
        )


def _check_weighting(config: DictConfig) -> None:
    gamma, weighting = read(config, "objective.min_snr_gamma"), read(config, "objective.weighting")
    if gamma is not None and weighting != "min_snr":
        raise SettingsError(
            f"objective.min_snr_gamma={gamma} has no effect with objective.weighting={show(weighting)}: leave it out, "
            "or use objective.weighting=min_snr"
        )


def _check_quantize(config: DictConfig) -> None:
    quantize = read(config, "model.quantize")
    if quantize is not None:
        check_quantised(config, f"model.quantize={quantize} gives quantised weights")
        if shards_weights(config) and (reason := fsdp_refuses_bytes()):
            raise SettingsError(
                f"model.quantize={quantize} does not work with strategy=cp_fsdp: {reason}, or use strategy=cp, which "
                "keeps the weights whole on each rank"
            )


def _check_compile(config: DictConfig) -> None:
    tiles = read(config, "mlp_tiles", None)
    if tiles is not None and read(config, "model.compile", False):
        raise SettingsError(
            f"mlp_tiles={tiles} does not work with model.compile=true, because tiles are computed outside of "
            "compiled graphs: leave out one of them"
        )


def _check_offload(config: DictConfig) -> None:
    if not read(config, "model.offload"):
        return
    reasons = {
        "lora=null": (config.get("lora") is None, "only frozen weights are kept in host memory: use lora.rank"),
        "strategy=cp_fsdp": (shards_weights(config), "it shards the weights instead: use strategy=cp"),
        "model.component with two experts": (
            len(components_of(config)) > 1,
            "frozen weights are in host memory anyway",
        ),
        "model.compile=true": (read(config, "model.compile"), "compiled blocks cannot get other weights"),
        "activation_checkpointing=none": (
            read(config, "activation_checkpointing") == "none",
            "backward would keep the weights of all blocks on the device: use activation_checkpointing=full",
        ),
    }
    for setting, (refused, reason) in reasons.items():
        if refused:
            raise SettingsError(f"model.offload=true does not work with {setting}: {reason}")


def _check_data(config: DictConfig) -> Sequence[Mapping[str, Any]]:
    """Check the data's path. Returns: the rows of a cache's samples; none for a folder."""
    if read(config, "data.kind") != "latents":
        data_folders(config)
        for name in ("sizes", "frames"):
            Setting(f"data.{name}", _ENCODING[name]).check(config)
        return ()
    Setting("data.path", Text()).check(config)
    path = Path(read(config, "data.path"))
    if not path.exists():
        raise SettingsError(f"data.path={path} does not exist")
    if not (path / "index.json").is_file():
        raise SettingsError(
            f"data.path={path} is no latent cache: make one with lightning-cp precompute, or use data=folder for media"
        )
    if not (path / "contents.json").exists():
        raise SettingsError(f"data.path={path} is not complete: run lightning-cp precompute again to continue it")
    rows = read_file(path / "contents.json", "data.path").get("media")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and type(row.get("tokens")) is int for row in rows):
        raise SettingsError(f"data.path: {path / 'contents.json'} is damaged: run lightning-cp precompute again")
    return rows


def _check_tokens(config: DictConfig, rows: Sequence[Mapping[str, Any]]) -> None:
    """Check that each rank of a context group gets tokens of every sample of a cache."""
    ring, ulysses = read(config, "ring"), read(config, "ulysses")
    fewest = min((row["tokens"] for row in rows), default=ring * ulysses)
    if fewest < ring * ulysses:
        raise SettingsError(
            f"ring={ring} × ulysses={ulysses} shards a sequence over {ring * ulysses} ranks, but a sample of "
            f"{read(config, 'data.path')} has {fewest} tokens: the product must be at most {fewest}"
        )


def check_prompts(config: DictConfig) -> None:
    """Check the pictures from prompts. Raises: SettingsError: prompts and steps do not belong together."""
    group = config.get("sampling")
    if not OmegaConf.is_dict(group) or "prompts" not in group:  # sampling=midpoint
        if read(config, "sampling.every") is not None:
            raise SettingsError("sampling.every needs sampling=prompts to fine-tune, or experiment=finetune_<family>")
        return
    Setting("sampling.fps", Integer(1)).check(config)
    Setting("sampling.at_start", OneOf((True, False))).check(config)
    prompts, every = read(config, "sampling.prompts"), read(config, "sampling.every")
    if (every is None) != (prompts is None):
        raise SettingsError(
            f"sampling.every={show(every)} and sampling.prompts={show(prompts)} belong together: set both, or neither"
        )
    if prompts is not None:
        try:
            sample_prompts_of(prompts, setting="sampling.prompts")
        except ValueError as error:
            raise SettingsError(str(error)) from None
    if not OmegaConf.is_dict(group.get("call")):
        raise SettingsError(
            f"sampling.call={show(group.get('call'))} is not valid: must be arguments such as {{guidance_scale: 3.5}}"
        )


def check_cache(config: DictConfig) -> None:
    """Check a cache against the pipeline's folder, if it is a local one.

    The ranks also check what needs classes of diffusers: facts of the scheduler, and families of other packages.

    Raises: SettingsError: the cache is for another family, or another encoder has made it (also with another
        tokenizer or chat template).
    """
    source, cache = Path(str(read(config, "model.pretrained"))), Path(str(read(config, "data.path")))
    if read(config, "data.kind") != "latents" or not source.is_dir():
        return
    index, kind = read_file(cache / "index.json", "data.path"), read_index(source).get("_class_name")
    family, expected = index.get("family"), family_of_pipeline(kind)
    if family is not None and expected is not None and family != expected:
        raise SettingsError(
            f"data.path={cache} was encoded for {family}, but model.pretrained={source} is a {kind}, of the family "
            f"{expected}: encode the data with this pipeline"
        )
    settings = index.get("settings")
    try:
        check_made_by(cache, settings if isinstance(settings, dict) else {}, source)
    except CacheError as error:
        raise SettingsError(str(error)) from None


def check_mixture(config: DictConfig, *, data_parallel: int) -> None:
    """Check the batches of a fine-tuning run. Raises: SettingsError: the first error found."""
    batch, by_tokens = read(config, "batch_size"), _by_tokens(config)
    if not by_tokens and not read(config, "data.mixed"):
        if batch % data_parallel:
            raise SettingsError(
                f"batch_size={batch} is the global batch and must be a multiple of {data_parallel} groups"
            )
        return
    ranks = data_parallel * read(config, "ring") * read(config, "ulysses")
    groups = max(data_parallel, ranks // min(by_tokens.values(), default=ranks))
    if batch < groups:
        raise SettingsError(
            f"batch_size={batch} is the global batch and must be at least {groups}, the largest number of data groups"
        )


def check_no_degrees(config: DictConfig) -> None:
    """Check a run that is no fine-tuning. Raises: SettingsError: it has degrees."""
    if _by_tokens(config):
        raise SettingsError("degrees.by_tokens needs model=pretrained: other data have samples of one size")


def _by_tokens(config: DictConfig) -> dict[int, int]:
    """Return `degrees.by_tokens`; empty without it. Raises: SettingsError: it is not valid."""
    value = read(config, "degrees.by_tokens")
    if value is None:
        return {}
    plain: Any = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    try:
        check_degrees(
            plain, ring=read(config, "ring"), ulysses=read(config, "ulysses"), shares=read(config, "shares", None)
        )
    except (TypeError, ValueError) as error:
        raise SettingsError(str(error).replace("degrees", "degrees.by_tokens", 1)) from None
    if is_single(config) and plain:
        raise SettingsError("degrees.by_tokens needs context parallelism: use strategy=cp or strategy=cp_fsdp")
    return dict(plain)
