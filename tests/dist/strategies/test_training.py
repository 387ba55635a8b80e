"""Steps, features and evaluation with Fabric and the Trainer, whole and sharded, against one process."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_cp import ContextParallelConfig, context_parallel_attention, selective_checkpoint
from lightning_cp.fabric import ContextParallelStrategy
from tests.dist.lightning_ranks import QUIET, STRATEGIES, distance, everyones, fabric_of, flat, train, trainer_of
from tests.dist.module import Clips, TrainsWan, inputs
from tests.harness import RankPool
from tests.models import TINY
from tests.models.wan import wan

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 3


class Found(NamedTuple):
    """What a rank has after a fit: weights, its batches, its place, its share of all weights, and the description."""

    weights: Tensor
    seen: list[list[int]]
    place: tuple[int, int, int]
    share: float
    described: set[str]


def _module(feature: str) -> Any:
    module: Any = TrainsWan()
    if feature:
        module.train()
    if feature.startswith("checkpointing"):
        module.transformer.enable_gradient_checkpointing()
    if "selective" in feature:
        module.transformer.enable_gradient_checkpointing(gradient_checkpointing_func=selective_checkpoint)
    if "compiled" in feature:
        module.transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    return module


def fit(rank: int, world: int, flavour: str, kind: str, settings: dict[str, Any], options: dict[str, Any]) -> Found:
    """Train a tiny Wan. Args: options: for `train`, and a `feature` of the module."""
    if "mesh" in settings:
        settings = {"mesh": init_device_mesh("cpu", settings["mesh"], mesh_dim_names=("ring", "ulysses", "fsdp"))}
    options = dict(options)
    module = _module(options.pop("feature", ""))
    count = sum(p.numel() for p in module.parameters())
    loader = DataLoader(Clips(16), batch_size=2)
    strategy = STRATEGIES[flavour, kind](**settings)
    train(rank, world, strategy, module, loader, steps=STEPS, **options)
    own = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    place = strategy.data_rank, strategy.data_size, strategy.context_rank
    share = sum(p.numel() for p in own) / count
    return Found(flat(module).detach(), module.seen, place, share, set(strategy.context.described))


def expected_weights(found: list[Found], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The weights of one process on the global batches, before and after the steps."""
    precision, clip = options.get("precision", "32-true"), options.get("clip", {})
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    module, data, parts = TrainsWan().to(dtype), Clips(16), options.get("accumulate", 1)
    start, optimizer = flat(module), module.configure_optimizers()
    groups = [one.seen for one in found if one.place[2] == 0]
    for step in range(STEPS):
        taken = [index for group in groups for batch in group[step * parts :][:parts] for index in batch]
        batch = next(iter(DataLoader([data[index] for index in taken], batch_size=len(taken))))  # type: ignore[arg-type]
        batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = module.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if "max_norm" in clip:
            assert nn.utils.clip_grad_norm_(module.parameters(), **clip) > clip["max_norm"]
        elif clip:
            nn.utils.clip_grad_value_(module.parameters(), clip["clip_val"])
        optimizer.step()
        optimizer.zero_grad()
    return start, flat(module)


