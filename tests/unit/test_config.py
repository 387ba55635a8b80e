"""Settings: names and defaults of diffusers, checked when made, frozen."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig as TheirConfig
from diffusers import ParallelConfig as TheirParallelConfig
from diffusers.models.modeling_utils import ModelMixin
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_cp.config import ContextParallelConfig, ParallelConfig, check_degree, context_config


class DeviceMesh:
    """Properties of a mesh that settings read."""

    def __init__(self, shape: tuple[int, ...], names: tuple[str, ...] | None) -> None:
        self.shape, self.mesh_dim_names = shape, names


def _mesh(**axes: int) -> Any:
    return DeviceMesh(tuple(axes.values()), tuple(axes))


def test_field_names_order_and_defaults_are_those_of_diffusers() -> None:
    theirs = [field for field in fields(TheirConfig) if not field.name.startswith("_")]
    *ours, grid = fields(ContextParallelConfig)
    assert (grid.name, grid.default) == ("grid", None)
    assert {field.name: field.default for field in ours} == {field.name: field.default for field in theirs}
    public = [field.name for field in fields(TheirParallelConfig) if not field.name.startswith("_")]
    assert [field.name for field in fields(ParallelConfig)] == public


def test_degrees_left_out_are_one() -> None:
    config = ContextParallelConfig()
    assert (config.ring_degree, config.ulysses_degree) == (1, 1)
    assert config.mesh_shape == (1, 1)
    assert config.mesh_dim_names == ("ring", "ulysses")
    assert (ContextParallelConfig(2, 3).ring, ContextParallelConfig(2, 3).ulysses) == (2, 3)


def test_degrees_left_out_are_read_from_the_mesh() -> None:
    assert ContextParallelConfig(mesh=_mesh(dp=2, ring=3, ulysses=4)).mesh_shape == (3, 4)
    assert ContextParallelConfig(ring_degree=3, mesh=_mesh(ring=3, fsdp=2, ulysses=4)).mesh_shape == (3, 4)


@pytest.mark.parametrize("name", ["ring_degree", "ulysses_degree"])
@pytest.mark.parametrize(
    ("value", "kind", "valid"),
    [
        (0, ValueError, "at least 1"),
        (-1, ValueError, "at least 1"),
        (1.5, TypeError, "integer of at least 1"),
        ("2", TypeError, "integer of at least 1"),
        (True, TypeError, "integer of at least 1"),
        (2.0, TypeError, "integer of at least 1"),
    ],
)
def test_a_bad_degree_is_refused_by_name(name: str, value: object, kind: type[Exception], valid: str) -> None:
    with pytest.raises(kind, match=rf"{name}={value!r}.*{valid}"):
        ContextParallelConfig(**{name: value})  # type: ignore[arg-type]


def test_a_degree_may_have_a_default() -> None:
    assert check_degree("ring", None, default=4) == 4
    assert check_degree("ring", 2, default=4) == 2


@pytest.mark.parametrize(
    ("settings", "kind", "text"),
    [
        ({"rotate_method": "ring"}, ValueError, "rotate_method='ring' must be one of allgather, alltoall, grid"),
        ({"rotate_method": None}, ValueError, "rotate_method=None"),
        ({"grid": 4}, TypeError, r"grid=4 must be \(rows, columns\)"),
        ({"grid": (2, True)}, TypeError, r"grid=\(2, True\) must be"),
        ({"grid": (2, 2), "ring_degree": 4}, ValueError, r"grid=\(2, 2\) needs rotate_method='grid', not 'allgather'"),
        (
            {"grid": (2, 3), "ring_degree": 4, "rotate_method": "grid"},
            ValueError,
            r"grid=\(2, 3\) must be.*ring=4: one of \(4, 1\), \(2, 2\), \(1, 4\)",
        ),
        ({"convert_to_fp32": 1}, TypeError, "convert_to_fp32 must be True or False, not 1"),
        ({"ulysses_anything": "yes"}, TypeError, "ulysses_anything"),
        ({"ring_anything": None}, TypeError, "ring_anything"),
        ({"mesh": (2, 2)}, TypeError, "mesh must be a torch DeviceMesh, not tuple"),
        ({"mesh": DeviceMesh((2, 2), None)}, ValueError, "without names.*'ring' and 'ulysses'"),
        ({"mesh": _mesh(ring=2, tp=2)}, ValueError, r"\('ring', 'tp'\).*'ring' and 'ulysses'"),
        ({"mesh": _mesh(ulysses=2, ring=2)}, ValueError, "'ring' must come before 'ulysses'"),
        (
            {"mesh": _mesh(ring=2, ulysses=1), "ring_degree": 4},
            ValueError,
            "ring_degree=4 contradicts the mesh.*size 2",
        ),
        ({"mesh": _mesh(ring=2, ulysses=3), "ulysses_degree": 1}, ValueError, "ulysses_degree=1 contradicts"),
    ],
)
def test_a_bad_setting_is_refused_by_name(settings: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        ContextParallelConfig(**settings)


@pytest.mark.parametrize(
    ("ring", "expected"),
    [(1, (1, 1)), (2, (2, 1)), (4, (2, 2)), (6, (2, 3)), (7, (7, 1)), (8, (2, 4)), (1024, (32, 32))],
)
def test_the_ranks_of_a_ring_stand_in_the_grid_with_the_fewest_bytes(ring: int, expected: tuple[int, int]) -> None:
    assert ContextParallelConfig(ring, rotate_method="grid").grid_shape == expected
    assert ContextParallelConfig(ring).grid_shape == (ring, 1)
    assert ContextParallelConfig(ring, rotate_method="grid", grid=[1, ring]).grid_shape == (1, ring)  # type: ignore[arg-type]


def test_settings_are_frozen_and_can_be_compared_copied_and_pickled() -> None:
    config = ContextParallelConfig(2, 3, rotate_method="alltoall")
    with pytest.raises(FrozenInstanceError):
        config.ring_degree = 4  # type: ignore[misc]
    for same in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), replace(config)):
        assert same == config
        assert hash(same) == hash(config)
    both = ParallelConfig(context_parallel_config=config)
    assert pickle.loads(pickle.dumps(both)) == copy.deepcopy(both) == both


@pytest.mark.parametrize("flag", ["ulysses_anything", "ring_anything"])
def test_the_anything_flags_are_accepted(flag: str) -> None:
    config = ContextParallelConfig(2, 2, **{flag: True})  # type: ignore[arg-type]
    assert config.mesh_shape == (2, 2)


def test_all_four_kinds_of_settings_are_read() -> None:
    ours = ContextParallelConfig(ring_degree=2, convert_to_fp32=False)
    assert context_config(ours) is ours
    assert context_config(ParallelConfig(ours)) is ours
    theirs = TheirConfig(ring_degree=2, convert_to_fp32=False)
    assert context_config(theirs) == ours
    assert context_config(TheirParallelConfig(context_parallel_config=theirs)) == ours
    assert ParallelConfig(theirs).context_parallel_config == ours  # type: ignore[arg-type]
    assert context_config(TheirConfig(ulysses_degree=3, ulysses_anything=True)).mesh_shape == (1, 3)


def test_degrees_that_diffusers_filled_in_are_read_from_its_mesh() -> None:
    mesh = _mesh(ring=2, ulysses=3)
    assert context_config(TheirConfig(ring_degree=2, mesh=mesh)).mesh_shape == (2, 3)
    with pytest.raises(ValueError, match="ring_degree=4 contradicts"):
        context_config(TheirConfig(ring_degree=4, mesh=mesh))


@pytest.mark.parametrize("config", [None, 2, {"ring_degree": 2}, SimpleNamespace(ring_degree=2), ContextParallelConfig])
def test_other_objects_are_refused(config: object) -> None:
    with pytest.raises(TypeError, match="parallel_config must be a ContextParallelConfig or ParallelConfig"):
        context_config(config)


def test_parallel_settings_without_context_are_refused() -> None:
    with pytest.raises(ValueError, match="context_parallel_config is None"):
        context_config(ParallelConfig())


def test_tensor_parallelism_is_refused() -> None:
    from diffusers.models._modeling_parallel import TensorParallelConfig

    theirs = TheirParallelConfig(tensor_parallel_config=TensorParallelConfig(tp_degree=2))
    with pytest.raises(ValueError, match=r"tensor_parallel_config=TensorParallelConfig\(\.\.\.\) is not supported"):
        context_config(theirs)
    with pytest.raises(ValueError, match="is not supported"):
        ParallelConfig(tensor_parallel_config=TensorParallelConfig())  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [ContextParallelConfig(2), ParallelConfig(ContextParallelConfig(2))])
def test_run_time_state_of_diffusers_is_missing_with_the_way_out(config: object) -> None:
    for name in ("setup", "_rank", "_mesh", "_flattened_mesh"):
        with pytest.raises(AttributeError, match=rf"'{name}'.*apply_context_parallel\(model, config\)"):
            getattr(config, name)
        assert not hasattr(config, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'ring_degre'$"):
        config.ring_degre  # type: ignore[attr-defined]


@pytest.mark.parametrize("config", [ContextParallelConfig(2), ParallelConfig(ContextParallelConfig(2))])
def test_diffusers_own_engine_never_runs_with_our_settings(config: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)  # without devices it dies before it looks
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=4, num_layers=1, norm_num_groups=1)
    assert isinstance(model, ModelMixin)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises((AttributeError, TypeError, ValueError), match="apply_context_parallel"):
            model.enable_parallelism(config=config)  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()
