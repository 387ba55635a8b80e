"""Fine-tuning of pretrained diffusion transformers: loading, LoRA adapters, training."""
