"""Sample from a run of lightning-cp train, or with a diffusers pipeline, on one rank or several.

    lightning-cp sample                                     the newest run under outputs
    lightning-cp sample strategy=cp ring=2 cfg=2            on four ranks
    lightning-cp sample source=my/pipeline "prompts=[a cat]"  a pipeline's folder, or its id on the Hub
    lightning-cp sample cache=first_block cache.threshold=0.1  with a step cache

It starts the ranks itself. `--help` lists the settings.
"""

import inspect
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from lightning_cp.files import writing_new
from lightning_cp.recipes import terminal
from lightning_cp.recipes.runs.command import command, reads_settings
from lightning_cp.recipes.runs.recipe import run_recipe
from lightning_cp.recipes.runs.sampling import check_sampling
from lightning_cp.recipes.terminal import rich_text


@reads_settings
def sample(config: DictConfig) -> None:
    """Load, sample, write and report on every rank. (The launching process needs none of these imports.)"""
    from hydra.utils import instantiate

    from lightning_cp.config import ContextParallelConfig
    from lightning_cp.recipes.sampling.album import Album
    from lightning_cp.recipes.training.run import quiet_lightning

    fabric: Any = instantiate(config.trainer)
    with quiet_lightning():
        fabric.launch()
    folder = Path(fabric.broadcast(config.run_dir))
    album = Album(folder / "samples", config.format, config.fps)
    context = getattr(fabric.strategy, "context", None)
    parallel = ContextParallelConfig() if context is None else context.config
    seconds = (from_pipeline if config.trained is None else from_run)(config, fabric, album, parallel)
    has_sheet = album.draw_sheet(folder / "contact_sheet.png")
    if fabric.is_global_zero:
        summarise_sampling(folder, seconds, config, has_sheet=has_sheet)


def from_run(config: DictConfig, fabric: Any, album: Any, parallel: Any) -> dict[str, float]:
    """Sample the classes of a run with its EMA weights. Returns: seconds per stage."""
    import torch
    from tqdm import tqdm

    from lightning_cp.engine import apply_context_parallel
    from lightning_cp.finetune.adapters.lora_file import load_loras
    from lightning_cp.pipelines import sampling_ranks
    from lightning_cp.recipes.digits.recognise import recognise_digits
    from lightning_cp.recipes.sampling.step_cache import CachedSteps, enable_cache, skipped_fraction
    from lightning_cp.recipes.sampling.trained import SharedGuidance, load_denoiser
    from lightning_cp.recipes.training.precision import WithPrecision
    from lightning_cp.sampling import SamplingSettings, draw_samples
    from lightning_cp.training.ranks import DataShard

    started, trained = time.perf_counter(), config.trained
    ranks = sampling_ranks(parallel, cfg=config.cfg, shares=config.shares)
    module: Any = load_denoiser(Path(config.run))
    if config.lora is not None:
        denoiser = SimpleNamespace(transformer=module.transformer, components={"transformer": module.transformer})
        load_loras(denoiser, config.lora, config.lora_scale)
    module = module.to(fabric.device)
    num_steps = config.num_inference_steps or trained.num_inference_steps
    if ranks.context.context_size > 1 or config.get("cache") is not None:
        apply_context_parallel(module.transformer, parallel, shares=config.shares)
    steps = None
    if config.get("cache") is not None:
        steps = CachedSteps(module.transformer, ranks, calls=2 * num_steps)
        enable_cache(config.cache, [module.transformer], lambda: 1000 * steps.time)
    guidance = trained.guidance_scale if config.guidance_scale is None else config.guidance_scale
    labels = [c for c in config.prompts or () for _ in range(config.num_samples or 1)]
    count = len(labels) or config.num_samples or trained.num_samples
    precision, loaded = fabric.strategy.precision, time.perf_counter()
    bar = tqdm(total=num_steps, desc="steps", disable=not (config.progress and fabric.is_global_zero))
    drawn = draw_samples(
        fabric,
        SharedGuidance(WithPrecision(precision.convert_module(module), precision), ranks, around=steps),
        tuple(trained.size),
        settings=SamplingSettings(count, num_steps, guidance, seed=config.seed),
        num_classes=trained.num_classes,
        data_shard=DataShard(ranks.data_rank, ranks.data_size),
        labels=torch.tensor(labels) if labels else None,
        between=bar.update,
    )
    bar.close()
    sampled = time.perf_counter()
    if fabric.is_global_zero:
        for number, pixels in enumerate((drawn.pixels.movedim(1, -1) + 1) / 2):  # [f, h, w, c]
            album.add(number, pixels)
        if trained.is_digits:
            recognition = recognise_digits(drawn.pixels, drawn.labels)
            print(f"A classifier of the real digits recognises {recognition.fraction:.1%} of {count} samples.")
        if config.get("cache") is not None:
            print(
                f"The step cache skipped {skipped_fraction([module.transformer]):.1%} of the calls of cached modules."
            )
    return {"load": loaded - started, "denoise": sampled - loaded, "write": time.perf_counter() - sampled}


