"""LoRA training on several ranks is that of one process; its adapter loads into a plain pipeline and continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, WanPipeline
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_cp.compat.torch_names import is_traceable_wrapper_subclass
from lightning_cp.export import LORA_FILE, save_lora
from lightning_cp.fabric import ContextParallelFSDPStrategy, ContextParallelStrategy
from lightning_cp.finetune.adapters.lora import add_lora
from lightning_cp.finetune.load import load_transformer, meta_transformer
from lightning_cp.finetune.settings import LoraSettings
from tests.dist.lightning_ranks import fabric_of, whole
from tests.harness import RankPool
from tests.pretrained import inputs, lora_state, saved

pytestmark = pytest.mark.filterwarnings("ignore")
LORA = LoraSettings(rank=4, alpha=8.0)
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=2.0),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: saved(tmp_path_factory.mktemp(name), name) for name in ("wan", "flux")}


def loss_of(model: Any, arguments: dict[str, Any]) -> Tensor:
    loss: Tensor = (model(**arguments, return_dict=False)[0].float() - 1).square().mean()
    return loss


def base_of(model: nn.Module) -> State:
    """Frozen weights, whole, with the values of quantised ones."""
    frozen = {name: whole(x.detach()) for name, x in model.named_parameters() if not x.requires_grad}
    return {name: x.dequantize() if is_traceable_wrapper_subclass(x) else x.clone() for name, x in frozen.items()}


def trained(
    model: nn.Module, arguments: dict[str, Any], optimizer: str, *, steps: int = 3, fabric: Any = None
) -> tuple[list[float], Any]:
    """Losses of so many steps, and the model as the strategy wraps it. Only adapters are in the optimizer."""
    wanted = [x for x in model.parameters() if x.requires_grad]
    chosen, wrapped = OPTIMIZERS[optimizer](wanted), model
    if fabric is not None:
        wrapped, chosen = fabric.setup(model, chosen)
    frozen, losses = base_of(model), []
    for _ in range(steps):
        loss = loss_of(wrapped, arguments)
        loss.backward() if fabric is None else fabric.backward(loss)
        chosen.step()
        chosen.zero_grad()
        losses.append(loss.item())
    assert all(torch.equal(x, frozen[name]) for name, x in base_of(model).items())
    own = {id(x) for group in chosen.param_groups for x in group["params"]}
    assert own == {id(x) for name, x in model.named_parameters() if ".lora_" in name}
    return losses, wrapped


def alone(folder: Path, name: str, optimizer: str, *, steps: int = 3) -> tuple[list[float], State]:
    """Losses and the adapter of one process."""
    model = load_transformer(folder, dtype=torch.float32)
    add_lora(model, LORA)
    losses, _ = trained(model, inputs(name), optimizer, steps=steps)
    return losses, lora_state(model)


def distance(found: State, expected: State) -> float:
    assert found.keys() == expected.keys()
    error = sum(float((found[name] - x).double().square().sum()) for name, x in expected.items())
    return (error / sum(float(x.double().square().sum()) for x in expected.values())) ** 0.5


def pipeline_of(name: str, transformer: nn.Module) -> Any:
    """A pipeline of diffusers with only this transformer."""
    parts: dict[str, Any] = {"vae": None, "text_encoder": None, "tokenizer": None, "transformer": transformer}
    parts |= {"text_encoder_2": None, "tokenizer_2": None} if name == "flux" else {}
    return {"wan": WanPipeline, "flux": FluxPipeline}[name](scheduler=FlowMatchEulerDiscreteScheduler(), **parts)


def _train(
    rank: int, world: int, folder: Path, name: str, kind: type, degrees: dict[str, int], optimizer: str
) -> tuple[list[float], State, Tensor]:
    """Losses, the adapter, and the prediction of the trained model. The adapter is saved next to the pipeline."""
    fabric = fabric_of(rank, world, kind(**degrees))
    load = meta_transformer if kind is ContextParallelFSDPStrategy else load_transformer
    model = load(folder, dtype=torch.float32)
    torch.manual_seed(rank)  # must not matter
    add_lora(model, LORA)
    losses, wrapped = trained(model, inputs(name), optimizer, fabric=fabric)
    assert all(isinstance(x, DTensor) for x in model.parameters()) == (kind is ContextParallelFSDPStrategy)
    with torch.no_grad():
        prediction = wrapped(**inputs(name), return_dict=False)[0]
    save_lora(model, folder / f"{optimizer}_{kind.__name__}_{world}")
    return losses, lora_state(model), prediction


CP, FSDP = ContextParallelStrategy, ContextParallelFSDPStrategy


@pytest.mark.parametrize(
    ("name", "kind", "degrees", "optimizer"), [("wan", CP, {"ring": 3}, "sgd"), ("flux", FSDP, {"ring": 3}, "adamw")]
)
@pytest.mark.default(1)
def test_training_equals_one_process_and_the_adapter_loads_into_a_pipeline(
    run_ranks: RankPool, folders: dict[str, Path], name: str, kind: type, degrees: dict[str, int], optimizer: str
) -> None:
    folder, world = folders[name], degrees.get("ring", 1) * degrees.get("ulysses", 1)
    losses, expected = alone(folder, name, optimizer)
    start = load_transformer(folder, dtype=torch.float32)
    add_lora(start, LORA)
    results = run_ranks(world, _train, folder, name, kind, degrees, optimizer, init=False)
    for found, adapter, _ in results:
        assert found == pytest.approx(losses, rel=1e-5)
        assert distance(adapter, expected) < 1e-4
    assert losses[2] < 0.97 * losses[0]
    assert distance(lora_state(start), expected) > 0.05
    plain: Any = load_transformer(folder, dtype=torch.float32)
    before = plain(**inputs(name), return_dict=False)[0]
    pipeline_of(name, plain).load_lora_weights(folder / f"{optimizer}_{kind.__name__}_{world}")
    loaded = plain(**inputs(name), return_dict=False)[0]
    assert (loaded - results[0][2]).abs().max() < 1e-5 * loaded.abs().max()
    assert (loaded - before).norm() > 1e-2 * loaded.norm()


def _continue(rank: int, world: int, folder: Path, file: Path, kind: type) -> tuple[bool, list[float], State]:
    """True if the adapter is that of the file bit for bit; losses and the adapter after one more step."""
    from safetensors.torch import load_file

    fabric = fabric_of(rank, world, kind(ring=world))
    model = meta_transformer(folder, dtype=torch.float32)
    add_lora(model, LoraSettings(rank=4, file=file))  # alpha is that of the file
    state = load_file(file / "pytorch_lora_weights.safetensors")
    fabric.setup(model)
    found = lora_state(model)
    equal = all(torch.equal(found[name.removeprefix("transformer.")], x) for name, x in state.items())
    fresh = load_transformer(folder, dtype=torch.float32)
    add_lora(fresh, LoraSettings(rank=4, file=file))
    losses, _ = trained(fresh, inputs("wan"), "sgd", steps=1, fabric=fabric)
    return equal and len(found) == len(state), losses, lora_state(fresh)


@pytest.mark.parametrize("kind", [FSDP, CP], ids=["cp_fsdp", "cp"])
@pytest.mark.full
def test_continuing_from_a_file_equals_not_stopping(
    run_ranks: RankPool, folders: dict[str, Path], kind: type, tmp_path: Path
) -> None:
    folder = folders["wan"]
    losses, expected = alone(folder, "wan", "sgd", steps=3)
    model = load_transformer(folder, dtype=torch.float32)
    add_lora(model, LORA)
    trained(model, inputs("wan"), "sgd", steps=2)
    save_lora(model, tmp_path)
    for equal, last, adapter in run_ranks(3, _continue, folder, tmp_path, kind, init=False):
        assert equal
        assert last == pytest.approx(losses[2:], rel=1e-5)
        assert distance(adapter, expected) < 1e-5


def _gradient(model: Any, arguments: dict[str, Any], fabric: Any = None, wrapped: Any = None) -> Tensor:
    """All gradients of the adapter, after its second matrices have got values."""
    loss = loss_of(model if wrapped is None else wrapped, arguments)
    loss.backward() if fabric is None else fabric.backward(loss)
    return torch.cat([whole(x.grad).flatten() for x in model.parameters() if x.requires_grad])


def _with_values(model: nn.Module) -> nn.Module:
    """Give the second matrices values, equal in every dtype of the base."""
    add_lora(model, LORA)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if ".lora_B" in name:
                x.copy_(torch.randn(x.shape, generator=generator) * 0.1)
    return model


def _low_precision(rank: int, world: int, folder: Path, name: str, kind: type, precision: Any) -> tuple[Tensor, str]:
    """Gradients of a float32 adapter on a bfloat16 base, and the dtypes of trained and frozen weights."""
    fabric = fabric_of(rank, world, kind(ring=world), precision=precision)
    load = meta_transformer if kind is FSDP else load_transformer
    model = _with_values(load(folder, dtype=torch.bfloat16))
    wrapped = fabric.setup(model)
    gradient = _gradient(model, inputs(name, torch.bfloat16), fabric, wrapped)
    dtypes = {f"{x.dtype} {x.requires_grad}" for x in model.parameters()}
    return gradient, ", ".join(sorted(dtypes))


@pytest.mark.parametrize(("name", "kind", "precision"), [("wan", FSDP, "bf16-mixed"), ("flux", CP, "32-true")])
@pytest.mark.default(1)
def test_a_float32_adapter_trains_on_a_bfloat16_base(
    run_ranks: RankPool, folders: dict[str, Path], name: str, kind: type, precision: str
) -> None:
    half = _with_values(load_transformer(folders[name], dtype=torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        one = _gradient(half, inputs(name, torch.bfloat16))
    rounded = _with_values(load_transformer(folders[name], dtype=torch.bfloat16)).double()
    exact = _gradient(rounded, {k: x.double() if x.is_floating_point() else x for k, x in inputs(name).items()})
    limit = 1.5 * (one - exact).square().mean().sqrt() + 1e-6
    for gradient, dtypes in run_ranks(2, _low_precision, folders[name], name, kind, precision, init=False):
        assert gradient.dtype == torch.float32
        assert "torch.float32 True" in dtypes
        assert "torch.bfloat16 False" in dtypes
        assert "torch.bfloat16 True" not in dtypes
        assert (gradient - exact).square().mean().sqrt() <= limit


KINDS = {
    "dora": LoraSettings(rank=4, alpha=8.0, dora=True),
    "ranks": LoraSettings(rank=4, ranks={"to_q": 2, "to_k": 7}),
    "all-linear": LoraSettings(rank=2, targets="all-linear", dora=True),
    "lokr": LoraSettings(rank=3, alpha=6.0, lokr=4),
    "text": LoraSettings(rank=2, targets=["default", "text"]),
}


def _moved(folder: Path, settings: LoraSettings) -> nn.Module:
    """A transformer with an adapter, of which all matrices have got other values."""
    model = load_transformer(folder, dtype=torch.float32)
    add_lora(model, settings)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for x in model.parameters():
            if x.requires_grad:
                x.add_(torch.randn(x.shape, generator=generator) * 0.1)
    return model


def _gradients_of(
    rank: int, world: int, folder: Path, name: str, kind: str, strategy: type = CP
) -> tuple[State, Tensor]:
    """Gradients of an adapter of this kind by name, and the prediction. The adapter is saved next to the pipeline."""
    fabric = fabric_of(rank, world, strategy(ring=world))
    model = _moved(folder, KINDS[kind])
    wrapped = fabric.setup(model)
    fabric.backward(loss_of(wrapped, inputs(name)))
    with torch.no_grad():
        prediction = wrapped(**inputs(name), return_dict=False)[0]
    save_lora(model, folder / f"{kind}_{world}")
    return {key: whole(x.grad) for key, x in model.named_parameters() if x.grad is not None}, prediction


@pytest.mark.parametrize(
    ("name", "kind", "world", "strategy"), [("wan", "dora", 3, CP), ("wan", "lokr", 3, FSDP), ("flux", "lokr", 2, CP)]
)
@pytest.mark.default(1)
def test_gradients_of_every_kind_are_exact_and_diffusers_loads_it(
    run_ranks: RankPool, folders: dict[str, Path], name: str, kind: str, world: int, strategy: type
) -> None:
    folder = folders[name]
    one = _moved(folder, KINDS[kind])
    loss_of(one, inputs(name)).backward()
    expected = {key: x.grad for key, x in one.named_parameters() if x.grad is not None}
    assert any("magnitude" in key for key in expected) == KINDS[kind].dora
    if kind != "lokr":
        assert len({x.shape[0] for key, x in expected.items() if ".lora_A." in key}) == (3 if kind == "ranks" else 1)
    results = run_ranks(world, _gradients_of, folder, name, kind, strategy, init=False)
    for gradients, _ in results:
        assert gradients.keys() == expected.keys()
        largest = max(float(x.abs().max()) for x in expected.values())
        for key, x in expected.items():
            torch.testing.assert_close(
                gradients[key], x, rtol=1e-4, atol=1e-5 * largest, msg=lambda m, k=key: f"{k}: {m}"
            )
    plain: Any = load_transformer(folder, dtype=torch.float32)
    before = plain(**inputs(name), return_dict=False)[0]
    if kind == "lokr":  # the pipelines' `load_lora_weights` refuses it
        plain.load_lora_adapter(folder / f"{kind}_{world}", prefix="transformer", weight_name=LORA_FILE)
    else:
        pipeline_of(name, plain).load_lora_weights(folder / f"{kind}_{world}")
    loaded = plain(**inputs(name), return_dict=False)[0]
    assert (loaded - results[0][1]).abs().max() < 1e-5 * loaded.abs().max()
    assert (loaded - before).norm() > 1e-2 * loaded.norm()


def _dropped(rank: int, world: int, folder: Path, dropout: float) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of an adapter's dropout on this rank, twice with the same random state; random states after it."""
    fabric = fabric_of(rank, world, CP(ring=world))
    model: Any = load_transformer(folder, dtype=torch.float32)
    add_lora(model, LoraSettings(rank=4, dropout=dropout))
    wrapped = fabric.setup(model)
    masks: list[Tensor] = []
    layer = model.blocks[0].attn1.to_q.lora_dropout["default"]
    layer.register_forward_hook(lambda _, __, out: masks.append(out.detach() == 0))
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        fabric.backward(loss_of(wrapped, inputs("wan")))
    return masks, [torch.random.get_rng_state()]


