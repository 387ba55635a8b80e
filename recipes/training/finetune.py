"""Build a fine-tuning run: a pretrained transformer, a latent cache, and an adapter or all weights."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from hydra.utils import instantiate
from lightning_utilities.core.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from torch import nn
from typing_extensions import override

from lightning_cp.checkpoint.folder import checkpoint_path
from lightning_cp.data.sampler import OrderSampler
from lightning_cp.errors import DataError, FamilyError
from lightning_cp.export import diffusers_model_of, on_rank_zero
from lightning_cp.files import read_json
from lightning_cp.finetune.adapters.lora import add_lora, check_lora
from lightning_cp.finetune.card import ModelCard
from lightning_cp.finetune.data import hold_out
from lightning_cp.finetune.encoder_files import describe_files
from lightning_cp.finetune.encoders import pipeline_class
from lightning_cp.finetune.experts import Experts, named_transformers
from lightning_cp.finetune.families import Family
from lightning_cp.finetune.families.registry import family_class
from lightning_cp.finetune.fits import check_cache, check_fits, pipeline_facts
from lightning_cp.finetune.host_weights import offload_blocks
from lightning_cp.finetune.latent_cache import LatentCache, LatentData, text_lengths
from lightning_cp.finetune.load import load_transformer, meta_transformer, meta_transformers
from lightning_cp.finetune.objectives import Diffusion, ExpertFlowMatching, FlowMatching, Objective, objective_for
from lightning_cp.finetune.pipeline import is_modular_source
from lightning_cp.finetune.quantize import quantize_base
from lightning_cp.finetune.side import SteeredTransformer, compile_blocks, freeze_base
from lightning_cp.finetune.validation import HeldOutData
from lightning_cp.finetune.weight_files import local_pipeline
from lightning_cp.recipes.settings.components import components_of
from lightning_cp.recipes.settings.finetune import lora_settings
from lightning_cp.recipes.settings.world import is_single
from lightning_cp.recipes.training.finetune_data import batch_order, encoded_folder
from lightning_cp.recipes.training.run import Run
from lightning_cp.recipes.training.setup import TrainingSetup


def build_objective(config: DictConfig, family: Family) -> Objective:
    """Build the objective. Raises: ValueError: a setting is of another kind of objective than the family's."""
    names = components_of(config)
    kind = FlowMatching if family.objective.prediction == "flow" else Diffusion
    valid = [name for name in map(str, config.objective) if name in {x.name for x in fields(kind)}]
    chosen = {str(name): value for name, value in config.objective.items() if value is not None}
    chosen.pop("reduction")  # it weights samples, see `BatchDivision`
    for name, value in chosen.items():
        if name not in valid:
            raise ValueError(
                f"objective.{name}={value} is not valid for {family.name}, which is trained with "
                f"{kind.__name__}: its settings are objective.{', objective.'.join(valid)}"
            )
        if OmegaConf.is_list(value):
            chosen[name] = tuple(list(x) if OmegaConf.is_list(x) else x for x in value)
    if "density" in chosen:
        chosen["density"] = instantiate(chosen["density"])
    component = names if len(names) > 1 else names[0]
    objective = objective_for(
        family, seed=config.seed, component=component, **{"cond_dropout": config.cond_dropout, **chosen}
    )
    if isinstance(objective, ExpertFlowMatching):
        for name, one in objective.objectives.items():
            _report_range(one, family, name, share=f" in {objective.probabilities[name]:.1%} of the steps")
    else:
        _report_range(objective, family, names[0])
    return objective


