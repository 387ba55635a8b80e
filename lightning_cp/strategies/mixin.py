"""Base class of the strategies for Fabric and the Trainer; it precedes Lightning's strategy in the list of bases."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from inspect import signature
from typing import Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, IterableDataset

from lightning_cp.compat.check import check_private_uses
from lightning_cp.config import RotateMethod
from lightning_cp.data.divided_sampler import Shard, StepDegrees
from lightning_cp.data.equal_batches import with_equal_batches
from lightning_cp.data.peer_batches import prepare_loader
from lightning_cp.data.random_state import RandomStates, separate_random_states, share_random_state
from lightning_cp.engine.apply import Installed
from lightning_cp.engine.attention.stand_ins import (
    SHARED_SAMPLES,
    averaged_backward,
    inputs_of,
    install_stand_ins,
    release_stand_ins,
)
from lightning_cp.launch.stall import stop_watch
from lightning_cp.mesh.degrees import AUTO
from lightning_cp.strategies.agreement import Agreement, compare_jobs
from lightning_cp.strategies.auto_degrees import Example, example_of, propose_degrees
from lightning_cp.strategies.context import ContextParallel, ShardsBatches
from lightning_cp.strategies.gradients import mean_grad, sharded_units
from lightning_cp.strategies.initial_weights import ReplacedWeights, equal_initial_weights
from lightning_cp.strategies.launchers import LocalRanks, check_start_method, choose_start_method
from lightning_cp.strategies.sample_counts import gather_metrics_once, gather_once, is_world, reduce_decision
from lightning_cp.strategies.settings import StrategySettings, check_known
from lightning_cp.strategies.sweep_ranks import end_previous_job

_log = logging.getLogger("lightning.fabric.strategies.context_parallel")  # child of a logger with a handler
_GRAD_ARGUMENTS = list(signature(torch.autograd.grad).parameters)[2:]


class ContextParallelMixin(ShardsBatches):
    """Shard the tokens of each sample over ring x ulysses ranks; average gradients over all ranks.

    Args:
        ring: number of ranks in a ring.
        ulysses: number of ranks in a Ulysses group. A context group has ring x ulysses ranks, `ulysses` innermost.
        data_parallel: number of context groups; "auto": world size / (ring x ulysses).
        rotate_method, grid, convert_to_fp32: see `lightning_cp.ContextParallelConfig`.
        mesh: a DeviceMesh with axes `ring` and `ulysses`, and any others; degrees are read from it.
        plans: plans by model class, class name or module name; they take precedence over registered plans.
        modules: classes or names of the modules to wrap; default: every transformer that has a plan.
        kernel: name of the attention kernel; "auto" chooses by device, dtype and mask.
        check_peers: comparison of transformer inputs between context peers. "first": the first 2 forwards, in full.
            "sampled": also samples of every later forward, in the background; a difference is raised in the next
            forward. "always": every forward, in full. "off": none. With sharded weights, each setting but "off" also
            compares which modules the data groups run; "always" includes blocks.
        stall_s: seconds until a stalled collective is reported; None: never.
        shares: for unequal devices, a positive weight for each rank of a context group, in rank order (ring-major):
            [2, 1] gives the first rank two thirds of the tokens, and of the heads with Ulysses. All context groups use
            the same. FSDP shards weights evenly. None: equal.
        degrees: context degrees of steps with short samples, see `use_degree`: {4096: 1, 32768: 4} computes samples of
            up to 4,096 tokens on one rank each, and those of up to 32,768 on four; longer ones on ring x ulysses ranks.
            "auto": the planner chooses ring and ulysses. Rank 0 dry-runs them for the arguments in
            `example_input_array` of the LightningModule or of `example`, and sends its choice to all ranks.
        mlp_tiles: number of tiles of tokens in which each feed-forward of a block is computed, to save memory; "auto":
            as many as make a tile's widest tensor no larger than the feed-forward's input. None: one piece.
        timeout: timeout of collectives.
        start_method: method that starts the ranks: "popen", "spawn", "fork" or "forkserver" (see Lightning's
            DDPStrategy). None: "fork" in a notebook or another interactive session, "popen" elsewhere.
        whole_world: "ring" or "ulysses": this axis takes all ranks (the registered names "cp_ring" and "cp_ulysses" set
            it). None: the degrees above.
        example: for `degrees="auto"`: a module with the transformer to plan, and with the arguments of its forward on
            one rank, whole, as a tuple or dict in the attribute `example_input_array`; tensors may be on the meta
            device. None: the Trainer's LightningModule; Fabric needs it. Lightning's ModelSummary runs the forward of a
            LightningModule with these arguments, which fails on the meta device: pass `example`, or turn it off.
        kwargs: settings of the Lightning strategy.
    Raises: ValueError, TypeError: bad settings, before any rank is started.
    """

    _kwargs_targets: tuple[type, ...] = ()  # further classes that receive the settings in kwargs
    _process_launcher: Any  # launcher class for start methods other than popen
    _script_launcher: Any  # launcher class for popen
    _planner: Callable[[Example], Any]  # chooses degrees; raises ValueError: none are possible
    _adapter: Callable[[nn.Module], Callable[[nn.Module], None]]  # (wrapper) -> (wrapper): adapt it to what trains now
    _evaluates_together = False  # a forward without gradients has collectives of all ranks
    _shards_batch_samplers = False  # divide batch samplers that Lightning cannot divide
    _batches_taken: Callable[[int], int] | None = None  # number that a loop takes from a loader of a length

    def __init__(
        self,
        ring: int = 1,
        ulysses: int = 1,
        data_parallel: int | str = "auto",
        rotate_method: RotateMethod = "allgather",
        convert_to_fp32: bool = True,
        mesh: Any = None,
        plans: Mapping[Any, object] | None = None,
        modules: Sequence[Any] | None = None,
        kernel: str = "auto",
        check_peers: str = "sampled",
        stall_s: float | None = 60.0,
        shares: Sequence[float] | None = None,
        degrees: Mapping[int, int] | str | None = None,
        mlp_tiles: int | str | None = None,
        grid: Sequence[int] | None = None,
        timeout: timedelta = timedelta(minutes=5),
        start_method: str | None = None,
        whole_world: str | None = None,
        example: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        # Before other names are bound: a setting of StrategySettings is only added to the signature.
        settings = locals()
        uses_trainer = any(kind.__module__.startswith("lightning.pytorch") for kind in type(self).__mro__)
        check_private_uses("trainer" if uses_trainer else "fabric")
        check_known(type(self), kwargs)
        check_start_method(start_method)
        super().__init__(timeout=timeout, **kwargs)  # type: ignore[call-arg]
        if whole_world not in (None, "ring", "ulysses"):
            raise ValueError(f"whole_world={whole_world!r} must be None, 'ring' or 'ulysses'")
        if whole_world is not None and degrees == AUTO:
            raise ValueError(f"degrees='auto' does not work with whole_world={whole_world!r}: leave one of them out")
        self._whole_world, self._chosen_start_method = whole_world, start_method
        self._example = example
        self._settings = StrategySettings.pick(settings)
        self.context = ContextParallel(self._settings)
        self._replaced = ReplacedWeights()
        self._agreement = Agreement()
        self._gathered: list[FSDPModule] = []  # units whose weights `grad` keeps gathered
        self.local_ranks = LocalRanks()

    @property
    def data_rank(self) -> int:
        """Index of this rank's context group."""
        if self.context.groups is None and self.context.settings.mesh is None:
            return int(self._lightning.global_rank // self.context.size)
        return self.context.initialized_groups().data_rank

    @property
    def data_size(self) -> int:
        """Number of context groups."""
        if self.context.groups is None and self.context.settings.mesh is None:
            return self._planned_world // self.context.size
        return self.context.initialized_groups().data_size

    @property
    def context_rank(self) -> int:
        """Index of this rank in its context group."""
        return self.context.initialized_groups().context_rank

    @property
    def context_size(self) -> int:
        """Number of ranks that share one sample."""
        return self.context.size

    @property
    def step_degrees(self) -> StepDegrees:
        """The context degrees of `degrees` and ring x ulysses, and this rank's data group at each of them."""
        self.context.initialized_groups()
        built = self.context.built.items()
        shards = {degree: Shard(groups.data_rank, groups.data_size) for degree, (_, groups) in built}
        return StepDegrees(shards, dict(self.context.settings.degrees or {}))  # type: ignore[arg-type]

    def use_degree(self, degree: int | None) -> None:
        """Compute the following forwards, and their backwards, in context groups of `degree` ranks.

        `shard`, `gather`, `local_mean`, `generator`, `all_gather` and sums over ranks follow it; `data_rank` and the
        samplers are those of ring x ulysses. Gradients are averaged over all ranks at every degree. Call it on all
        ranks between a backward and the next forward. The ranks of a group need the same samples: those of
        `step_degrees.shards[degree]`.

        Args: degree: one of `step_degrees.shards`; None: ring x ulysses.
        Raises: ValueError: the degree is not in `degrees`.
        """
        self.context.use_degree(degree)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of DistributedSampler: each context group is one replica."""
        return {"num_replicas": self.data_size, "rank": self.data_rank}

    @property
    def random_states(self) -> RandomStates:
        """Random states of all data groups, to save and load as an entry of Fabric's state."""
        return RandomStates(self.data_rank, self.data_size)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Give context peers the same batches, and seed workers from the data rank; see `prepare_loader`.

        An iteration raises DataError on all ranks if data groups have different numbers of batches.

        Raises: ValueError: an iterable data set without `sharded_by_data_rank = True` (it must yield only this data
            rank's samples), or a DistributedSampler with replicas other than the data groups.
        """
        dataset = getattr(dataloader, "dataset", None)
        source = dataset if isinstance(dataloader, DataLoader) else dataloader
        divided = any(getattr(holder, "sharded_by_data_rank", False) for holder in (dataloader, dataset))
        by_index = isinstance(dataloader, DataLoader) and not isinstance(dataset, IterableDataset)
        if self.data_size > 1 and not by_index and not divided:
            raise ValueError(
                f"{type(source).__name__} is iterable, so the strategy cannot shard it over {self.data_size} data "
                "ranks: yield only this data rank's samples (strategy.data_rank, strategy.data_size), and set "
                "sharded_by_data_rank = True on it"
            )
        if by_index and self.context.groups is not None:
            dataloader = prepare_loader(dataloader, self.context.groups, divide=self._shards_batch_samplers)
        if isinstance(dataloader, DataLoader):
            chosen = dataloader.worker_init_fn
            is_lightnings = isinstance(chosen, partial) and chosen.func is pl_worker_init_function
            if is_lightnings or (chosen is None and os.environ.get("PL_SEED_WORKERS", "0") == "1"):
                dataloader.worker_init_fn = partial(pl_worker_init_function, rank=self.data_rank)
        return with_equal_batches(dataloader, always=self._evaluates_together, taken=self._batches_taken)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """All-gather the tensors of the data groups, [data groups, ...]: the ranks of a context group count once.

        Args: group: process group to gather from instead; each of its ranks counts.
        """
        if self.context.step_groups is None or not is_world(group):
            everyones: Tensor = super().all_gather(tensor, group, sync_grads)  # type: ignore[misc]
            return everyones
        return gather_once(tensor, self.context.step_groups, differentiable=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks (with `all=False`: any rank) decided for it."""
        return reduce_decision(decision, every=all, device=self._lightning.root_device)

    def _configure_launcher(self) -> None:
        end_previous_job()
        world = self._planned_world
        if self._whole_world is not None:
            degree: dict[str, Any] = {self._whole_world: world}
            self.context = ContextParallel(replace(self._settings, **degree))
        self.context.check_world(world)
        external = self._lightning.cluster_environment.creates_processes_externally
        method = choose_start_method(self._chosen_start_method, ranks=world, external=external)
        if method is None:
            return  # the only rank is this process
        super()._configure_launcher()  # type: ignore[misc]
        strategy = self._lightning
        if method != "popen":
            self._launcher = self._process_launcher(strategy, start_method=method)
        elif not external:
            ranks = (strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
            self._launcher = self._script_launcher(*ranks, local_ranks=self.local_ranks)

    def setup_environment(self) -> None:
        """Initialise the process group and build the mesh."""
        proposal = self._propose_degrees()
        self.local_ranks.join(self._lightning)
        super().setup_environment()  # type: ignore[misc]
        compare_jobs(self, self._settings)
        self._use_proposal(proposal)
        self.context.check_world(self._lightning.world_size)
        gather_metrics_once(self.context.set_up())
        self.context.watch(timeout=self._lightning._timeout)

    def _propose_degrees(self) -> tuple[tuple[int, ...], str] | None:
        """Choose the degrees on rank 0, with `degrees="auto"`, if there are several ranks. Call it before they meet."""
        if self.context.settings.degrees != AUTO or self._planned_world == 1:
            return None
        environment = self._lightning.cluster_environment
        if environment.node_rank() * self._lightning.num_processes + environment.local_rank():
            return None
        module = self._example if self._example is not None else getattr(self, "lightning_module", None)
        settings = {"strategy": self._lightning, "ranks": self._planned_world, "sharded": self._evaluates_together}
        return propose_degrees(self._planner, partial(example_of, module, self.context, **settings))

    def _use_proposal(self, proposal: tuple[tuple[int, ...], str] | None) -> None:
        """Use rank 0's proposal, with `degrees="auto"`. Ranks: the whole world. Raises: ValueError: it has none."""
        if self.context.settings.degrees != AUTO:
            return
        degrees, text = self._lightning.broadcast(proposal) or ((1, 1), "")
        if not degrees:
            raise ValueError(text)
        self.context = ContextParallel(replace(self._settings, ring=degrees[0], ulysses=degrees[1], degrees=None))
        if text:
            rank_zero_only(_log.info)(text)

    def backward(self, *args: Any, **settings: Any) -> Any:
        """Run a backward.

        Raises, on all ranks:
            ValueError: weights were loaded, cast, or changed in what trains, on some ranks only or in a way that the
                strategy cannot adapt to; replicated weights differ (not with check_peers="off").
            PeerMismatchError: optimizers have other settings on other ranks; not with check_peers="off".
        """
        checks = self._settings.check_peers != "off"
        averages_weights = getattr(self, "_model_averaging_period", None) is not None  # they may differ in between
        self._agreement.before_backward(args[0], optimizers=checks, weights=checks and not averages_weights)
        with averaged_backward():
            return super().backward(*args, **settings)  # type: ignore[misc]

    def grad(self, outputs: Any, inputs: Any, *args: Any, **settings: Any) -> Any:
        """Compute `torch.autograd.grad`: the gradients of one process, on every rank, for use within a step.

        Each rank passes the whole loss, as to a backward. With `create_graph=True`, what is computed from the gradients
        can be a part of the loss: a gradient penalty trains as in one process, if each rank adds the whole penalty.

        Args:
            outputs, inputs, args, settings: as for `torch.autograd.grad`. Inputs are weights, or whole tensors that
                context peers share; shards of tokens are not supported.
        Returns: as `torch.autograd.grad`. For weights (`nn.Parameter`), the mean over all ranks: the gradient of the
            mean of the outputs of all data groups, as a backward leaves it in `.grad`; whole where weights are sharded.
            For other tensors, the mean over the context group: the gradient of this data group's outputs.
            With `allow_unused`, None if no rank uses an input.
        Ranks: the whole world. Gradient: with create_graph, exact; second derivatives of attention are not implemented.
        Raises:
            ValueError: other ranks pass other weights, or run a backward.
            PeerMismatchError: with sharded weights, other ranks run a forward; see `EqualBranches.next`.
        """
        inputs = inputs if isinstance(inputs, Mapping) else inputs_of(inputs)  # maybe an iterator
        self._agreement.before_grad(inputs_of(inputs))
        settings.update(zip(_GRAD_ARGUMENTS, args, strict=False))
        units = sharded_units(self._agreement.wrappers())
        context = None if self.context.groups is None else self.context.initialized_groups(of_step=True).context
        grads = mean_grad(outputs, inputs, units, context, **settings)
        if settings.get("create_graph"):
            self._gathered = units
        for unit in self._gathered:  # graphs of gradients read the weights
            unit.unshard()
        return grads

    def optimizer_step(self, optimizer: Any, *args: Any, **settings: Any) -> Any:
        """Run an optimizer step.

        Raises: ValueError: the loss does not use a trained parameter; see `check_reduced`.
        """
        gathered, self._gathered = self._gathered, []
        for unit in gathered:
            unit.reshard()
        self._check_reduced()
        return super().optimizer_step(optimizer, *args, **settings)  # type: ignore[misc]

    def save_checkpoint(self, *args: Any, **settings: Any) -> None:
        """Save a checkpoint. Raises: PeerMismatchError: context peers were given different data in the last forward."""
        self.context.finish_checks()
        super().save_checkpoint(*args, **settings)  # type: ignore[misc]

    def teardown(self) -> None:
        """Stop the stall watchdog, then run Lightning's teardown.

        Raises: PeerMismatchError: context peers were given different data in the last forward.
        """
        stop_watch()
        for wrapper in self._agreement.wrappers():
            SHARED_SAMPLES.discard(wrapper)
            release_stand_ins(wrapper)
        try:
            self.context.finish_checks(within_s=0.0)
        finally:
            super().teardown()  # type: ignore[misc]

    def _log_layout(self, installed: list[Installed]) -> None:
        """Log the layout in one line on rank 0. Call it under the precision of the forward."""
        line = self.context.describe(installed, ranks_per_node=self._lightning.num_processes)
        if line is not None:
            rank_zero_only(_log.info if installed or self.context.size == 1 else _log.warning)(line)

    def _wrap(self, module: nn.Module) -> list[Installed]:
        return self.context.wrap(module)

    @contextmanager
    def _from_equal_weights(self, module: nn.Module) -> Iterator[None]:
        """Start from rank 0's weights on every rank; see `equal_initial_weights`. Shard the module inside.

        From then on, the ranks of each context group draw the same random numbers. The first backward checks that no
        weights were loaded on some ranks only.
        """
        with self._replaced.recording(module), equal_initial_weights(module, self._lightning.root_device):
            yield
        self._agreement.add_weights(module)
        self._share_random_state()

    def check_optimizers(self, optimizers: Iterable[Any]) -> None:
        """Check optimizers before their first step. Raises: ValueError: one cannot update the weights."""

    def watch_trained(self, wrapper: nn.Module) -> None:
        """Compare between ranks what trains in a DDP or sharded module, and adapt to changes, or refuse them."""
        if self.context.groups is not None and self.context_size > 1:
            install_stand_ins(wrapper)
            SHARED_SAMPLES.add(wrapper)
        self._agreement.add_wrapper(wrapper, self._adapter(wrapper))

    def _check_reduced(self) -> None:
        """Check that the gradients of DDP modules were averaged."""

    def _share_random_state(self) -> None:
        """Give each context group the random states of its first rank."""
        if self.context.groups is not None:
            share_random_state(self.context.groups)

    def _separate_random_states(self) -> None:
        """Let data groups draw different noise, also after `seed_everything`."""
        if self.context.groups is not None:
            separate_random_states(self.context.groups)

    @property
    def _planned_world(self) -> int:
        return int(self._lightning.num_nodes * self._lightning.num_processes)

    @property
    def _lightning(self) -> Any:
        """This object, typed as the Lightning strategy."""
        return self
