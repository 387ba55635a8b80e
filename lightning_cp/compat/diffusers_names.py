"""Private names of diffusers. The import takes seconds: import this module where it is needed."""

from __future__ import annotations

from lightning_cp.compat.versions import private_names

with private_names("diffusers"):
    from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
    from diffusers.models.attention_dispatch import (
        _templated_context_parallel_attention as templated_context_parallel_attention,
    )

__all__ = ["ContextParallelInput", "ContextParallelOutput", "templated_context_parallel_attention"]