def _report_range(objective: Objective, family: Family, component: str, *, share: str = "") -> None:
    """Print the noise levels that are trained on rank 0, if they are not all. Args: share: share of the steps."""
    trained, used = getattr(objective, "sigma_range", (0.0, 1.0)), family.sigma_range(component)
    if trained == used == (0.0, 1.0):
        return
    text = f"{component} is trained on {trained[0]:g} < sigma <= {trained[1]:g}{share}"
    if not used[0] <= trained[0] < trained[1] <= used[1]:
        text = (
            f"warning: {text} (objective.sigma_range), but the pipeline uses it for {used[0]:g} < sigma <= {used[1]:g} "
            "only: leave objective.sigma_range out to train on these"
        )
    rank_zero_only(print)(text, flush=True)


BEST = "best"  # folder of the export with the lowest validation loss
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class FineTune(TrainingSetup):
    """Fine-tuning of a pretrained transformer.

    Args:
        cache: encoded samples.
        held_out: samples for validation; None without.
        validation_losses: losses so far, by step.
    """

    cache: LatentCache
    held_out: HeldOutData | None = None
    validation_losses: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, config: DictConfig) -> FineTune:
        """Open the cache and build the objective. Raises: ValueError: the settings, the cache or the pipeline."""
        cache = LatentCache(config.data.path if config.data.kind == "latents" else encoded_folder(config))
        family = cache.family()
        _check_family(config, family)
        _check_dropout(config, family)
        _check_trained(config, family)
        _check_parts(config, cache, family)
        _check_validation(config, cache)
        objective = build_objective(config, family)
        # context-parallel blocks are compiled for each length of the text: let there be few
        lengths = text_lengths(family.text.length) if config.model.compile and not is_single(config) else ()
        data = LatentData(cache, seed=config.seed, lengths=lengths)
        training, held_out = hold_out(data, config.data.validation, seed=config.seed)
        return cls(config, training, family, objective, cache, held_out)

    @override
    def denoiser(self) -> nn.Module:
        names, side = components_of(self.config), self.family.components.side
        trained = {name: self._trained(name) for name in names}
        if len(names) > 1:
            return Experts(trained)
        if side is None:
            return trained[names[0]]
        base = self._loaded("transformer", _DTYPES[self.config.model.dtype]).requires_grad_(False)
        return SteeredTransformer(self._prepared(base), trained[side.component], side)

    def _trained(self, component: str) -> nn.Module:
        """Load a model of which weights are trained: all, those that the family names, or those of adapters."""
        config, lora, trained = self.config.model, lora_settings(self.config), components_of(self.config)
        if lora is not None:
            empty = {} if self.shards_weights else meta_transformers(config.pretrained, _DTYPES[config.dtype])
            if component in empty:  # its errors come before the weights are loaded
                check_lora(empty[component], lora, family=self.family, component=component, trained=trained)
        model = self._loaded(component, _DTYPES[config.dtype] if self.family.components.side is None else torch.float32)
        if config.quantize is not None:
            quantize_base(model, config.quantize)
        if lora is not None:
            add_lora(model, lora, family=self.family, component=component, trained=trained, seed=self.config.seed)
        else:
            model.requires_grad_(True)
            freeze_base(model, self.family)
        return self._prepared(model)

    def _loaded(self, component: str, dtype: torch.dtype) -> Any:
        load = meta_transformer if self.shards_weights else load_transformer
        return load(self.config.model.pretrained, component, dtype=dtype)

    def _prepared(self, model: nn.Module) -> nn.Module:
        model.train()
        self.checkpointed(model)
        if self.config.model.offload:
            offload_blocks(model)
        if self.config.model.compile:
            compile_blocks(model)
        return model

    @override
    def module_settings(self) -> dict[str, Any]:
        quantiles, names = self.config.validation.quantiles, components_of(self.config)
        settings = {"held_out": self.held_out, "quantiles": tuple(quantiles), "component": names[0]}
        settings["lora_lr_ratio"] = None if self.config.lora is None else self.config.lora.lr_ratio
        return {**super().module_settings(), **settings}

    @override
    def sampler(self, strategy: Any) -> OrderSampler:
        return batch_order(self.config, self.dataset, self.family, strategy)

    @property
    @override
    def tokens(self) -> int:
        return round(sum(row.tokens for row in self.cache.rows) / len(self.cache))

    @property
    @override
    def base(self) -> str | None:
        side = self.family.components.side
        if self.config.lora is None and side is None and not self.family.trained:
            return None
        source = self.config.model.pretrained
        names = components_of(self.config) if side is None else ["transformer"]
        files = describe_files(source, names)
        weights = f" in {self.config.model.quantize}" if self.config.model.quantize is not None else ""
        return ", ".join(f"{name} {files.get(name, source)}{weights}" for name in sorted(names))

    @override
    def validate(self, run: Run) -> float | None:
        every, step = self.config.validation.every, run.state.step
        if self.held_out is None or every is None or (step % every and step != self.config.max_steps):
            return None
        with run.state.average.swapped_in(run.state.module):
            loss = run.tuning.validate(run.ranks, run.data_shard).loss
            if loss < min(self.validation_losses.values(), default=math.inf):
                run.tuning.export(run.folder / BEST)
        self.validation_losses[step] = loss
        return loss

    @override
    def export(self, run: Run) -> None:
        with run.state.average.swapped_in(run.state.module):
            run.tuning.export(checkpoint_path(run.folder / "saved", run.state.step))

    @override
    def finish(self, run: Run) -> None:
        with run.state.average.swapped_in(run.state.module):
            folder = run.tuning.export(run.folder)
        on_rank_zero(lambda: self._card(run).write(folder))

    def _card(self, run: Run) -> ModelCard:
        config, rows = self.config, self.cache.rows
        sizes = Counter((row.frames, row.height, row.width) for row in rows)
        overrides = run.folder / ".hydra" / "overrides.yaml"
        words: Any = OmegaConf.to_container(OmegaConf.load(overrides)) if overrides.is_file() else []
        held_out = 0 if self.held_out is None else len(self.held_out)
        return ModelCard(
            base=_without_folders(config.model.pretrained),
            family=self.family.name,
            command=shlex.join(["lightning-cp", "train", *shown_settings(words)]),
            steps=run.state.step,
            topology=f"data {config.data_parallel} × ring {config.ring} × ulysses {config.ulysses}",
            samples=len(rows) - held_out,
            held_out=held_out,
            captions=len({caption for row in rows for caption in row.captions}),
            sizes=sizes,
            adapter=None if config.lora is None else _adapter(config, run),
            component=components_of(config)[0],
            other_components=components_of(config)[1:],
            loads_adapters=hasattr(pipeline_class(config.model.pretrained), "load_lora_weights")
            and (config.lora is None or config.lora.lokr is None),
            is_modular=is_modular_source(config.model.pretrained),
            losses=self.validation_losses,
        )


