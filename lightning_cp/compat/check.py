"""Private attributes and methods of other packages' objects, and the check that the installed version has them.

Public ones are here too where a renamed one would change results or checks without an error.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from types import CodeType
from typing import Any, Literal, NamedTuple

from lightning_cp.compat.versions import incompatible, private_names

Feature = Literal["model", "pipeline", "fabric", "trainer", "benchmark"]


class PrivateUse(NamedTuple):
    """A name of an object of another package. The tested versions are those of its package, in `versions.TESTED`.

    Attributes:
        feature: user of it: a parallel model, a parallel pipeline, the strategies for Fabric or the Trainer, or the
            benchmark.
        owner: module, or "module:class" or "module:function", that has the name or sets it.
        name: the attribute, method, class or variable.
        purpose: reason for using it; completes "used to …".
    """

    feature: Feature
    owner: str
    name: str
    purpose: str

    @property
    def package(self) -> str:
        """Name of the package."""
        return self.owner.partition(":")[0].split(".")[0]

    def __str__(self) -> str:
        return f"{self.owner.replace(':', '.')} has no {self.name}, used to {self.purpose}"


# Owners; under each, names and what they are used for.
_MODEL = """
torch.nn:Module
    _modules: walk through a model, and notice replaced modules
    _backward_pre_hooks: embed all patches if a hook would see the gradients of this rank only
    _forward_pre_hooks _forward_pre_hooks_with_kwargs: remove the engine's hooks from a module
    _forward_hooks _forward_hooks_with_kwargs _forward_hooks_always_called: remove the engine's hooks from a module
    _compiled_call_impl: find out whether a module is compiled
torch.library:CustomOpDef
    _qualname: find the adjoint of an operator
diffusers.models.modeling_utils:ModelMixin
    _parallel_config: recognise diffusers' own parallelism, and keep it from being enabled
    _gradient_checkpointing_func: run recomputed blocks in the call that they belong to
    _supports_gradient_checkpointing: exclude checkpointing from the plan of a model without it
    _keep_in_fp32_modules: load pretrained weights in the dtypes that from_pretrained gives them
    _keys_to_ignore_on_load_unexpected: ignore the weights in files that from_pretrained ignores
diffusers.models.attention_dispatch
    dispatch_attention_fn: replace attention calls
    _AttentionBackendRegistry: follow the chosen attention backend
diffusers.models.transformers.transformer_kandinsky
    nablaT_v2: choose blocks of keys from the means on all ranks
diffusers.models.transformers.transformer_kandinsky6_sr
    nabla_block_mask: choose blocks of keys from the means on all ranks
diffusers.models.attention_dispatch:_AttentionBackendRegistry
    _active_backend: follow the chosen attention backend
diffusers.models.attention:AttentionModuleMixin
    _attention_backend: follow the attention backend of a processor
diffusers.hooks.hooks:HookRegistry
    _diffusers_hook hooks: find the hooks of a module
    _fn_refs function_reference original_forward: put the engine inside wrappers of a forward
diffusers.hooks.hooks:ModelHook
    fn_ref: find out whether a step cache skips a module
diffusers.hooks.hooks:StateManager
    _state_cache _context _init_kwargs: let a step cache decide for all ranks
diffusers.hooks.first_block_cache:FBCHeadBlockHook
    _should_compute_remaining_blocks state_manager threshold: let a step cache decide for all ranks
diffusers.hooks.first_block_cache:FBCSharedBlockState
    head_block_residual tail_block_residuals: let a step cache decide for all ranks
diffusers.hooks.mag_cache:MagCacheBlockHook
    _perform_calibration_step: let a step cache decide for all ranks
diffusers.hooks.mag_cache:MagCacheHeadHook
    _metadata: check that a residual fits
diffusers.hooks.mag_cache:MagCacheState
    previous_residual calibration_ratios: let a step cache decide for all ranks
    should_compute: check that a residual fits
diffusers.hooks._helpers:TransformerBlockMetadata
    _get_parameter_from_args_kwargs: check that a residual fits
diffusers.hooks.sea_cache:SeaCacheSharedState
    resolve_gate: let a step cache decide for all ranks
diffusers.hooks.sea_cache:SeaCacheContextState
    accumulated_distance gate_should_compute history: let a step cache decide for all ranks
diffusers.hooks.text_kv_cache:TextKVCacheState
    key: recognise a text by its content
diffusers.hooks.faster_cache:FasterCacheDenoiserHook
    is_guidance_distilled: refuse FasterCache where a rank has one branch of guidance
diffusers.hooks.layer_skip
    AttentionScoreSkipFunctionMode: return the values where a guider skips attention scores
    AttentionProcessorSkipHook: allow a guider to skip the attention of a block
    TransformerBlockSkipHook: allow a guider to skip a block
diffusers.hooks.layer_skip:TransformerBlockSkipHook
    dropout: allow a guider to skip a block
accelerate.hooks:add_hook_to_module
    _old_forward: put the engine inside accelerate's wrapper of a forward
    _hf_hook: find out whether accelerate moves a module
