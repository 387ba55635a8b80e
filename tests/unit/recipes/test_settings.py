import os
from pathlib import Path

import pytest

from lightning_cp.checkpoint.store import Checkpoint, save_checkpoint
from lightning_cp.launch import LauncherEnv, Machine, launcher_env
from lightning_cp.recipes.runs.recipe import CheckedRun, check_config, threads_per_rank
from lightning_cp.recipes.settings.table import SettingsError
from tests.unit.recipes.composed import composed


class TestMachine(Machine):
    __test__ = False
    gpus = 0


class GpuMachine(Machine):
    gpus = 2


TWO_CORES = TestMachine(cores=2)


def check(*overrides: str, machine: Machine = TWO_CORES, place: LauncherEnv | None = None) -> CheckedRun:
    return check_config(composed("train", "run_dir=/runs/here", "output_root=/runs", *overrides), machine, place)


# what is given, and what the message must say: the setting with its value, and what would be valid
REFUSED = [
    ("strategy=cp ring=2 shares=[2,1,1]", r"shares=\[2, 1, 1\] must be a list of 2 positive numbers"),
    ("strategy=cp ring=2 shares=[2,0]", "must be a list of 2 positive numbers"),
    ("precision=16-mixed", "precision=16-mixed is not valid: float16 needs a GPU"),
    ("accelerator=cuda", "accelerator=cuda is not valid: torch finds no CUDA device"),
    ("strategy=cp num_nodes=2", "num_nodes=2 needs a launcher such as torchrun"),
    ("optim=adamw_8bit strategy=cp_fsdp", "optim=adamw_8bit does not work with strategy=cp_fsdp: .* Use optim=adamw"),
    ("optim._target_=no_package.AdamW", "no_package, which is not installed: pip install 'no_package', or use"),
    ("optim=prodigy optim.lr=0.0001", "optim.lr=0.0001 is a factor of the learning rate that Prodigy finds: use optim"),
    ("strategy=cp_fsdp optim._target_=prodigyopt.Prodigy optim.lr=1", "optim=prodigy does not work with"),
    ("optim=adafactor strategy=cp_fsdp", "optim=adafactor does not work with strategy=cp_fsdp: PyTorch's Adafactor"),
    ("optim=muon", "optim=muon trains matrices only, such as those of adapters: use it with lora.rank"),
    ("trainer=lightning +trainer.accumulate_grad_batches=2", "trainer.accumulate_grad_batches .* set micro_batch_size"),
    ("batch_size=1798", "batch_size=1798 is not valid: must be at most 1797"),
    ("strategy=cp data_parallel=3", "batch_size=64 .*multiple of data_parallel=3: 63 or 66"),
    ("strategy=cp data_parallel=3 batch_size=2", "batch_size=2 .*multiple of data_parallel=3: 3"),
    ("max_steps=5 trace_step=6", "trace_step=6 is not valid: must be at most max_steps=5"),
    ("data.num_classes=3", "data.num_classes=3 is not valid: .*Digits has num_classes=10"),
    ("data.height=16", "data.height=16 is not valid: .*data=moving_digits"),
    ("data.num_samples=5000", "data.num_samples=5000 is not valid"),
    ("data=moving_digits data.height=6", "data.height=6 is not valid: must be at least 8"),
    ("model.transformer.attention_head_dim=7", "model.transformer.attention_head_dim=7 "),
    ("model.transformer.in_channels=3", "model.transformer.in_channels=3 is not valid: must be data.channels=1"),
    ("model.transformer.rope_max_seq_len=4", "model.transformer.rope_max_seq_len=4 is not valid: must be at least 8"),
    ("model=flux_tiny model.transformer.axes_dims_rope=[4,8,8]", "model.transformer.axes_dims_rope="),
    ("trainer.devices=2", "trainer.devices=2 contradicts devices=1"),
    ("trainer.accelerator=tpu", "trainer.accelerator=tpu contradicts accelerator=cpu"),
    ("trainer.precision=16-mixed", "trainer.precision=16-mixed contradicts precision=32-true"),
    ("kernel=math", "kernel=math has no effect with strategy=single"),
    ("strategy=cp kernel=cudnn", "kernel=cudnn is not valid on CPU: must be one of auto, flash, math"),
    ("ring=2", "strategy=single is one process, so ring=2 must be 1; or use strategy=cp"),
    ("devices=2", "devices=2 must be 1"),
    ("strategy=cp ring=17", "ring=17 .* = 17 ranks are too many for 2 CPU cores: must be at most 16"),
    ("strategy=cp ring=4 ulysses=4 data_parallel=2", "= 32 ranks are too many"),
    ("strategy=cp ulysses=5", "ulysses=5 is not valid: must be at most model.transformer.num_attention_heads=4"),
    ("strategy=cp ring=5 data.patch_size=[1,4,4] data.token_width=16", "ring=5 .* has 4 tokens: .* at most 4"),
    ("strategy=cp ring=2 devices=3", "ring=2 × ulysses=1 = 2 must divide devices=3"),
    ("strategy=cp ring=2 data_parallel=2 devices=3", "data_parallel=2 × ring=2 × ulysses=1 = 4 must equal devices=3"),
    ("data=moving_digits data.height=31", r"data.patch_size=\[1, 2, 2\] must divide .*data.height=31"),
    ("data.patch_size=[1,2,2]", "data.token_width=1 "),
    ("resume=/no/such/place", "resume=/no/such/place does not exist"),
    ("resume=last", "resume=last: there is no complete checkpoint under /runs"),
    ("max_steps=${nothing}", "max_steps cannot be read: Interpolation key 'nothing' not found"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=[given for given, _ in REFUSED])
def test_a_bad_setting_is_named_with_its_value_and_what_is_valid(given: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        check(*given.split())
    assert "\n" not in str(caught.value)


def test_the_world_is_the_product_of_the_degrees() -> None:
    run = check("strategy=cp", "ring=2", "ulysses=2", "data_parallel=2")
    assert run.world.size == 8
    assert run.config.devices == run.config.trainer.devices == 8
    assert run.config.trainer.accelerator == "cpu"
    assert run.config.strategy.data_parallel == run.config.data_parallel == 2
    assert (run.config.strategy.ring, run.config.trainer.strategy.ulysses) == (2, 2)
    assert run.config.strategy.shares is None


def test_shares_are_passed_to_the_strategy() -> None:
    run = check("strategy=cp", "ring=2", "ulysses=2", "shares=[3,1,1,2]")
    assert run.config.trainer.strategy.shares == [3, 1, 1, 2]


@pytest.mark.parametrize(("cores", "ranks"), [(1, 16), (2, 16), (5, 20)])
def test_the_most_ranks_on_cpu_follow_from_the_cores(cores: int, ranks: int) -> None:
    assert check("strategy=cp", f"ring={ranks}", machine=TestMachine(cores)).world.size == ranks
    with pytest.raises(SettingsError, match=f"at most {ranks}"):
        check("strategy=cp", f"ring={ranks + 1}", machine=TestMachine(cores))


def test_on_gpus_every_rank_needs_one() -> None:
    assert check("strategy=cp", "ring=2", machine=GpuMachine(8)).world.accelerator == "cuda"
    with pytest.raises(
        SettingsError, match=r"ring=3 .*need a GPU each: there are 2 GPUs here; use fewer ranks, or accelerator=cpu"
    ):
        check("strategy=cp", "ring=3", machine=GpuMachine(8))
    assert check("strategy=cp", "ring=3", "accelerator=cpu", machine=GpuMachine(8)).world.size == 3
    assert check("precision=16-mixed", machine=GpuMachine(8)).world.accelerator == "cuda"


def test_devices_given_make_data_parallelism_of_what_is_left() -> None:
    assert check("strategy=cp", "ring=2", "devices=4").world.data_parallel == 2


def test_under_a_launcher_its_world_counts() -> None:
    place = LauncherEnv("torchrun", rank=1, world_size=8, ranks_per_node=4)
    world = check("strategy=cp", "ring=2", place=place).world
    assert (world.data_parallel, world.devices, world.num_nodes) == (4, 4, 2)
    with pytest.raises(SettingsError, match="ring=3 × ulysses=1 = 3 must divide the 8 ranks that torchrun started"):
        check("strategy=cp", "ring=3", place=place)
    with pytest.raises(SettingsError, match=r"data_parallel=2 × .* = 4 must equal the 8 ranks"):
        check("strategy=cp", "ring=2", "data_parallel=2", place=place)
    with pytest.raises(SettingsError, match="strategy=single is one process, but torchrun started 8"):
        check(place=place)
    with pytest.raises(SettingsError, match="devices=8 is not valid"):
        check("strategy=cp", "devices=8", place=place)


def test_places_are_read_from_the_environment() -> None:
    assert launcher_env({}) is None
    torchrun = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert launcher_env(torchrun) == LauncherEnv("torchrun", 3, 4, 2)
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "train"}
    assert launcher_env(slurm) == LauncherEnv("SLURM", 5, 8, 4)
    assert launcher_env(slurm | {"SLURM_JOB_NAME": "interactive"}) is None
    assert launcher_env(slurm | {"SLURM_NTASKS": "1"}) is None


def test_a_resumption_is_found_and_cannot_have_done_more(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "a" / "checkpoints", Checkpoint(30, {}, {}))
    here = (f"output_root={tmp_path}", f"run_dir={tmp_path / 'b'}", "resume=last")
    assert check(*here, "max_steps=31").config.resume == str(folder)
    assert check(*here, "max_steps=30").config.resume == str(folder)  # what comes after the steps may be missing
    with pytest.raises(SettingsError, match=r"max_steps=29 must be at least 30, the step of .*step_00000030"):
        check(*here, "max_steps=29")
    assert check(*here, "max_steps=31", "trace_step=31").config.trace_step == 31
    with pytest.raises(SettingsError, match=r"trace_step=30 must be more than 30, the step of .*step_00000030"):
        check(*here, "max_steps=31", "trace_step=30")
    os.truncate(folder / "manifest.json", 5)
    with pytest.raises(ValueError, match="truncated"):
        check(f"resume={folder}")


def test_resume_last_searches_next_to_a_run_folder_set_by_the_user(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "a" / "checkpoints", Checkpoint(3, {}, {}))
    assert check(f"run_dir={tmp_path / 'b'}", "resume=last").config.resume == str(folder)


def test_ranks_share_the_cores() -> None:
    assert threads_per_rank(check("strategy=cp", "ring=2").world, TestMachine(8)) == 4
    assert threads_per_rank(check("strategy=cp", "ring=4").world, TestMachine(2)) == 1


def test_this_machine_has_cores_and_gpus_can_be_counted() -> None:
    assert Machine.this().cores >= 1
    assert Machine.this().gpus >= 0
