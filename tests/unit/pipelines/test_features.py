"""Features of a parallel pipeline: all are undone in reverse order, also after an error in any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cp import ContextParallelConfig, parallelize_pipeline, unparallelize_pipeline
from lightning_cp.engine.apply import installed_on
from lightning_cp.errors import PlanError
from lightning_cp.pipelines import apply
from lightning_cp.pipelines.features import FEATURES
from lightning_cp.pipelines.settings import PipelineSettings
from lightning_cp.pipelines.state import ParallelPipeline
from lightning_cp.undoable import Undo
from tests.pipelines import PIPES

Changes = Callable[[ParallelPipeline], Iterable[Undo]]


def _parallelize(pipe: Any) -> None:
    parallelize_pipeline(pipe, ContextParallelConfig(), patches=2, stages="offload")


def _state(pipe: Any) -> dict[str, Any]:
    """The class and the attributes of the pipeline and of all modules, without those that hold values."""
    things = {"": pipe}
    for name, x in pipe.components.items():
        if isinstance(x, nn.Module):
            things |= {f"{name}.{path}": module for path, module in x.named_modules()}
    hooks = {"_forward_pre_hooks", "_forward_hooks"}
    return {
        name: (type(x), sorted(vars(x)), [len(vars(x).get(hook, ())) for hook in sorted(hooks)])
        for name, x in things.items()
    }


def _fails(changes: Changes, state: ParallelPipeline) -> Iterator[Undo]:
    yield from changes(state)
    raise ArithmeticError("the last change of this feature")


def test_an_error_undoes_this_feature_and_the_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = PIPES["flux"].make()
    before = _state(pipe)
    for number, failing in enumerate(FEATURES):
        features: list[Changes] = [*FEATURES[:number], partial(_fails, failing), *FEATURES[number + 1 :]]
        monkeypatch.setattr(apply, "FEATURES", features)
        with pytest.raises(ArithmeticError):
            _parallelize(pipe)
        assert _state(pipe) == before, failing
        assert installed_on(pipe.transformer) is None
    monkeypatch.undo()
    _parallelize(pipe)
    assert installed_on(pipe.transformer) is not None
    assert _state(pipe) != before
    unparallelize_pipeline(pipe)
    assert _state(pipe) == before


def test_features_are_undone_in_reverse_order(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def feature(name: str, state: ParallelPipeline) -> Iterator[Undo]:
        for change in "ab":
            order.append(f"install {name}{change}")
            yield partial(order.append, f"undo {name}{change}")

    monkeypatch.setattr(apply, "FEATURES", [partial(feature, "1"), partial(feature, "2")])
    pipe = PIPES["flux"].make()
    _parallelize(pipe)
    names = ["1a", "1b", "2a", "2b"]
    assert order == [f"install {name}" for name in names]
    unparallelize_pipeline(pipe)
    assert order[4:] == [f"undo {name}" for name in reversed(names)]


def _settings(**changed: Any) -> PipelineSettings:
    given: dict[str, Any] = {"parallel_config": ContextParallelConfig(), "cfg": 1, "pipe": 1}
    given |= {
        "graphs": False,
        "patches": 1,
        "warmup": 1,
        "vae": "auto",
        "shard": (),
        "stages": "together",
        "kernel": "auto",
    }
    return PipelineSettings(**given | {"check_peers": "sampled", "stall_s": 60.0, "shares": None} | changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cfg": 0}, "cfg=0 must be at least 1"),
        ({"pipe": 1.5}, "pipe=1.5 must be an integer"),
        ({"patches": 0}, "patches=0 must be at least 1"),
        ({"warmup": 2}, "warmup=2 has no meaning with patches=1"),
        ({"patches": 2, "warmup": 0}, "warmup=0 must be at least 1"),
        ({"stages": "away"}, "stages='away' must be one of 'together', 'offload', 'release'"),
        ({"vae": "maybe"}, "vae='maybe' must be True, False or 'auto'"),
        ({"stall_s": -1}, "stall_s=-1 must be"),
    ],
)
def test_invalid_settings_are_refused_when_they_are_made(changed: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        _settings(**changed)


def test_settings_are_normalised() -> None:
    settings = _settings(pipe=(2, 3), cfg=None, shard="transformer")
    assert (settings.num_stages, settings.cfg, settings.shard) == (2, 1, ("transformer",))


def test_a_rank_without_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE=2, but there is no process group"):
        parallelize_pipeline(PIPES["flux"].make(), ContextParallelConfig())


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.default(1)
def test_a_compiled_transformer_keeps_to_what_works(when: str) -> None:
    pipe = PIPES["flux"].make()
    if when == "before":
        pipe.transformer.compile(mode="reduce-overhead")
        with pytest.raises(PlanError, match=r"mode='reduce-overhead'.*use parallelize_pipeline\(graphs=True\)"):
            parallelize_pipeline(pipe, ContextParallelConfig())
        pipe.transformer.compile(backend="eager")
        with pytest.raises(PlanError, match="is compiled, which patches and stages do not support"):
            parallelize_pipeline(pipe, ContextParallelConfig(), patches=2)
        pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    before = pipe.transformer
    parallelize_pipeline(pipe, ContextParallelConfig())
    if when == "after":
        with pytest.raises(PlanError, match=r"mode='reduce-overhead'"):
            pipe.transformer.compile(mode="reduce-overhead")
    assert type(pipe.transformer).__name__ == "FluxTransformer2DModel"
    unparallelize_pipeline(pipe)
    assert pipe.transformer is before
