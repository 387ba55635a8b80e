"""Sample with diffusers pipelines on several ranks: distribute tokens, CFG branches and prompts."""

from lightning_cp.pipelines.apply import parallelize_pipeline, unparallelize_pipeline
from lightning_cp.pipelines.guidance.cfg_samples import cfg_merge, cfg_rows, cfg_split, gather, sampling_ranks, split
from lightning_cp.pipelines.prompts import ClipWithSound, read_prompts, sample_prompts
from lightning_cp.pipelines.serving.follow import follow
from lightning_cp.pipelines.serving.leader import Leader
from lightning_cp.pipelines.state import parallel_pipeline

__all__ = [
    "ClipWithSound",
    "Leader",
    "cfg_merge",
    "cfg_rows",
    "cfg_split",
    "follow",
    "gather",
    "parallel_pipeline",
    "parallelize_pipeline",
    "read_prompts",
    "sample_prompts",
    "sampling_ranks",
    "split",
    "unparallelize_pipeline",
]