NORM, VALUE = {"max_norm": 0.5}, {"clip_val": 1e-3}
CASES: dict[str, tuple[str, str, int, dict[str, Any], dict[str, Any]]] = {
    "ring": ("fabric", "cp", 3, {"ring": 3}, {"accumulate": 2}),
    "shares": ("trainer", "cp", 3, {"ulysses": 3, "shares": [1, 3, 2]}, {"clip": NORM}),
    "sharded": ("fabric", "cp_fsdp", 3, {"ring": 3}, {"accumulate": 2, "clip": NORM}),
    "bf16-mixed": ("trainer", "cp", 4, {"ring": 2}, {"precision": "bf16-mixed"}),
    "grid": ("fabric", "cp", 4, {"ring": 4, "rotate_method": "grid"}, {"clip": NORM}),
    "shares and data": ("trainer", "cp", 4, {"ring": 2, "shares": [2, 1]}, {"accumulate": 2}),
    "ring and Ulysses": ("trainer", "cp", 4, {"ring": 2, "ulysses": 2}, {"clip": VALUE}),
    "sharded, replicated": ("fabric", "cp_fsdp", 4, {"ring": 2, "replicate": 2}, {"accumulate": 2, "clip": NORM}),
    "sharded, mesh": ("fabric", "cp_fsdp", 4, {"mesh": (2, 1, 2)}, {"clip": VALUE}),
    "sharded, Trainer": ("trainer", "cp_fsdp", 4, {"ulysses": 2}, {"accumulate": 2, "clip": NORM}),
    "sharded, shares": ("fabric", "cp_fsdp", 4, {"ring": 2, "ulysses": 2, "shares": [3, 1, 1, 2]}, {"clip": NORM}),
    "bf16-true": ("trainer", "cp", 4, {"ring": 2}, {"precision": "bf16-true"}),
    "checkpointing": ("trainer", "cp", 4, {"ring": 2}, {"feature": "checkpointing"}),
    "compiled selective": ("trainer", "cp", 4, {"ring": 2}, {"feature": "compiled selective"}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.default(4)
def test_steps_are_those_of_one_process_on_the_global_batch(run_ranks: RankPool, case: str) -> None:
    flavour, kind, world, settings, options = CASES[case]
    found = run_ranks(world, fit, flavour, kind, settings, options, init=False)
    start, expected = expected_weights(found, options)
    moved = (expected - start).norm()
    assert moved > (1e-4 if options.get("clip") == VALUE else 1e-2)
    tolerance = {"bf16-mixed": 0.05, "bf16-true": 0.2}.get(case, 1e-3 if options.get("clip") == VALUE else 1e-4)
    size = settings.get("ring", 1) * settings.get("ulysses", 1)
    for rank, one in enumerate(found):
        assert (one.weights - expected).norm() < tolerance * moved
        assert (one.weights - found[0].weights).abs().max() < 1e-6
        if "mesh" in settings:  # the data axis is the last one
            assert one.place == (rank % 2, 2, rank // 2)
        else:
            assert one.place == (rank // size, world // size, rank % size)
        assert one.seen == next(other for other in found if other.place[0] == one.place[0]).seen
        assert len(one.seen) == STEPS * options.get("accumulate", 1)
        holders = 1 if kind == "cp" else 2 if "mesh" in settings or "replicate" in settings else world
        assert one.share == pytest.approx(1 / holders, rel=0, abs=0.1 * (holders > 1))
        assert "shares" not in settings or any(
            f"shares {':'.join(map(str, settings['shares']))}" in line for line in one.described
        )


def _evaluate(rank: int, world: int) -> tuple[list[float], list[list[int]], float]:
    module, data = TrainsWan(), Clips(7)
    even = DataLoader(Clips(8), batch_size=2)
    with torch.no_grad():
        expected = float(module.loss(next(iter(DataLoader(Clips(8), batch_size=8)))))
        outputs = module.predict_step(next(iter(DataLoader(data, batch_size=7))), 0)[1]
    trainer = trainer_of(rank, world, STRATEGIES["trainer", "cp"](ring=2))
    losses = [trainer.validate(module, even)[0]["val_loss"], trainer.test(module, even)[0]["test_loss"]]
    predicted: Any = trainer.predict(module, DataLoader(data, batch_size=2))
    indices = [index for batch_indices, _ in predicted for index in batch_indices]
    error = float((torch.cat([out for _, out in predicted]) - outputs[indices]).abs().max())
    return [loss / expected for loss in losses], everyones(indices)[::2], error


def test_evaluation_sees_each_sample_and_predictions_come_once_and_in_order(run_ranks: RankPool) -> None:
    for losses, indices, error in run_ranks(4, _evaluate, init=False):
        assert losses == pytest.approx([1, 1], rel=1e-5)
        assert indices == [[0, 2, 4, 6], [1, 3, 5]]
        assert error < 1e-4


NAMES = {"cp": (1, 1, 2), "cp_ring": (2, 1, 1), "cp_ulysses": (1, 2, 1)}


def _by_name(rank: int, world: int, flavour: str) -> list[tuple[int, int, int]]:
    places = []
    for name in NAMES:
        runner = (fabric_of if flavour == "fabric" else trainer_of)(rank, world, name)
        strategy: Any = runner.strategy
        if isinstance(runner, Trainer):
            runner.validate(TrainsWan(), DataLoader(Clips(2), batch_size=1), verbose=False)
        places.append((strategy.context.ring, strategy.context.ulysses, strategy.data_size))
    return places


@pytest.mark.parametrize("flavour", ["fabric", "trainer"])
def test_a_name_is_enough(run_ranks: RankPool, flavour: str) -> None:
    assert run_ranks(2, _by_name, flavour, init=False) == [list(NAMES.values())] * 2


def test_places_and_errors_are_known_before_the_ranks_are_up() -> None:
    settings = {"accelerator": "cpu", **QUIET}
    kind = STRATEGIES["trainer", "cp"]
    trainer: Any = Trainer(devices=4, strategy=kind(ring=2), **settings)
    assert trainer.strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 0}
    with pytest.raises(ValueError, match="must divide the world size 3"):
        Trainer(devices=3, strategy=kind(ring=2), **settings)
    with pytest.raises(ValueError, match="must divide the world size 3"):
        Fabric(accelerator="cpu", devices=3, strategy=ContextParallelStrategy(ring=2))


class _Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Any:
        yield from Clips(4)


class _Shards:
    """A loader of some other library, or a generator."""

    def __iter__(self) -> Any:
        return iter([Clips(4)[0]])


def _not_sharded(rank: int, world: int) -> list[str]:
    said = []
    for loader in (DataLoader(_Stream(), batch_size=2), _Shards()):
        trainer = trainer_of(rank, world, STRATEGIES["trainer", "cp"](ring=2), max_steps=1)
        with pytest.raises(ValueError, match=r"data ranks|sharded_by_data_rank") as caught:
            trainer.fit(TrainsWan(), loader)
        said.append(str(caught.value))
    fabric = fabric_of(rank, world, ContextParallelStrategy(ring=2))
    with pytest.raises(ValueError, match="sharded_by_data_rank") as caught:
        fabric.setup_dataloaders(DataLoader(_Stream()))
    return [*said, str(caught.value)]


def test_a_loader_that_cannot_be_divided_is_not_silently_duplicated(run_ranks: RankPool) -> None:
    for stream, other, of_fabric in run_ranks(4, _not_sharded, init=False):
        assert stream.startswith("_Stream is iterable")
        assert other.startswith("_Shards is iterable")
        assert of_fabric.startswith("_Stream is iterable")


# Gradients under Fabric


def _arguments() -> dict[str, Any]:
    return {name: x.float() if x.is_floating_point() else x for name, x in wan().arguments().items()}


def _gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _single(autocast: bool = False) -> Tensor:
    """The gradients of a Wan in float32."""
    reference = wan().build().float()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = reference(**_arguments(), return_dict=False)[0]
    out.float().square().mean().backward()
    return _gradients(reference)


def _mixed(rank: int, world: int) -> tuple[Tensor, set[torch.dtype], set[str]]:
    model = wan().build().float()
    fabric = fabric_of(rank, world, ContextParallelStrategy(ring=world), precision="bf16-mixed")
    wrapped = fabric.setup(model)
    fabric.backward(wrapped(**_arguments(), return_dict=False)[0].float().square().mean())
    return _gradients(model), {p.dtype for p in model.parameters()}, fabric.strategy.context.described  # type: ignore[attr-defined]


def test_bf16_mixed_is_as_exact_as_in_one_process(run_ranks: RankPool) -> None:
    exact = _single()
    single = distance(_single(autocast=True), exact)
    assert 1e-4 < single < 0.1
    for found, dtypes, described in run_ranks(3, _mixed, init=False):
        assert distance(found, exact) < 1.5 * single
        assert dtypes == {torch.float32}
        assert described == {"3 ranks = data 1 × ring 3 × ulysses 1; WanTransformer3DModel: 2 blocks, kernel flash"}


def _accumulated(rank: int, world: int) -> tuple[Tensor, Tensor, Tensor]:
    model = wan().build().float()
    fabric = fabric_of(rank, world, ContextParallelStrategy(ring=world))
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with fabric.no_backward_sync(wrapped):
        fabric.backward(wrapped(**_arguments(), return_dict=False)[0].square().mean() / 2)
    first = _gradients(model).clone()
    fabric.backward(wrapped(**_arguments(), return_dict=False)[0].square().mean() / 2)
    whole = _gradients(model).clone()
    fabric.clip_gradients(wrapped, optimizer, clip_val=1e-3)
    return first, whole, _gradients(model)


def test_accumulation_averages_only_in_its_last_step(run_ranks: RankPool) -> None:
    expected, results = _single(), run_ranks(3, _accumulated, init=False)
    assert distance(results[0][0], results[1][0]) > 1e-2  # each rank's own part: nothing was sent
    for _, whole, clipped in results:
        assert distance(whole, expected) < 1e-5
        assert distance(clipped, expected.clamp(-1e-3, 1e-3)) < 1e-5


def _unused(rank: int, world: int) -> list[Tensor | None]:
    tiny = TINY["qwen_image"]
    model, arguments = tiny.build(), tiny.arguments()
    fabric = fabric_of(rank, world, ContextParallelStrategy(ulysses=world), precision="64-true")
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(3):  # plain DDP fails in the second step
        optimizer.zero_grad()
        fabric.backward(wrapped(**arguments, return_dict=False)[0].square().mean())
        optimizer.step()
    return [p.grad for p in model.parameters()]


def test_parameters_without_gradient_are_no_obstacle(run_ranks: RankPool) -> None:
    reference = TINY["qwen_image"].build()
    reference(**TINY["qwen_image"].arguments(), return_dict=False)[0].square().mean().backward()
    expected = [p.grad for p in reference.parameters()]
    assert any(x is None for x in expected)
    for found in run_ranks(2, _unused, init=False):
        pairs = [(x, y) for x, y in zip(found, expected, strict=True) if x is not None and y is not None]
        assert len(pairs) == sum(x is not None for x in expected)
        assert distance(*(torch.cat([pair[i].flatten() for pair in pairs]) for i in (0, 1))) < 1e-5


class _Attention(nn.Module):
    """A plain module that calls attention itself, on shards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, config: ContextParallelConfig, shares: list[int] | None = None) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, 4)) for y in self.qkv(x).chunk(3, -1))
        out: Tensor = self.out(context_parallel_attention(q, k, v, parallel_config=config, shares=shares).flatten(2))
        return out


def _local_loss(rank: int, world: int, kind: str, shares: list[int] | None) -> tuple[Tensor, Tensor]:
    fabric = fabric_of(rank, world, STRATEGIES["fabric", kind](ring=world, shares=shares))
    strategy: Any = fabric.strategy
    model = _Attention()
    wrapped = fabric.setup(model)
    shard = strategy.shard({"batch": {"x": inputs()}, "label": 3}, {"x": 1})["batch"]["x"]
    out = wrapped(shard, ContextParallelConfig(ring_degree=world), shares)
    fabric.backward(strategy.local_mean(out.square().mean(), shard.shape[1]))
    return flat(model, gradients=True), strategy.gather(out, 1).detach()


@pytest.mark.parametrize(("kind", "shares"), [("cp", None), ("cp_fsdp", [1, 3, 2])])
def test_a_plain_module_on_shards_trains_with_one_process_gradients(
    run_ranks: RankPool, kind: str, shares: list[int] | None
) -> None:
    model = _Attention()
    expected = model(inputs(), ContextParallelConfig())
    expected.square().mean().backward()
    for gradients, out in run_ranks(3, _local_loss, kind, shares, init=False):
        assert distance(gradients, _gradients(model)) < 1e-5
        assert distance(out, expected) < 1e-5
