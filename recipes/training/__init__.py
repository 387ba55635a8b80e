"""The training loop of `lightning-cp train`, with Fabric and with the Trainer."""
