"""docs/distributed_sampling*.md: their code blocks run unchanged, and what they say about them and errors is true."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn

from lightning_cp.errors import KernelError, PeerMismatchError, PlanError
from tests.e2e.recipe import ROOT
from tests.harness import RankPool

PAGE = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("distributed_sampling*.md")))
BLOCKS = {text.splitlines()[0].lstrip("# "): text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)}
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d")
SETTINGS = {"num_inference_steps": 2, "output_type": "latent", "max_sequence_length": 24}
EVEN = {**SETTINGS, "height": 64, "width": 96}  # 24 tokens
UNEVEN = {**SETTINGS, "height": 80, "width": 112}  # 35
CLOSE = 1e-6


@pytest.fixture(scope="module")
def folder(run_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pipeline `tiny-flux`."""
    path: Path = tmp_path_factory.mktemp("sampling")
    run_ranks(1, _save, path, init=False)
    return path


@pytest.fixture
def here(folder: Path) -> Iterator[Path]:
    """The same, without the pictures of other tests."""
    yield folder
    for picture in folder.glob("*.png"):
        picture.unlink()


def _save(rank: int, world: int, folder: Path) -> None:
    """Its autoencoder makes pictures 8 times smaller, as the true one does."""
    from tests.pipelines.flux import TINY
    from tests.pipelines.vaes import kl

    with _quiet():
        pipe = TINY["flux"].make()
        pipe = type(pipe)(**{**pipe.components, "vae": kl(4, levels=4)})
        pipe.save_pretrained(folder / "tiny-flux")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _raised(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """Type and text of what a call raises; twice "" for none."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def _told(raised: tuple[str, str], kind: type[Exception], text: str = "") -> None:
    """An error is of this type and has this text, and the page says both."""
    assert raised[0] == kind.__name__, raised
    assert text in raised[1], raised
    assert kind.__name__ in PAGE
    assert text in PAGE


def _block(rank: int, world: int, folder: Path, name: str, main: bool = True) -> str:
    """Run a block of the page in one of its processes; for scripts that spawn, call the spawned function.

    Returns: the type of error that a process ends with without a prompt, else "".
    """
    from accelerate import PartialState

    with _quiet(), contextlib.chdir(folder):
        try:
            space: dict[str, Any] = {"__name__": "__main__" if main else "spawned"}
            exec(compile(BLOCKS[name], name, "exec"), space)
            if not main:
                space["sample"](rank, world)
        except UnboundLocalError as error:
            return type(error).__name__
        finally:
            PartialState._reset_state()
        return ""


def _load(**given: Any) -> Any:
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained("tiny-flux", **given)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _transformer(**given: Any) -> Any:
    from diffusers import AutoModel

    return AutoModel.from_pretrained("tiny-flux", subfolder="transformer", **given)


def _seed(seed: int = 42) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _dog(pipe: Any, prompt: Any = "a dog", **given: Any) -> Tensor:
    """Latents of a call, by default from the same noise each time."""
    latents: Tensor = pipe(prompt, **{**EVEN, "generator": _seed(), **given}).images
    return latents


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _everyones(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


# Prompts


def test_prompts_are_split_as_the_guide_has_it(run_ranks: RankPool, here: Path) -> None:
    assert run_ranks(2, _block, here, "split_prompts.py", init=False) == [""] * 2
    assert sorted(x.name for x in here.glob("*.png")) == ["result_0.png", "result_1.png"]


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(3, marks=pytest.mark.full)])
def test_all_prompts_are_written(run_ranks: RankPool, here: Path, world: int) -> None:
    assert run_ranks(world, _block, here, "our_prompts.py", init=False) == [""] * world
    assert sorted(x.name for x in here.glob("*.png")) == ["ours_0.png", "ours_1.png", "ours_2.png"]


def _accelerates(rank: int, world: int, folder: Path) -> dict[str, Any]:
    from accelerate import PartialState

    from lightning_cp import ContextParallelConfig, parallelize_pipeline

    with _quiet(), contextlib.chdir(folder):
        try:
            careless = PartialState()
            processes = (careless.process_index, careless.num_processes)
            PartialState._reset_state()
            state, pipe = PartialState(cpu=True), _load()
            shares = {}
            for count, padded in ((3, False), (1, False), (1, True)):
                with state.split_between_processes(["a dog", "a cat", "a bird"][:count], apply_padding=padded) as share:
                    shares[count, padded] = share
            with state.split_between_processes(["a dog"]) as share:
                spare = _raised(pipe, share, **EVEN)
            with state.split_between_processes(["a dog", "a dog"]) as share:
                twice = _everyones(_dog(pipe, share))
            expected = _dog(pipe)
            at_once = _dog(pipe, ["a dog", "a dog"])
            parallelize_pipeline(pipe, ContextParallelConfig(ring_degree=world))
            return {
                "processes without cpu=True": processes,
                "shares": shares,
                "spare": spare,
                "twice": _error(twice[1], twice[0]),
                "at once": _error(at_once[1], at_once[0]),
                "ours in its group": _error(_dog(pipe), expected),
            }
        finally:
            PartialState._reset_state()


def test_what_accelerate_does_with_prompts(run_ranks: RankPool, folder: Path) -> None:
    first, second = run_ranks(2, _accelerates, folder, init=False)
    assert [x["shares"][3, False] for x in (first, second)] == [["a dog", "a cat"], ["a bird"]]
    assert [x["shares"][1, False] for x in (first, second)] == [["a dog"], []]
    assert [x["shares"][1, True] for x in (first, second)] == [["a dog"], ["a dog"]]
    _told(second["spare"], IndexError, "list index out of range")
    assert first["twice"] == 0 < 1e-2 < first["at once"]
    assert [x["processes without cpu=True"] for x in (first, second)] == [(0, 1), (0, 1)]
    assert max(x["ours in its group"] for x in (first, second)) < CLOSE


def _shared_prompts(rank: int, world: int, folder: Path) -> dict[str, Any]:
    from lightning_cp import ContextParallelConfig, parallelize_pipeline, unparallelize_pipeline
    from lightning_cp.pipelines import sample_prompts

    with _quiet(), contextlib.chdir(folder):
        pipe = _load()
        prompts = ["a dog", "a cat", "a cat"]
        alone = [_dog(pipe, [prompt], generator=[_seed(i)])[0] for i, prompt in enumerate(prompts)]
        found: dict[str, Any] = {}
        parallelize_pipeline(pipe, ContextParallelConfig())
        for count in (3, 1):
            written: list[int] = []
            samples = sample_prompts(pipe, prompts[:count], write=lambda i, _: written.append(i), **EVEN)  # noqa: B023
            found[f"written {count}"] = written
            found[f"errors {count}"] = [_error(a, b) for a, b in zip(samples, alone[:count], strict=True)]
        found["the same prompt"] = _error(alone[1], alone[2])
        unparallelize_pipeline(pipe)
        parallelize_pipeline(pipe, ContextParallelConfig(ring_degree=world))
        found["unequal"] = _raised(_dog, pipe, f"prompt {rank}")
        return found


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_what_we_do_with_prompts(run_ranks: RankPool, folder: Path, world: int) -> None:
    ranks = run_ranks(world, _shared_prompts, folder)
    assert sorted(i for x in ranks for i in x["written 3"]) == [0, 1, 2]
    assert [i for x in ranks for i in x["written 1"]] == [0]
    for found in ranks:
        assert [*found["errors 3"], *found["errors 1"]] == [0] * 4
        assert found["the same prompt"] > 1e-2
        _told(found["unequal"], PeerMismatchError)
        assert "prompt has" in found["unequal"][1]


def _without_a_group(rank: int, world: int, folder: Path) -> list[tuple[str, str]]:
    from lightning_cp import ContextParallelConfig, parallelize_pipeline

    with _quiet(), contextlib.chdir(folder):
        pipe = _load()
        configs = (ContextParallelConfig(ring_degree=world), ContextParallelConfig())
        return [_raised(parallelize_pipeline, pipe, config) for config in configs]


def test_without_a_process_group_ranks_are_refused(run_ranks: RankPool, folder: Path) -> None:
    for answers in run_ranks(2, _without_a_group, folder, init=False):
        assert all(kind == "ValueError" and "there is no process group" in told for kind, told in answers)
    assert "without `init_process_group`, `parallelize_pipeline` raises" in PAGE


@pytest.mark.full
def test_spawned_functions_sample(run_ranks: RankPool, here: Path) -> None:
    for name in ("spawn_prompts.py", "our_spawned_prompts.py"):
        assert run_ranks(2, _block, here, name, False, init=False) == [""] * 2
    theirs = {"a_ _d_o_g.png", "a_ _c_a_t.png"}
    assert {x.name for x in here.glob("*.png")} == {*theirs, "spawned_0.png", "spawned_1.png"}
    assert all(name in PAGE for name in theirs)


@pytest.mark.full
def test_a_third_spawned_process(run_ranks: RankPool, here: Path) -> None:
    assert run_ranks(3, _block, here, "spawn_prompts.py", False, init=False) == ["", "", "UnboundLocalError"]
    assert "UnboundLocalError" in PAGE
    assert run_ranks(3, _block, here, "our_spawned_prompts.py", False, init=False) == [""] * 3


# Weights


def _pixels(path: Path) -> Any:
    return np.asarray(Image.open(path)).astype(int)


def test_stages_give_the_same_picture(run_ranks: RankPool, here: Path) -> None:
    assert run_ranks(1, _block, here, "stages.py", init=False) == [""]
    assert run_ranks(2, _block, here, "our_stages.py", init=False) == [""] * 2
    theirs, ours = _pixels(here / "stages.png"), _pixels(here / "our_stages.png")
    assert theirs.shape == (64, 96, 3)
    assert theirs.std() > 1
    assert abs(theirs - ours).max() <= 1


def _held_bytes(module: nn.Module) -> int:
    local = [x.to_local() if hasattr(x, "to_local") else x for x in module.parameters()]
    return sum(x.numel() * x.element_size() for x in local)


def _placed(rank: int, world: int, folder: Path) -> dict[str, Any]:
    from lightning_cp import ContextParallelConfig, parallelize_pipeline

    ring = ContextParallelConfig(ring_degree=world)
    none = dict.fromkeys(["text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae"])
    with _quiet(), contextlib.chdir(folder):
        pipe = _load()
        expected, whole = _dog(pipe), _held_bytes(pipe.transformer)
        found: dict[str, Any] = {
            "balanced": _load(device_map="balanced").hf_device_map,
            "max_memory": _raised(_load, device_map="balanced", max_memory={0: "16GB", 1: "16GB"}),
            "auto": _raised(_load, device_map="auto"),
            "no transformer": _raised(parallelize_pipeline, _load(transformer=None, vae=None), ring),
            "factor without a vae": _load(vae=None).vae_scale_factor,
        }
        embeds, pooled, _ = pipe.encode_prompt(prompt="a dog", prompt_2=None, max_sequence_length=24)
        parallelize_pipeline(pipe, ring, shard=["transformer"])
        found["kept"] = _held_bytes(pipe.transformer) / whole
        found["sharded"] = _error(_dog(pipe), expected)

        stage = _load(transformer=_transformer(device_map="auto"), **none)
        parallelize_pipeline(stage, ring)
        latents = _dog(stage, None, prompt_embeds=embeds.detach(), pooled_prompt_embeds=pooled.detach())
        found["second stage"] = _error(latents, expected)

        spread = dict.fromkeys([name for name, _ in pipe.transformer.named_children()], "cpu")
        spread["single_transformer_blocks"] = "disk"
        spread_model = _transformer(device_map=spread, offload_folder=f"offload-{rank}")
        pipe = _load(transformer=spread_model)
        found["spread, theirs"] = _error(_dog(pipe), expected)
        found["spread, ours"] = _raised(parallelize_pipeline, pipe, ring)
        return found


def test_what_placement_does(run_ranks: RankPool, folder: Path) -> None:
    for found in run_ranks(2, _placed, folder):
        assert found["balanced"] is None
        _told(found["max_memory"], RuntimeError, "Cannot access accelerator device when none is available.")
        _told(found["auto"], NotImplementedError, "auto not supported.")
        _told(found["no transformer"], PlanError)
        assert found["factor without a vae"] == 8
        assert f"{found['kept']:.0%}".replace("%", " %") in PAGE
        assert found["sharded"] < CLOSE
        assert found["second stage"] < CLOSE
        assert found["spread, theirs"] < CLOSE
        _told(found["spread, ours"], PlanError)
        assert "['cpu', 'disk']" in found["spread, ours"][1]


# Tokens


def _cpu_kernel(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **given: Any) -> Any:
    """diffusers' ring needs an LSE from a backend, and none of its own gives it on CPU."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return out.transpose(1, 2), lse.transpose(1, 2)


@contextlib.contextmanager
def _cpu_counts(kernel: bool = False) -> Iterator[None]:
    """diffusers takes the CPU for as many devices as there are ranks; with `kernel`, its ring has one for them."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("torch.accelerator.device_count", dist.get_world_size))
        if kernel:
            name = "diffusers.models.attention_dispatch._native_attention_forward_op"
            stack.enter_context(mock.patch(name, _cpu_kernel))
        yield


def _enabled(pipe: Any, backend: str | None = None, **degrees: Any) -> Any:
    """A pipeline with a transformer that diffusers has made parallel."""
    from diffusers import ContextParallelConfig

    pipe.transformer = _transformer()
    if backend is not None:
        pipe.transformer.set_attention_backend(backend)
    pipe.transformer.enable_parallelism(config=ContextParallelConfig(**degrees))
    return pipe


@contextlib.contextmanager
def _ours(pipe: Any, **degrees: Any) -> Iterator[Any]:
    from lightning_cp import ContextParallelConfig, parallelize_pipeline, unparallelize_pipeline

    pipe.transformer = _transformer()
    cfg = degrees.pop("cfg", 1)
    parallelize_pipeline(pipe, ContextParallelConfig(**degrees), cfg=cfg)
    try:
        yield pipe
    finally:
        unparallelize_pipeline(pipe)


def _theirs_and_ours(rank: int, world: int, folder: Path) -> dict[str, Any]:
    with _quiet(), contextlib.chdir(folder):
        pipe = _load()
        one = {"even": _dog(pipe), "uneven": _dog(pipe, **UNEVEN)}
        found: dict[str, Any] = {"plain": _raised(_enabled, pipe, ulysses_degree=world)}
        with _cpu_counts():
            ulysses = _raised(_dog, _enabled(pipe, ulysses_degree=world))
            found["ulysses"] = ulysses if ulysses[0] else _error(_dog(pipe), one["even"])
            found["uneven"] = _raised(_dog, pipe, **UNEVEN)
            loose = _enabled(pipe, ulysses_degree=world, ulysses_anything=True)
            raised = _raised(_dog, loose)
            found["loose"] = raised if raised[0] else _error(_dog(loose), one["even"])
            found["loose, uneven"] = _raised(_dog, loose, **UNEVEN)
            found["ring"] = _raised(_dog, _enabled(pipe, ring_degree=world))
            found["long text"] = _raised(_dog, pipe, max_sequence_length=512)
        with _cpu_counts(kernel=True):
            found["ring, our kernel"] = _error(_dog(_enabled(pipe, ring_degree=world)), one["even"])
        for name, degrees in (("ring", {"ring_degree": world}), ("ulysses", {"ulysses_degree": world})):
            with _ours(pipe, **degrees):
                found[f"our {name}"] = max(_error(_dog(pipe), one["even"]), _error(_dog(pipe, **UNEVEN), one["uneven"]))
        with _ours(pipe, ulysses_degree=world, ulysses_anything=True):
            found["our loose"] = _error(_dog(pipe, **UNEVEN), one["uneven"])
        return found


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.full) for n in (3, 4))])
def test_what_modes_give(run_ranks: RankPool, folder: Path, world: int) -> None:
    indivisible = "Tensor size along dimension to be sharded must be divisible by mesh size"
    for found in run_ranks(world, _theirs_and_ours, folder):
        _told(found["plain"], ZeroDivisionError, "integer modulo by zero")
        _told(found["ring"], ValueError, "Native attention does not support return_lse=True")
        _told(found["uneven"], AssertionError, indivisible)
        assert max(found[name] for name in ("ring, our kernel", "our ring", "our ulysses", "our loose")) < CLOSE
        if world == 3:
            _told(found["long text"], AssertionError, indivisible)
            _told(found["ulysses"], RuntimeError, "invalid for input of size")
            _told(found["loose"], AssertionError, "Padding head num 2 should be less than new local head num 2")
        else:
            assert max(found["ulysses"], found["loose"]) < CLOSE
            _told(found["loose, uneven"], RuntimeError, "invalid tensor size")


def _misuse(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Missing and repeated calls; ranks with different random states and prompts."""
    from lightning_cp import ContextParallelConfig, parallelize_pipeline

    ring = ContextParallelConfig(ring_degree=world)
    with _quiet(), contextlib.chdir(folder):
        pipe = _load()
        one = [_dog(pipe, prompt) for prompt in ("a dog", "a cat")]
        noises = [_dog(pipe, generator=_seed(seed)) for seed in range(world)]
        with _cpu_counts():
            _enabled(pipe, ulysses_degree=world)
            theirs = _everyones(_dog(pipe, generator=_seed(rank)))
            mixed = _everyones(_dog(pipe, ["a dog", "a cat"][rank % 2]))
            found: dict[str, Any] = {
                "ranks differ by": min(_error(x, theirs[0]) for x in theirs[1:]),
                "their noise": min(_error(x, noise) for x in theirs for noise in noises),
                "mixed ranks": max(_error(x, mixed[0]) for x in mixed),
                "mixed": min(_error(mixed[0], x) for x in one),
                "enabled twice": _raised(pipe.transformer.enable_parallelism, config=ring),
                "ours on theirs": _raised(parallelize_pipeline, pipe, ring),
            }
        with _ours(pipe, ring_degree=world), _cpu_counts():
            found["our noise"] = max(_error(x, noises[0]) for x in _everyones(_dog(pipe, generator=_seed(rank))))
            torch.manual_seed(rank)
            states = _everyones(_dog(pipe, generator=None))
            found["twice"] = _raised(parallelize_pipeline, pipe, ring)
            found["theirs on ours"] = _raised(pipe.transformer.enable_parallelism, config=ring)
        torch.manual_seed(0)
        expected = _dog(pipe, generator=None)
        found["our state"] = max(_error(x, expected) for x in states)
        return found


def test_what_comes_of_unequal_ranks_and_of_both(run_ranks: RankPool, folder: Path) -> None:
    for found in run_ranks(2, _misuse, folder):
        assert min(found["ranks differ by"], found["their noise"], found["mixed"]) > 1e-2
        assert found["mixed ranks"] == 0
        assert max(found["our noise"], found["our state"]) < CLOSE
        for name in ("enabled twice", "theirs on ours"):
            _told(found[name], RuntimeError)
        for name in ("twice", "ours on theirs"):
            _told(found[name], PlanError)


def _backends(rank: int, world: int, folder: Path) -> dict[str, Any]:
    from diffusers import ContextParallelConfig, ParallelConfig

    ulysses = ContextParallelConfig(ulysses_degree=world)
    with _quiet(), contextlib.chdir(folder):
        pipe = _load()
        expected = _dog(pipe)
        found: dict[str, Any] = {}
        for name in ("_native_cudnn", "native", "_native_flash", "_native_math"):
            with _cpu_counts():
                found[name] = _raised(lambda name=name: _dog(_enabled(pipe, name, ring_degree=world)))
            with _ours(pipe, ring_degree=world):
                pipe.transformer.set_attention_backend(name)
                found[f"our {name}"] = _raised(_dog, pipe)
                if not found[f"our {name}"][0]:
                    found[f"our {name}"] = _error(_dog(pipe), expected)
            pipe.transformer.set_attention_backend("native")  # it is all models'
        found["loading"] = _raised(_transformer, parallel_config=ulysses)
        with _cpu_counts():
            pipe.transformer = _transformer(parallel_config=ParallelConfig(context_parallel_config=ulysses))
            found["loaded"] = _error(_dog(pipe), expected)
        with mock.patch("diffusers.pipelines.pipeline_utils.logger.warning") as warning:
            pipe = _load(parallel_config=ulysses)
        found["warnings"] = [str(call.args[0]) for call in warning.call_args_list]
        found["parallel"] = pipe.transformer._parallel_config is not None
        return found


@pytest.mark.full
def test_what_backends_and_parallel_config_give(run_ranks: RankPool, folder: Path) -> None:
    for found in run_ranks(2, _backends, folder):
        _told(found["_native_cudnn"], NotImplementedError)
        _told(found["our _native_cudnn"], KernelError)
        assert "it runs on cuda" in found["our _native_cudnn"][1]
        for name in ("native", "_native_flash", "_native_math"):
            assert found[name][0], name
            assert found[f"our {name}"] < CLOSE
        _told(
            found["loading"], AttributeError, "'ContextParallelConfig' object has no attribute 'tensor_parallel_config'"
        )
        assert found["loaded"] < CLOSE
        assert any("not expected by FluxPipeline and will be ignored" in x for x in found["warnings"])
        assert not found["parallel"]


def _four(rank: int, world: int, folder: Path) -> dict[str, Any]:
    from lightning_cp import ContextParallelConfig, parallelize_pipeline
    from lightning_cp.pipelines import parallel_pipeline
    from tests.pipelines.wan import TINY

    guided = {"negative_prompt": "blurry", "true_cfg_scale": 3.0}
    unified = {"ring_degree": 2, "ulysses_degree": 2}
    with _quiet(), contextlib.chdir(folder):
        pipe = _load()
        expected, expected_guided = _dog(pipe), _dog(pipe, **guided)
        with _cpu_counts():
            found: dict[str, Any] = {"unified": _raised(_dog, _enabled(pipe, **unified))}
        with _cpu_counts(kernel=True):
            found["unified, our kernel"] = _error(_dog(_enabled(pipe, **unified)), expected)
        with _ours(pipe, **unified):
            found["our unified"] = _error(_dog(pipe), expected)
        with _ours(pipe, ring_degree=2, cfg=2):
            found["our cfg"] = _error(_dog(pipe, **guided), expected_guided)
        wan = TINY["wan_two_experts"].make()
        parallelize_pipeline(wan, ContextParallelConfig(ring_degree=2))
        installed = parallel_pipeline(wan)
        found["wan"] = list(installed.transformers) if installed else []
        return found


@pytest.mark.full
def test_unified_attention_and_branches_at_four_ranks(run_ranks: RankPool, folder: Path) -> None:
    for found in run_ranks(4, _four, folder):
        _told(found["unified"], ValueError, "Native attention does not support return_lse=True")
        assert max(found[name] for name in ("unified, our kernel", "our unified", "our cfg")) < CLOSE
        assert found["wan"] == ["transformer", "transformer_2"]


# The scripts, as they are started


def _started(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )


def _write(folder: Path, name: str, extra: str = "") -> str:
    (folder / name).write_text(BLOCKS[name] + extra, encoding="utf-8")
    return name


@pytest.mark.full
@pytest.mark.parametrize(("name", "count"), [("split_prompts.py", 2), ("our_prompts.py", 3), ("our_tokens.py", 1)])
def test_scripts_run_under_torchrun(here: Path, name: str, count: int) -> None:
    done = _started(here, *TORCHRUN, _write(here, name))
    assert done.returncode == 0, done.stderr
    assert len(list(here.glob("*.png"))) == count


@pytest.mark.full
def test_the_guides_script_ends_on_cpu(here: Path) -> None:
    done = _started(here, *TORCHRUN, _write(here, "enable.py"))
    assert done.returncode != 0
    assert "ZeroDivisionError: integer modulo by zero" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("before", [False, True])
def test_accelerate_starts_one_process_on_cpu(here: Path, before: bool) -> None:
    script = _write(here, "split_prompts.py", "print('given', prompt, state.num_processes)\n")
    command = ["--cpu", "--num_processes=2", script] if before else [script, "--num_processes=2"]
    done = _started(here, "-m", "accelerate.commands.launch", *command)
    assert done.returncode == 0, done.stderr
    assert "given ['a dog', 'a cat'] 1" in done.stdout
    assert [x.name for x in here.glob("*.png")] == ["result_0.png"]


@pytest.mark.full
def test_spawning_scripts_need_an_address(here: Path) -> None:
    for name in ("spawn_prompts.py", "our_spawned_prompts.py"):
        done = _started(here, _write(here, name))
        assert "ValueError" in done.stderr
        assert "environment variable MASTER_ADDR expected" in done.stderr
    assert not list(here.glob("*.png"))


@pytest.mark.full
def test_a_spawning_script_under_torchrun_starts_four(here: Path) -> None:
    met = "    dist.init_process_group"  # what comes of it is chance: pictures written twice, an error, or a hang
    script = BLOCKS["spawn_prompts.py"].replace(met, f"    return print('starts', rank, flush=True)\n{met}")
    (here / "four.py").write_text(script, encoding="utf-8")
    done = _started(here, *TORCHRUN, "four.py")
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(f"starts {rank}") for rank in (0, 1)] == [2, 2]
