"""Private attributes and methods of other packages' objects that lightning_cp reads, calls or overrides.

Public ones are here too where a renamed one would change results or checks without an error.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

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


def _uses(feature: Feature, owner: str, **purposes: str) -> list[PrivateUse]:
    return [PrivateUse(feature, owner, name, purpose) for name, purpose in purposes.items()]


_REMOVE_HOOKS = "remove the engine's hooks from a module"
_CACHES = "let a step cache decide for all ranks"
_RANDOM_GUIDANCE = "refuse guiders that skip layers at random"
_NABLA = "choose blocks of keys from the means on all ranks"
_COMPILED = "find out whether a module is compiled"
_REDUCE = "reduce gradients of accumulated and of single micro-batches together"
_FSDP = "torch.distributed.fsdp._fully_shard."
_LAUNCHERS = "lightning.{}.strategies.launchers."

_MODEL = [
    *_uses(
        "model",
        "torch.nn:Module",
        _modules="walk through a model, and notice replaced modules",
        _backward_pre_hooks="embed all patches if a hook would see the gradients of this rank only",
        _forward_pre_hooks=_REMOVE_HOOKS,
        _forward_pre_hooks_with_kwargs=_REMOVE_HOOKS,
        _forward_hooks=_REMOVE_HOOKS,
        _forward_hooks_with_kwargs=_REMOVE_HOOKS,
        _forward_hooks_always_called=_REMOVE_HOOKS,
        _compiled_call_impl=_COMPILED,
    ),
    *_uses("model", "torch.library:CustomOpDef", _qualname="find the adjoint of an operator"),
    *_uses(
        "model",
        "diffusers.models.modeling_utils:ModelMixin",
        _parallel_config="recognise diffusers' own parallelism, and keep it from being enabled",
        _gradient_checkpointing_func="run recomputed blocks in the call that they belong to",
        _supports_gradient_checkpointing="exclude checkpointing from the plan of a model without it",
        _keep_in_fp32_modules="load pretrained weights in the dtypes that from_pretrained gives them",
        _keys_to_ignore_on_load_unexpected="ignore the weights in files that from_pretrained ignores",
    ),
    *_uses(
        "model",
        "diffusers.models.attention_dispatch",
        dispatch_attention_fn="replace attention calls",
        _AttentionBackendRegistry="follow the chosen attention backend",
    ),
    *_uses("model", "diffusers.models.transformers.transformer_kandinsky", nablaT_v2=_NABLA),
    *_uses("model", "diffusers.models.transformers.transformer_kandinsky6_sr", nabla_block_mask=_NABLA),
    *_uses(
        "model",
        "diffusers.models.attention_dispatch:_AttentionBackendRegistry",
        _active_backend="follow the chosen attention backend",
    ),
    *_uses(
        "model",
        "diffusers.models.attention:AttentionModuleMixin",
        _attention_backend="follow the attention backend of a processor",
    ),
    *_uses(
        "model",
        "diffusers.hooks.hooks:HookRegistry",
        _diffusers_hook="find the hooks of a module",
        hooks="find the hooks of a module",
        _fn_refs="put the engine inside wrappers of a forward",
        function_reference="put the engine inside wrappers of a forward",
        original_forward="put the engine inside wrappers of a forward",
    ),
    *_uses("model", "diffusers.hooks.hooks:ModelHook", fn_ref="find out whether a step cache skips a module"),
    *_uses("model", "diffusers.hooks.hooks:StateManager", _state_cache=_CACHES, _context=_CACHES, _init_kwargs=_CACHES),
    *_uses(
        "model",
        "diffusers.hooks.first_block_cache:FBCHeadBlockHook",
        _should_compute_remaining_blocks=_CACHES,
        state_manager=_CACHES,
        threshold=_CACHES,
    ),
    *_uses(
        "model",
        "diffusers.hooks.first_block_cache:FBCSharedBlockState",
        head_block_residual=_CACHES,
        tail_block_residuals=_CACHES,
    ),
    *_uses("model", "diffusers.hooks.mag_cache:MagCacheBlockHook", _perform_calibration_step=_CACHES),
    *_uses("model", "diffusers.hooks.mag_cache:MagCacheHeadHook", _metadata="check that a residual fits"),
    *_uses(
        "model",
        "diffusers.hooks.mag_cache:MagCacheState",
        previous_residual=_CACHES,
        calibration_ratios=_CACHES,
        should_compute="check that a residual fits",
    ),
    *_uses(
        "model",
        "diffusers.hooks._helpers:TransformerBlockMetadata",
        _get_parameter_from_args_kwargs="check that a residual fits",
    ),
    *_uses("model", "diffusers.hooks.sea_cache:SeaCacheSharedState", resolve_gate=_CACHES),
    *_uses(
        "model",
        "diffusers.hooks.sea_cache:SeaCacheContextState",
        accumulated_distance=_CACHES,
        gate_should_compute=_CACHES,
        history=_CACHES,
    ),
    *_uses("model", "diffusers.hooks.text_kv_cache:TextKVCacheState", key="recognise a text by its content"),
    *_uses(
        "model",
        "diffusers.hooks.faster_cache:FasterCacheDenoiserHook",
        is_guidance_distilled="refuse FasterCache where a rank has one branch of guidance",
    ),
    *_uses(
        "model",
        "diffusers.hooks.layer_skip",
        AttentionScoreSkipFunctionMode="return the values where a guider skips attention scores",
        AttentionProcessorSkipHook="allow a guider to skip the attention of a block",
        TransformerBlockSkipHook="allow a guider to skip a block",
    ),
    *_uses("model", "diffusers.hooks.layer_skip:TransformerBlockSkipHook", dropout="allow a guider to skip a block"),
    *_uses(
        "model",
        "accelerate.hooks:add_hook_to_module",
        _old_forward="put the engine inside accelerate's wrapper of a forward",
        _hf_hook="find out whether accelerate moves a module",
    ),
]

_PIPELINE = [
    *_uses(
        "pipeline",
        "torch.nn:Module",
        _call_impl="intercept the calls of a component",
        _buffers="compare persistent buffers of a pipeline's components between ranks",
        _non_persistent_buffers_set="compare persistent buffers of a pipeline's components between ranks",
        _compiled_call_impl="intercept the calls of a component",
    ),
    *_uses("pipeline", "torch._dynamo.eval_frame:OptimizedModule", _orig_mod=_COMPILED, dynamo_ctx=_COMPILED),
    *_uses(
        "pipeline",
        "torch._subclasses.fake_tensor:FakeTensorMode",
        cache_enabled="count keys and values without results that stay in memory",
    ),
    *_uses(
        "pipeline",
        "diffusers.models.autoencoders.autoencoder_kl_magvit:AutoencoderKLMagvit",
        _clear_conv_cache="begin a decoding of several ranks without frames of the last one",
    ),
    *_uses(
        "pipeline",
        "diffusers.pipelines.pipeline_utils:DiffusionPipeline",
        _execution_device="set the device of a pipeline with components in host memory",
        _progress_bar_config="show the progress bar on one rank only",
    ),
    *_uses(
        "pipeline",
        "diffusers.guiders.classifier_free_guidance:ClassifierFreeGuidance",
        _start="find out whether guidance begins after the first step",
    ),
    *_uses("pipeline", "diffusers.guiders.guider_utils:BaseGuidance", prepare_models=_RANDOM_GUIDANCE),
    *_uses(
        "pipeline",
        "diffusers.hooks.layer_skip:LayerSkipConfig",
        skip_attention_scores=_RANDOM_GUIDANCE,
        dropout=_RANDOM_GUIDANCE,
    ),
    *_uses(
        "pipeline",
        "diffusers.hooks._helpers:TransformerBlockRegistry",
        get="let guiders skip sharded blocks",
        register="let guiders skip sharded blocks",
    ),
    *_uses(
        "pipeline",
        "diffusers.modular_pipelines.modular_pipeline:ModularPipeline",
        _blocks="keep encoded prompts after the text encoder was freed",
    ),
    *_uses("pipeline", "diffusers.pipelines.pag.pag_utils:PAGMixin", set_pag_applied_layers="refuse PAG pipelines"),
]


def _strategies(feature: Feature) -> list[PrivateUse]:
    """Return what the strategies of Fabric ("fabric") or of the Trainer ("trainer") use."""
    folder = "fabric" if feature == "fabric" else "pytorch"
    both = {
        "_configure_launcher": "start ranks that listen on the loopback interface only, with the checked degrees",
        "_launcher": "start ranks that listen on the loopback interface only",
        "_get_process_group_backend": "connect ranks of one machine through the loopback interface only",
        "_timeout": "report a stalled collective before it times out",
    }
    return [
        *_uses(
            feature,
            f"lightning.{folder}.strategies.ddp:DDPStrategy",
            _ddp_kwargs="turn on find_unused_parameters for models that need it",
            **both,
        ),
        *_uses(
            feature,
            f"lightning.{folder}.strategies.model_parallel:ModelParallelStrategy",
            _data_parallel_size="make Lightning's device mesh span all ranks",
            _save_distributed_checkpoint="choose between one checkpoint file and one for each rank",
            **both,
        ),
        *_uses(
            feature,
            f"{_LAUNCHERS.format(folder)}multiprocessing:_MultiProcessingLauncher",
            _strategy="prepare the process that starts ranks",
            _start_method="prepare the process that starts ranks",
        ),
        *_uses(
            feature,
            f"{_LAUNCHERS.format(folder)}subprocess_script:_SubprocessScriptLauncher",
            _call_children_scripts="pass the listening socket to rank 0",
        ),
        *_uses(
            feature,
            "lightning.fabric.plugins.environments.lightning:LightningEnvironment",
            _main_port="use the port of the socket that is already open",
        ),
        *_uses(
            feature,
            "lightning.fabric.utilities.distributed:_DatasetSamplerWrapper",
            _sampler="let data groups divide one order of a sampler of your own",
        ),
        *_uses(
            feature,
            "torch.nn:Module",
            _parameters="create weights on the meta device",
            _apply="allocate weights that are on the meta device",
        ),
        *_uses(
            feature,
            "torch.nn.parallel:DistributedDataParallel",
            _ddp_params_and_buffers_to_ignore="leave out tensors that DDP ignores when ranks' weights are compared",
        ),
        *_uses(
            feature,
            "torch.distributed.fsdp:FSDPModule",
            _get_fsdp_state="renew dtypes of gradients when other parameters begin to train",
        ),
        *_uses(feature, "torch.distributed.fsdp:FSDPModule", _get_fsdp_state="adapt one sharded module"),
        *_uses(
            feature,
            f"{_FSDP}_fsdp_state:FSDPState",
            _fsdp_param_group=_REDUCE,
            _register_pre_backward_hook="omit a warning about returned views",
        ),
        *_uses(feature, f"{_FSDP}_fsdp_param_group:FSDPParamGroup", fsdp_params=_REDUCE, post_backward=_REDUCE),
        *_uses(feature, f"{_FSDP}_fsdp_param_group:FSDPParamGroup", post_forward="free weights after evaluations"),
        *_uses(
            feature,
            f"{_FSDP}_fsdp_param:FSDPParam",
            _unsharded_param=_REDUCE,
            _module_info="find replaced weights",
            to_accumulated_grad_if_needed=_REDUCE,
            unsharded_accumulated_grad=_REDUCE,
        ),
        *_uses(feature, "torch.distributed:Reducer", _rebuild_buckets="fix the order in which gradients are summed"),
        *_uses(
            feature,
            "torch:Tensor",
            _backward_hooks="leave out parameters with hooks when DDP's buckets are built early",
            _post_accumulate_grad_hooks="leave out parameters with hooks when DDP's buckets are built early",
        ),
        *_uses(feature, "torch.utils.data:DataLoader", _iterator="copy a data loader with another sampler"),
    ]


_FABRIC = [
    *_strategies("fabric"),
    *_uses(
        "fabric",
        "lightning.fabric.strategies.model_parallel:ModelParallelStrategy",
        _backward_sync_control="average gradients once per accumulated batch",
    ),
]

_TRAINER = [
    *_strategies("trainer"),
    *_uses(
        "trainer",
        "lightning.pytorch.strategies.ddp:DDPStrategy",
        _model_averaging_period="let weights differ between ranks where they are averaged later",
        _setup_model="fix the order in which gradients are summed",
    ),
    *_uses(
        "trainer",
        f"{_LAUNCHERS.format('pytorch')}multiprocessing:_MultiProcessingLauncher",
        _collect_rank_zero_results="return whole weights from sharded ones",
    ),
    *_uses(
        "trainer",
        "lightning.pytorch.callbacks.throughput_monitor:ThroughputMonitor",
        _throughputs="count the samples of data groups, not of ranks",
    ),
    *_uses(
        "trainer",
        "lightning.pytorch.trainer.trainer:Trainer",
        _data_connector="keep the user's samplers",
        _accelerator_connector="read use_distributed_sampler",
    ),
    *_uses(
        "trainer",
        "lightning.pytorch.trainer.connectors.data_connector:_DataConnector",
        _requires_distributed_sampler="keep the user's samplers",
    ),
    *_uses(
        "trainer",
        "lightning.pytorch.trainer.connectors.accelerator_connector:_AcceleratorConnector",
        use_distributed_sampler="read use_distributed_sampler",
    ),
    *_uses(
        "trainer",
        "lightning.pytorch.overrides.distributed:_IndexBatchSamplerWrapper",
        _batch_sampler="find the batch sampler inside Lightning's wrapper",
    ),
    *_uses(
        "trainer",
        "lightning.pytorch.callbacks.weight_averaging:WeightAveraging",
        _average_model="use the weights that Lightning's callback averages",
        _swap_models="use the weights that Lightning's callback averages",
    ),
]

_BENCHMARK = _uses(
    "benchmark", "diffusers.models.modeling_utils:ModelMixin", _cp_plan="measure diffusers' own context parallelism"
)

TABLE = (*_MODEL, *_PIPELINE, *_FABRIC, *_TRAINER, *_BENCHMARK)
