"""Train a small diffusers transformer on real digits, sample from it, and show the result.

The same as `lightning-cp train`.
"""

from lightning_cp.app.commands.train import main

if __name__ == "__main__":
    main()