# What a card may show: neither secrets of loggers nor values of the user's own are among them.
_SHOWN = (
    *("activation_checkpointing", "batch_size", "cond_dropout", "data", "data_parallel", "degrees", "devices"),
    *("ema_decay", "experiment", "gradient_clip_val", "grid", "kernel", "lora", "lr_cycles", "lr_schedule", "lr_steps"),
    *("max_steps", "micro_batch_size", "mlp_tiles", "model", "num_nodes", "objective", "on_nonfinite", "optim"),
    *("precision", "ring", "rotate_method", "seed", "shares", "strategy", "trainer", "ulysses", "validation"),
    "warmup_steps",
)
_FOLDERS = re.compile(r"(?<![\w:/.~}-])(?:~|/)(?:[^,'\"\]}/=:]*/)+(?=[^/])")  # of absolute paths, also with spaces


def shown_settings(overrides: Sequence[str]) -> list[str]:
    """Return those settings of a command that its card shows, without the folders of absolute paths."""
    words = [" ".join(word.split()) for word in overrides if re.split(r"[.=@]", word.lstrip("+~"))[0] in _SHOWN]
    return [_without_folders(word) for word in words]


def _without_folders(text: Any) -> Any:
    return _FOLDERS.sub("", text) if isinstance(text, str) else text