"""

_PIPELINE = """
torch.nn:Module
    _call_impl _compiled_call_impl: intercept the calls of a component
    _buffers _non_persistent_buffers_set: compare persistent buffers of a pipeline's components between ranks
torch._dynamo.eval_frame:OptimizedModule
    _orig_mod dynamo_ctx: find out whether a module is compiled
torch._subclasses.fake_tensor:FakeTensorMode
    cache_enabled: count keys and values without results that stay in memory
diffusers.models.autoencoders.autoencoder_kl_magvit:AutoencoderKLMagvit
    _clear_conv_cache: begin a decoding of several ranks without frames of the last one
diffusers.pipelines.pipeline_utils:DiffusionPipeline
    _execution_device: set the device of a pipeline with components in host memory
    _progress_bar_config: show the progress bar on one rank only
diffusers.guiders.classifier_free_guidance:ClassifierFreeGuidance
    _start: find out whether guidance begins after the first step
diffusers.guiders.guider_utils:BaseGuidance
    prepare_models: refuse guiders that skip layers at random
diffusers.hooks.layer_skip:LayerSkipConfig
    skip_attention_scores dropout: refuse guiders that skip layers at random
diffusers.hooks._helpers:TransformerBlockRegistry
    get register: let guiders skip sharded blocks
diffusers.modular_pipelines.modular_pipeline:ModularPipeline
    _blocks: keep encoded prompts after the text encoder was freed
diffusers.pipelines.pag.pag_utils:PAGMixin
    set_pag_applied_layers: refuse PAG pipelines
"""

_STRATEGIES = """
lightning.FLAVOUR.strategies.ddp:DDPStrategy
    _ddp_kwargs: turn on find_unused_parameters for models that need it
    _configure_launcher: start ranks that listen on the loopback interface only, with the checked degrees
    _launcher: start ranks that listen on the loopback interface only
    _get_process_group_backend: connect ranks of one machine through the loopback interface only
    _timeout: report a stalled collective before it times out
lightning.FLAVOUR.strategies.model_parallel:ModelParallelStrategy
    _data_parallel_size: make Lightning's device mesh span all ranks
    _save_distributed_checkpoint: choose between one checkpoint file and one for each rank
    _configure_launcher: start ranks that listen on the loopback interface only, with the checked degrees
    _launcher: start ranks that listen on the loopback interface only
    _get_process_group_backend: connect ranks of one machine through the loopback interface only
    _timeout: report a stalled collective before it times out
lightning.FLAVOUR.strategies.launchers.multiprocessing:_MultiProcessingLauncher
    _strategy _start_method: prepare the process that starts ranks
lightning.FLAVOUR.strategies.launchers.subprocess_script:_SubprocessScriptLauncher
    _call_children_scripts: pass the listening socket to rank 0
lightning.fabric.plugins.environments.lightning:LightningEnvironment
    _main_port: use the port of the socket that is already open
lightning.fabric.utilities.distributed:_DatasetSamplerWrapper
    _sampler: let data groups divide one order of a sampler of your own
torch.nn:Module
    _parameters: create weights on the meta device
    _apply: allocate weights that are on the meta device
torch.nn.parallel:DistributedDataParallel
    _ddp_params_and_buffers_to_ignore: leave out tensors that DDP ignores when ranks' weights are compared
torch.distributed.fsdp:FSDPModule
    _get_fsdp_state: adapt one sharded module
torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState
    _fsdp_param_group: reduce gradients of accumulated and of single micro-batches together
    _register_pre_backward_hook: omit a warning about returned views
torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup
    fsdp_params post_backward: reduce gradients of accumulated and of single micro-batches together
    post_forward _to_sharded: free weights after evaluations
torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam
    _unsharded_param: reduce gradients of accumulated and of single micro-batches together
    to_accumulated_grad_if_needed: reduce gradients of accumulated and of single micro-batches together
    unsharded_accumulated_grad: reduce gradients of accumulated and of single micro-batches together
    _module_info: find replaced weights
torch.distributed:Reducer
    _rebuild_buckets: fix the order in which gradients are summed
torch:Tensor
    _backward_hooks _post_accumulate_grad_hooks: leave out parameters with hooks when DDP's buckets are built early
torch.utils.data:DataLoader
    _iterator: copy a data loader with another sampler
"""

_FABRIC = """
lightning.fabric.strategies.model_parallel:ModelParallelStrategy
    _backward_sync_control: average gradients once per accumulated batch
"""

_TRAINER = """
lightning.pytorch.strategies.ddp:DDPStrategy
    _model_averaging_period: let weights differ between ranks where they are averaged later
    _setup_model: fix the order in which gradients are summed
lightning.pytorch.strategies.launchers.multiprocessing:_MultiProcessingLauncher
    _collect_rank_zero_results: return whole weights from sharded ones
lightning.pytorch.callbacks.throughput_monitor:ThroughputMonitor
    _throughputs: count the samples of data groups, not of ranks
