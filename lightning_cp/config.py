"""Settings of context parallelism: frozen, checked when created, with the names that diffusers uses.

Meshes and groups are built from them in `mesh/groups.py`. Nothing here imports torch at run time, so that a bad setting
fails before any slow import.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, NoReturn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

RotateMethod = Literal["allgather", "alltoall", "grid"]
ROTATE_METHODS: tuple[str, ...] = ("allgather", "alltoall", "grid")
# Names of the kernels in `kernels/choice.py`, in order of preference.
KERNEL_NAMES: tuple[str, ...] = ("auto", "flash", "cudnn", "efficient", "math")
AUTO_TILES = "auto"  # of `mlp_tiles`
CHECK_PEERS: tuple[str, ...] = ("sampled", "first", "always", "off")

_NOT_FOR_DIFFUSERS = (
    "lightning_cp's settings are frozen and carry no run-time state, so diffusers' enable_parallelism and "
    "from_pretrained(parallel_config=...) cannot use them; call "
    "lightning_cp.apply_context_parallel(model, config) on the loaded model instead"
)


@dataclass(frozen=True)
class ContextParallelConfig:
    """Settings for sharding a sample's tokens over ranks and exchanging K/V in attention.

    Field names, defaults and meaning are those of `diffusers.ContextParallelConfig`, which has no "grid".

    Args:
        ring_degree: number of ranks in a ring, which pass K/V around; None: the size in `mesh`, or 1.
        ulysses_degree: number of ranks that exchange tokens for heads; None: the size in `mesh`, or 1.
        convert_to_fp32: merge partial results in float32 (float64 stays float64); False: in the inputs' dtype.
        rotate_method: "allgather" fetches the K/V of all ranks, a slice of heads at a time; "alltoall" passes them from
            neighbour to neighbour and never holds more than two remote chunks; "grid" arranges the ring's ranks in rows
            and columns, gathers queries along rows and K/V along columns, and sends the fewest bytes of the three for 4
            ranks or more. Results and gradients are the same.
        mesh: a DeviceMesh with axes `ring` before `ulysses`; it may have other axes.
        ulysses_anything: no effect, accepted for diffusers: uneven lengths and heads always work.
        ring_anything: no effect, see `ulysses_anything`.
        grid: (rows, columns) of "grid", their product is the ring degree; None: those with the fewest bytes. A prime
            ring degree has only one column, which is "allgather".

    Raises:
        ValueError: a degree is below 1, `rotate_method` is unknown, `grid` does not fit, or the mesh lacks an axis, has
            the axes in the wrong order or contradicts a degree.
        TypeError: an argument has a wrong type.
    """

    ring_degree: int | None = None
    ulysses_degree: int | None = None
    convert_to_fp32: bool = True
    rotate_method: RotateMethod = "allgather"
    mesh: DeviceMesh | None = None
    ulysses_anything: bool = False
    ring_anything: bool = False
    grid: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("convert_to_fp32", "ulysses_anything", "ring_anything"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.rotate_method not in ROTATE_METHODS:
            raise ValueError(f"rotate_method={self.rotate_method!r} must be one of {', '.join(ROTATE_METHODS)}")
        axes = _mesh_axes(self.mesh)
        for axis in ("ring", "ulysses"):
            name = f"{axis}_degree"
            degree = check_degree(name, getattr(self, name), default=axes.get(axis, 1))
            if axis in axes and degree != axes[axis]:
                raise ValueError(
                    f"{name}={degree} contradicts the mesh: its axis {axis!r} has size {axes[axis]}; "
                    f"use {name}={axes[axis]}, or leave {name} out"
                )
            object.__setattr__(self, name, degree)
        object.__setattr__(self, "grid", check_grid(self.grid, self.ring, self.rotate_method))

    @property
    def grid_shape(self) -> tuple[int, int]:
        """(rows, columns) in which the ranks of a ring stand; one column unless `rotate_method` is "grid"."""
        if self.rotate_method != "grid":
            return (self.ring, 1)
        return self.grid or default_grid(self.ring)

    @property
    def ring(self) -> int:
        """The ring degree as an int."""
        return self.ring_degree or 1

    @property
    def ulysses(self) -> int:
        """The Ulysses degree as an int."""
        return self.ulysses_degree or 1

    @property
    def mesh_shape(self) -> tuple[int, int]:
        """(ring, ulysses) degrees."""
        return (self.ring, self.ulysses)

    @property
    def mesh_dim_names(self) -> tuple[str, str]:
        """Names of the two axes, in rank order."""
        return ("ring", "ulysses")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(_missing(type(self).__name__, name))


@dataclass(frozen=True)
class ParallelConfig:
    """Counterpart of `diffusers.ParallelConfig`: holds a `ContextParallelConfig` (ours or diffusers').

    Raises:
        TypeError: `context_parallel_config` has a wrong type.
        ValueError: `tensor_parallel_config` is set; this library supports context parallelism only.
    """

    context_parallel_config: ContextParallelConfig | None = None
    tensor_parallel_config: None = None

    def __post_init__(self) -> None:
        _check_no_tensor_parallel(self.tensor_parallel_config)
        if self.context_parallel_config is not None:
            object.__setattr__(self, "context_parallel_config", context_config(self.context_parallel_config))

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(_missing(type(self).__name__, name))


def context_config(config: object) -> ContextParallelConfig:
    """Convert a ContextParallelConfig or ParallelConfig, ours or diffusers', to our ContextParallelConfig.

    Raises:
        TypeError: an object of another type.
        ValueError: tensor parallelism is set, or context parallelism is not.
    """
    if isinstance(config, ContextParallelConfig):
        return config
    kind = type(config)
    is_diffusers = kind.__module__.split(".")[0] == "diffusers"
    if isinstance(config, ParallelConfig) or (is_diffusers and kind.__name__ == "ParallelConfig"):
        _check_no_tensor_parallel(getattr(config, "tensor_parallel_config", None))
        inner = getattr(config, "context_parallel_config", None)
        if inner is None:
            raise ValueError("parallel_config.context_parallel_config is None: set it to a ContextParallelConfig")
        return context_config(inner)
    if is_diffusers and kind.__name__ == "ContextParallelConfig":
        values = {x.name: getattr(config, x.name) for x in fields(ContextParallelConfig) if hasattr(config, x.name)}
        if values["mesh"] is not None:  # diffusers sets omitted degrees to 1; take them from the mesh
            for axis, size in _mesh_axes(values["mesh"]).items():
                if values.get(f"{axis}_degree") == 1:
                    values[f"{axis}_degree"] = size
        return ContextParallelConfig(**values)
    raise TypeError(
        f"parallel_config must be a ContextParallelConfig or ParallelConfig (lightning_cp's or diffusers'), "
        f"not {kind.__module__}.{kind.__qualname__}"
    )


def check_degree(name: str, value: object, *, default: int) -> int:
    """Check that a degree is an int of at least 1 and return it; None gives `default`."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be an integer of at least 1")
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1")
    return value