def _check_family(config: DictConfig, family: Family) -> None:
    """Raise FamilyError if the cache was made for another family than the pipeline's; see also `pipeline_class`."""
    kind = pipeline_class(config.model.pretrained)
    expected = family_class(kind).name
    if expected != family.name:
        raise FamilyError(
            f"data.path={config.data.path} was encoded for {family.name}, but model.pretrained="
            f"{config.model.pretrained} is a {kind.__name__}, of the family {expected}: encode the data with this "
            "pipeline"
        )


def _check_trained(config: DictConfig, family: Family) -> None:
    """Raise FamilyError if a model or an adapter is to be trained that the family does not train."""
    side, names = family.components.side, components_of(config)
    component = " and ".join(names)
    if side is not None and names != [side.component]:
        raise FamilyError(
            f"model.component={component} must be {side.component} for {family.name}, which trains it with the "
            f"transformer frozen: use experiment=finetune_{family.name}"
        )
    if config.lora is None or family.lora_targets:
        return
    if side is not None or family.trained:
        raise FamilyError(
            f"lora must be null for {family.name}, which trains weights of its {component} without adapters: use "
            f"experiment=finetune_{family.name}"
        )
    raise FamilyError(
        f"lora must be null for {family.name}: in diffusers, its transformer takes no adapters. With lora=null all "
        "weights are trained"
    )


def _check_dropout(config: DictConfig, family: Family) -> None:
    """Raise FamilyError if captions are to be dropped, but each text belongs to one sample."""
    if config.cond_dropout and family.text.sees_media:
        raise FamilyError(
            f"cond_dropout={config.cond_dropout} must be 0 for {family.name}: its text encoder sees the reference, so "
            "there is no text of the empty caption to put in place of a dropped one"
        )


def _check_parts(config: DictConfig, cache: LatentCache, family: Family) -> None:
    """Raise FamilyError if the transformer does not take what the encoders have made."""
    import diffusers

    source = config.model.pretrained
    for component in components_of(config):
        folder = local_pipeline(source, component, setting="model.pretrained")
        settings = read_json(folder / component / "config.json")
        if not hasattr(diffusers, str(settings.get("_class_name"))):
            raise FamilyError(
                f"model.pretrained={source}: {component}/config.json has _class_name={settings.get('_class_name')!r}, "
                "which is no class of diffusers"
            )
        check_fits(source, component, family, settings, cache.sample(0))
    if family.components.side is not None:
        base = read_json(local_pipeline(source, "transformer", setting="model.pretrained") / "transformer/config.json")
        check_fits(source, "transformer", family, base, cache.sample(0))
    facts = pipeline_facts(folder, family.facts)
    replaced = [name for name in facts if config.objective.get(name) is not None]
    check_cache(cache.folder, family, cache.sample(0), source, facts, replaced)


def _check_validation(config: DictConfig, cache: LatentCache) -> None:
    """Raise DataError if holding out samples would leave none for training."""
    files = len({row.source for row in cache.rows if row.use == "train"})
    if config.data.validation >= files:
        raise DataError(
            f"data.validation={config.data.validation} must be less than {files}, the number of files in data.path="
            f"{config.data.path}: samples of one file are held out together"
        )


def _adapter(config: DictConfig, run: Run) -> dict[str, Any]:
    """Return the adapter's settings, with rank and alpha: they may come from the defaults or from `lora.file`."""
    transformer = next(iter(named_transformers(run.tuning.transformer, run.tuning.component).values()))
    model: Any = diffusers_model_of(transformer)
    (adapter,) = model.peft_config.values()
    values = {name: _without_folders(value) for name, value in config.lora.items()}
    return {**values, "rank": adapter.r, "alpha": getattr(adapter, "lora_alpha", None) or adapter.alpha}
