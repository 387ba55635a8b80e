"""Fine-tune pretrained transformers on a latent cache: validation, LoRA and weights."""