def from_pipeline(config: DictConfig, fabric: Any, album: Any, parallel: Any) -> dict[str, float]:
    """Sample with a pipeline; each data group samples its share of the prompts. Returns: seconds per stage."""
    import torch

    from lightning_cp.finetune.adapters.lora_file import load_loras
    from lightning_cp.finetune.load import load_exported, meta_transformers
    from lightning_cp.finetune.pipeline import load_pipeline
    from lightning_cp.pipelines import parallelize_pipeline, read_prompts, sample_prompts
    from lightning_cp.pipelines.components import components_of, planned_transformers
    from lightning_cp.recipes.sampling.stage_times import StageTimes
    from lightning_cp.recipes.sampling.step_cache import enable_cache, skipped_fraction
    from lightning_cp.recipes.settings.formats import check_clip_format

    started = time.perf_counter()
    precisions = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "16-true": torch.float16}
    dtype = precisions[config.precision]
    trained = {name: load_exported(folder, dtype=dtype) for name, folder in (config.transformer or {}).items()}
    by_stage = config.pipe > 1 and config.lora is None and not trained
    on_meta = meta_transformers(config.pipeline, dtype) if by_stage else {}
    pipe: Any = load_pipeline(config.pipeline, dtype, components={**on_meta, **trained})
    if config.lora is not None:
        load_loras(pipe, config.lora, config.lora_scale)
    inputs = call_arguments(config)
    if "image" in inputs and "control_image" in inspect.signature(type(pipe).__call__).parameters:
        inputs["control_image"] = inputs.pop("image")
    check_clip_format(config.format, type(pipe).__call__, inputs)
    pipe.set_progress_bar_config(disable=not config.progress)
    if config.stages == "together" and not on_meta:
        pipe.to(fabric.device)
    transformers = planned_transformers(pipe, components_of(pipe)).values()
    if config.get("cache") is not None:
        enable_cache(config.cache, transformers, lambda: float(pipe.current_timestep))
    names = ("cfg", "pipe", "patches", "warmup", "vae", "stages", "kernel", "shares", "graphs")
    overrides = {name: config[name] for name in names}
    stall_s = OmegaConf.select(config, "strategy.stall_s", default=None)
    parallelize_pipeline(pipe, parallel, shard=list(config.shard), stall_s=stall_s, **overrides)
    if config.stages == "together" and on_meta:  # each rank has loaded its stage
        pipe.to(fabric.device)
    album.rate_hz = int(getattr(getattr(pipe, "vae", None), "sampling_rate", album.rate_hz))
    times, loaded = StageTimes(), time.perf_counter()
    times.watch(pipe)
    sample_prompts(
        pipe,
        [text for text in read_prompts(config.prompts) for _ in range(config.num_samples or 1)],
        seed=config.seed,
        per_call=config.per_call,
        write=album.add,
        collect=False,
        sound=True,
        **inputs,
    )
    if config.get("cache") is not None and fabric.is_global_zero:
        print(f"The step cache skipped {skipped_fraction(transformers):.1%} of the calls of cached modules.")
    sampling = times.encode_s + times.denoise_s + times.decode_s
    stages = {"encode": times.encode_s, "denoise": times.denoise_s, "decode": times.decode_s}
    write = time.perf_counter() - loaded - sampling
    return {"load": loaded - started, **stages, "write": write, "fastest_call": times.fastest_call_s}


def call_arguments(config: DictConfig) -> dict[str, Any]:
    """Return the arguments of the pipeline's call from the settings."""
    from lightning_cp.finetune.media.images import open_image

    names = ("num_inference_steps", "guidance_scale", "negative_prompt", "image")
    arguments = {name: config[name] for name in names if config[name] is not None}
    arguments |= dict(OmegaConf.to_container(config.call))  # type: ignore[arg-type]
    if "image" in arguments:
        with open_image(arguments["image"]) as image:
            arguments["image"] = image.convert("RGB")
    return arguments


def summarise_sampling(folder: Path, seconds: dict[str, float], config: DictConfig, *, has_sheet: bool) -> None:
    """Print the duration of each stage and the paths of the results."""
    with writing_new(folder / "timings.json", "The samples are kept") as path:
        path.write_text(json.dumps({name: round(s, 4) for name, s in seconds.items()}) + "\n")
    stages = f"pipe {config.pipe} × " if config.pipe > 1 else ""
    ranks = f"data {config.data_parallel} × cfg {config.cfg} × {stages}ring {config.ring} × ulysses {config.ulysses}"
    table = Table()
    for name in seconds:
        table.add_column(name.replace("_", " "), justify="right")
    table.add_row(*(f"{s:.2f} s" for s in seconds.values()))
    console = terminal.console()
    console.print(f"{rich_text(config.run or config.pipeline)}\non {ranks}", highlight=False, soft_wrap=True)
    console.print(table)
    sheet = "  contact_sheet.png" if has_sheet else ""
    console.print(f"{rich_text(folder)}\n  samples/{sheet}  timings.json", highlight=False, soft_wrap=True)


@command("sample")
def main(config: DictConfig) -> float | None:
    """Check the settings and start the ranks."""
    return run_recipe(config, sample, check=check_sampling)


if __name__ == "__main__":
    main()
