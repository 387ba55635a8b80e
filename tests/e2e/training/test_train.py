"""recipes/train.py with a small model: its files, equal results at every degree, and resumed runs."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel

from lightning_cp.checkpoint import latest_checkpoint
from lightning_cp.checkpoint.store import load_checkpoint
from tests.e2e.recipe import SMALL, Finished, run

STEPS = 8
HERE = (*SMALL, f"max_steps={STEPS}", "checkpoint_every=4")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    finished = run(*HERE, folder=tmp_path_factory.mktemp("single") / "run", cold=True)
    assert finished.exit_code == 0, finished.stderr
    return finished


def weights(finished: Finished) -> torch.Tensor:
    folder = latest_checkpoint(finished.folder)
    assert folder is not None
    return torch.cat([x.flatten() for x in load_checkpoint(folder).states["model"].values()])


def assert_same_training(finished: Finished, reference: Finished) -> None:
    assert finished.exit_code == 0, finished.stderr
    assert [row.step for row in finished.rows] == [row.step for row in reference.rows]
    assert finished.losses == pytest.approx(reference.losses, rel=1e-4)
    ours, theirs = weights(finished), weights(reference)
    assert (ours - theirs).norm() <= 1e-3 * theirs.norm()
    assert (ours - theirs).abs().max() <= 1e-3


def test_a_run_writes_the_files_that_it_lists(one_process: Finished) -> None:
    folder = one_process.folder
    for picture in ("samples/final.png", "loss.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
        assert picture.partition("/")[0] in one_process.stdout
    assert (folder / "metrics.csv").read_text().startswith("step,loss,")
    assert [row.step for row in one_process.rows] == list(range(1, STEPS + 1))
    assert (folder / ".hydra" / "config.yaml").is_file()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_00000004", "step_00000008"]
    assert str(folder) in one_process.stdout
    assert "recognises" in one_process.stdout
    assert "Traceback" not in one_process.stderr
    assert "Warning" not in one_process.stderr


@pytest.mark.parametrize(
    "degrees",
    [
        "ring=3 rotate_method=alltoall trace_step=3",
        "trainer=lightning ulysses=2 data_parallel=2",
        "strategy=cp_fsdp ring=2 data_parallel=2",
    ],
)
@pytest.mark.full
def test_degrees_do_not_change_the_training(degrees: str, one_process: Finished, tmp_path: Path) -> None:
    finished = run(*_cp(degrees), *HERE, folder=tmp_path / "run", cold="ring=2" in degrees)
    assert_same_training(finished, one_process)
    assert "rank 1" not in finished.stdout + finished.stderr
    said = [line for line in finished.stdout.splitlines() if "recognises" in line]
    assert said == [line for line in one_process.stdout.splitlines() if "recognises" in line]
    traces = sorted((finished.folder / "trace").glob("*"))
    assert [path.name for path in traces] == [f"rank_{rank}.json" for rank in range(3) if "trace_step" in degrees]
    for trace in traces:
        names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]]
        assert sum(name.startswith("Optimizer.step") for name in names) == 1
        assert any(name.startswith("lightning_cp::wait") for name in names)


def _cp(degrees: str) -> list[str]:
    return [*([] if "strategy=" in degrees else ["strategy=cp"]), *degrees.split()]


@pytest.mark.full
def test_thirty_steps_are_the_same_at_every_degree(tmp_path: Path) -> None:
    settings = ("max_steps=30", "model=flux_tiny", "sampling.num_samples=10", "sampling.num_inference_steps=2")
    reference = run(*settings, folder=tmp_path / "single")
    settings = (*settings, "trainer=lightning")
    assert_same_training(run(*settings, folder=tmp_path / "single_too"), reference)
    for degrees in (
        "ring=3",
        "ring=2 ulysses=2",
        "data_parallel=2",
        "strategy=cp_fsdp ulysses=2 data_parallel=2 strategy.replicate=2",
    ):
        folder = tmp_path / degrees.replace(" ", "_").replace("=", "")
        assert_same_training(run(*_cp(degrees), *settings, folder=folder), reference)


@pytest.mark.parametrize("trainer", ["fabric", "lightning"])
@pytest.mark.default(1)
def test_a_resumed_run_goes_on_exactly(trainer: str, one_process: Finished, tmp_path: Path) -> None:
    half = one_process.folder / "checkpoints" / "step_00000004"
    resumed = run(*HERE, f"trainer={trainer}", f"resume={half}", folder=tmp_path / "run")
    assert resumed.exit_code == 0, resumed.stderr
    assert resumed.losses == one_process.losses
    assert torch.equal(weights(resumed), weights(one_process))


@pytest.mark.full
def test_checkpoints_go_from_strategy_to_strategy_and_from_trainer_to_trainer(
    one_process: Finished, tmp_path: Path
) -> None:
    half = one_process.folder / "checkpoints" / "step_00000004"
    settings = ("checkpoint_async=true", "activation_checkpointing=selective")
    fsdp = ("strategy=cp_fsdp", "ring=2", "trainer=lightning", f"resume={half}", "max_steps=6", "checkpoint_every=1")
    sharded = run(*SMALL, *fsdp, *settings, folder=tmp_path / "sharded")
    assert sharded.exit_code == 0, sharded.stderr
    assert len(list(sharded.folder.glob("checkpoints/step_00000006/shard-*.safetensors"))) == 2
    exported = WanTransformer3DModel.from_pretrained(sharded.folder / "transformer")
    assert exported.num_parameters() > 1e5
    back = run(*HERE, "strategy=cp", "ulysses=2", f"resume={sharded.folder}", folder=tmp_path / "back")
    assert back.exit_code == 0, back.stderr
    assert back.losses == pytest.approx(one_process.losses, rel=1e-4)
    ours, theirs = weights(back), weights(one_process)
    assert (ours - theirs).norm() <= 1e-3 * theirs.norm()


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        "data=moving_digits data.frames=3 data.height=12 ring=2 batch_size=4",
        "model=flux_tiny ulysses=2 sampling.every=1",
    ],
)
def test_other_data_and_models_train(settings: str, tmp_path: Path) -> None:
    finished = run(*SMALL, "strategy=cp", "max_steps=2", *settings.split(), folder=tmp_path / "run")
    assert finished.exit_code == 0, finished.stderr
    assert len(finished.rows) == 2
    assert (finished.folder / "samples" / "final.png").is_file()
    assert (finished.folder / "samples" / "step_00000001.png").is_file() == ("sampling.every=1" in settings)


@pytest.mark.full
@pytest.mark.parametrize("strategy", [(), ("strategy=cp", "ring=2")])
def test_nine_of_ten_samples_are_recognised(strategy: tuple[str, ...], tmp_path: Path) -> None:
    finished = run(*strategy, folder=tmp_path / "run", timeout_s=900)
    assert finished.exit_code == 0, finished.stderr
    said = next(line for line in finished.stdout.splitlines() if "recognises" in line)
    assert float(said.split("%")[0].split()[-1]) >= 90, said