lightning.pytorch.trainer.trainer:Trainer
    _data_connector: keep the user's samplers
    _accelerator_connector: read use_distributed_sampler
lightning.pytorch.trainer.connectors.data_connector:_DataConnector
    _requires_distributed_sampler: keep the user's samplers
lightning.pytorch.trainer.connectors.accelerator_connector:_AcceleratorConnector
    use_distributed_sampler: read use_distributed_sampler
lightning.pytorch.overrides.distributed:_IndexBatchSamplerWrapper
    _batch_sampler: find the batch sampler inside Lightning's wrapper
lightning.pytorch.callbacks.weight_averaging:WeightAveraging
    _average_model _swap_models: use the weights that Lightning's callback averages
"""

_BENCHMARK = """
diffusers.models.modeling_utils:ModelMixin
    _cp_plan: measure diffusers' own context parallelism
"""


def _uses(feature: Feature, table: str) -> Iterator[PrivateUse]:
    owner = ""
    for line in filter(None, table.replace("FLAVOUR", "pytorch" if feature == "trainer" else "fabric").splitlines()):
        names, _, purpose = line.strip().partition(": ")
        if not line.startswith(" "):
            owner = line
        else:
            yield from (PrivateUse(feature, owner, name, purpose) for name in names.split())


TABLE = (
    *_uses("model", _MODEL),
    *_uses("pipeline", _PIPELINE),
    *_uses("fabric", _STRATEGIES + _FABRIC),
    *_uses("trainer", _STRATEGIES + _TRAINER),
    *_uses("benchmark", _BENCHMARK),
)

_CHECKED: set[PrivateUse] = set()  # found in this process: they are checked once


def check_private_uses(feature: Feature) -> None:
    """Check that all names which a feature needs exist, in the packages that are imported.

    Nothing is imported: if a module is not imported, none of its objects are in use.

    Raises: IncompatibleVersionError: a name does not exist in the installed version.
    """
    uses = [use for use in TABLE if use.feature == feature and use not in _CHECKED]
    owned = [(use, owner) for use in uses if (owner := owner_of(use)) is not None]
    check_uses(owned)
    _CHECKED.update(use for use, _ in owned)


def check_uses(uses: Iterable[tuple[PrivateUse, Any]]) -> None:
    """Check names on their owners. Raises: IncompatibleVersionError: a name does not exist."""
    missing = [use for use, owner in uses if not _has(owner, use.name)]
    if missing:
        raise incompatible(missing[0].package, "; ".join(map(str, missing)))


def owner_of(use: PrivateUse, *, load: bool = False) -> object:
    """Return the owner of a name; None if its module exists and is not imported.

    Args: load: import its module if necessary.
    Raises: IncompatibleVersionError: the installed version has no such module, class or function.
    """
    module, _, name = use.owner.partition(":")
    if load:
        with private_names(use.package):
            import_module(module)
    atoms = module.split(".")
    for end in range(1, len(atoms) + 1):
        path = ".".join(atoms[:end])
        if path in sys.modules:
            continue
        if end > 1 and find_spec(path) is None:  # its parent is imported: this imports nothing
            raise incompatible(use.package, str(use))
        return None
    module_object = sys.modules[module]
    if name and not hasattr(module_object, name):
        raise incompatible(use.package, str(use))
    return getattr(module_object, name) if name else module_object


def _has(owner: Any, name: str) -> bool:
    """Return True if an owner has an attribute, or if its code mentions it (methods set attributes of instances)."""
    if hasattr(owner, name):
        return True
    kinds = owner.__mro__ if isinstance(owner, type) else (owner,)
    return any(name in vars(kind).get("__annotations__", {}) or name in _mentioned(kind) for kind in kinds)


def _mentioned(kind: Any) -> set[str]:
    """Return the names in the code of a class or a function."""
    methods = list(vars(kind).values()) if isinstance(kind, type) else [kind]
    functions = [getattr(method, "__func__", getattr(method, "fget", None) or method) for method in methods]
    codes = [code for function in functions if isinstance(code := getattr(function, "__code__", None), CodeType)]
    return {name for code in codes for name in _names(code)}


def _names(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str):
            yield constant


# Digest of lightning.pytorch's ModelParallelStrategy.setup, the same in 2.6.0 and 2.6.6.
TRAINER_SETUP = "ba28ed8e9eabb6d5243731e9d9290e4f"


def check_unchanged(function: Callable[..., Any], digest: str) -> None:
    """Check a function of another package that one of ours replaces, with other steps.

    Args: digest: of its source without white space, in the tested versions.
    Raises: IncompatibleVersionError: it has changed, and may do something else, which our copy would leave out.
    """
    source = "".join(inspect.getsource(function).split())
    if hashlib.blake2b(source.encode(), digest_size=16).hexdigest() != digest:
        name = f"{function.__module__}.{function.__qualname__}"
        raise incompatible(name.split(".")[0], f"{name} has changed; lightning_cp has a copy of it")