def check_grid(grid: object, ring: int, rotate_method: str) -> tuple[int, int] | None:
    """Return the setting `grid` as a tuple; None if it is not set. Raises: TypeError, ValueError."""
    if grid is None:
        return None
    shape = tuple(grid) if isinstance(grid, Sequence) and not isinstance(grid, str) else ()
    if len(shape) != 2 or any(isinstance(x, bool) or not isinstance(x, int) for x in shape):
        raise TypeError(f"grid={grid!r} must be (rows, columns), two whole numbers, or None")
    if rotate_method != "grid":
        raise ValueError(f"grid={shape} needs rotate_method='grid', not {rotate_method!r}: set it, or leave grid out")
    if shape not in grids(ring):
        raise ValueError(
            f"grid={shape} must be (rows, columns) with rows x columns = ring={ring}: one of "
            f"{', '.join(map(str, grids(ring)))}, or None"
        )
    return shape


def grids(ring: int) -> list[tuple[int, int]]:
    """List the grids (rows, columns) of a ring's ranks."""
    return [(ring // columns, columns) for columns in range(1, ring + 1) if not ring % columns]


def default_grid(ring: int) -> tuple[int, int]:
    """Return the grid with the fewest bytes, for equal heads of queries and keys.

    Forward and backward move 5 tensors of a chunk's size to each other rank of the row (queries twice, out, and the
    gradients of out and of queries), and 6 to each of the column (keys and values twice, and their gradients). A prime
    degree has only one column.
    """
    candidates = [x for x in grids(ring) if x[0] > 1] or [(1, 1)]
    return min(candidates, key=lambda x: (5 * (x[1] - 1) + 6 * (x[0] - 1), x))


def _mesh_axes(mesh: object) -> dict[str, int]:
    """Return axis sizes by name of a mesh with `ring` before `ulysses`; empty without a mesh."""
    if mesh is None:
        return {}
    if type(mesh).__name__ != "DeviceMesh" and not hasattr(mesh, "mesh_dim_names"):
        raise TypeError(f"mesh must be a torch DeviceMesh, not {type(mesh).__qualname__}")
    names: tuple[str, ...] = tuple(getattr(mesh, "mesh_dim_names", None) or ())
    missing = [axis for axis in ("ring", "ulysses") if axis not in names]
    if missing:
        raise ValueError(
            f"mesh has axes {names or 'without names'}: it must have the axes 'ring' and 'ulysses' (of size 1 if "
            "unused); other axes are allowed"
        )
    if names.index("ring") > names.index("ulysses"):
        raise ValueError(f"mesh has axes {names}: 'ring' must come before 'ulysses', because rank order is ring-major")
    return dict(zip(names, tuple(mesh.shape), strict=True))  # type: ignore[attr-defined]


def _check_no_tensor_parallel(config: object) -> None:
    if config is not None:
        raise ValueError(
            f"tensor_parallel_config={type(config).__name__}(...) is not supported: set it to "
            "None. To shard weights over the same ranks, use FSDP (ContextParallelFSDPStrategy)"
        )


def _missing(kind: str, name: str) -> str:
    text = f"{kind!r} object has no attribute {name!r}"
    internal = name == "setup" or (name.startswith("_") and not name.startswith("__"))
    return f"{text}: {_NOT_FOR_DIFFUSERS}" if internal or name == "context_parallel_config" else text
