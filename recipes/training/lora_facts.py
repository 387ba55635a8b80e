"""Describe a fine-tuning run with the metadata keys of kohya's sd-scripts, which tools for LoRAs read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_cp.finetune.card import public_text
from lightning_cp.finetune.latent_cache import LatentCache

_MOST_TAGS, _LONGEST_TAG = 100, 100


def kohya_facts(
    config: DictConfig, cache: LatentCache, *, samples: int, step: int, adapter: Mapping[str, float]
) -> dict[str, str]:
    """Return the metadata of a LoRA, names and texts.

    Args:
        samples: number of samples of an epoch, with repeats.
        step: number of training steps.
        adapter: "rank" and "alpha".
    """
    rows = cache.rows
    items = Counter[str]()
    for row in rows:
        items[row.use] += row.repeats
    sizes = Counter((row.width, row.height) for row in rows if row.use != "validation")
    buckets = {str(i): {"resolution": list(size), "count": sizes[size]} for i, size in enumerate(sorted(sizes))}
    facts: dict[str, Any] = {
        "base_model_version": cache.index.family,
        "sd_model_name": public_text(config.model.pretrained),
        "network_dim": adapter["rank"],
        "network_alpha": adapter["alpha"],
        "network_dropout": config.lora.dropout,
        "num_train_images": samples - items["prior"],
        "num_reg_images": items["prior"],
        "num_validation_images": items["validation"],
        "steps": step,
        "max_train_steps": config.max_steps,
        "total_batch_size": config.batch_size,
        "learning_rate": config.optim.lr,
        "lr_scheduler": config.lr_schedule,
        "lr_warmup_steps": config.warmup_steps,
        "optimizer": OmegaConf.select(config, "optim._target_"),
        "max_grad_norm": config.gradient_clip_val,
        "mixed_precision": config.precision,
        "gradient_checkpointing": config.activation_checkpointing != "none",
        "caption_dropout_rate": config.cond_dropout,
        "min_snr_gamma": config.objective.get("min_snr_gamma"),
        "seed": config.seed,
        "resolution": str(max(sizes, key=lambda size: sizes[size])),
        "bucket_info": json.dumps({"buckets": buckets}),
        "tag_frequency": json.dumps({"data": _tags(cache)}),
    }
    return {f"ss_{name}": str(value) for name, value in facts.items() if value is not None}


def _tags(cache: LatentCache) -> dict[str, int]:
    """Count parts of captions between commas by the samples that have them; those of one sample only are left out."""
    counts = Counter[str]()
    for row in cache.rows:
        texts = (cache.caption(hash) for hash in row.captions if row.use != "validation")
        counts.update({tag.strip() for text in texts for tag in text.split(",")})
    common = [(tag, count) for tag, count in counts.most_common() if count > 1 and 0 < len(tag) <= _LONGEST_TAG]
    return dict(sorted(common, key=lambda one: (-one[1], one[0]))[:_MOST_TAGS])