def test_dropout_differs_between_shards_and_can_be_repeated(run_ranks: RankPool, folders: dict[str, Path]) -> None:
    (first, states), (second, other_states), _ = run_ranks(3, _dropped, folders["wan"], 0.5, init=False)
    for one, again, other_seed in (first, second):
        assert torch.equal(one, again)
        assert not torch.equal(one, other_seed)
        assert 0.4 < one.float().mean() < 0.6
    rows = min(first[0].shape[1], second[0].shape[1])
    assert (first[0][:, :rows] == second[0][:, :rows]).float().mean() < 0.6
    assert torch.equal(states[0], other_states[0])


def _quantised(model: nn.Module, library: str) -> nn.Module:
    """Quantise the blocks' weights to int8."""
    if library == "quanto":
        from optimum.quanto import freeze, qint8, quantize

        quantize(model, weights=qint8, include="blocks.*")
        freeze(model)
        return model
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model.blocks, Int8WeightOnlyConfig())
    return model


def _train_quantised(rank: int, world: int, folder: Path, kind: type, library: str) -> Any:
    fabric = fabric_of(rank, world, kind(ring=world))
    model = _quantised(load_transformer(folder, dtype=torch.float32), library)
    add_lora(model, LORA)
    if kind is FSDP:
        with pytest.raises(ValueError, match="quantised") as caught:
            fabric.setup(model)
        assert not any(isinstance(x, DTensor) for x in model.parameters())
        return str(caught.value)
    losses, _ = trained(model, inputs("wan"), "sgd", fabric=fabric)
    return losses, lora_state(model)


LIBRARIES = pytest.mark.parametrize("library", ["quanto", "torchao"])


@LIBRARIES
def test_a_quantised_base_trains_as_in_one_process(run_ranks: RankPool, folders: dict[str, Path], library: str) -> None:
    pytest.importorskip("optimum.quanto" if library == "quanto" else library)
    model = _quantised(load_transformer(folders["wan"], dtype=torch.float32), library)
    add_lora(model, LORA)
    losses, _ = trained(model, inputs("wan"), "sgd")
    plain, _ = alone(folders["wan"], "wan", "sgd")
    assert losses[0] != plain[0]
    for found, adapter in run_ranks(2, _train_quantised, folders["wan"], CP, library, init=False):
        assert found == pytest.approx(losses, rel=1e-5)
        assert distance(adapter, lora_state(model)) < 1e-4


@LIBRARIES
def test_a_quantised_base_cannot_be_sharded(run_ranks: RankPool, folders: dict[str, Path], library: str) -> None:
    pytest.importorskip("optimum.quanto" if library == "quanto" else library)
    for message in run_ranks(2, _train_quantised, folders["wan"], FSDP, library, init=False):
        assert "attn1.to_q.base_layer.weight is quantised" in message
        assert "strategy cp" in message
