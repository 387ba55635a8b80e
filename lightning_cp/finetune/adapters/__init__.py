"""LoRA and its relatives: add adapters, read and write their files."""
