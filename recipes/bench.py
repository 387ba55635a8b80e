"""Measure attention, a training step and sampling: in one process, in every mode of lightning_cp, and in diffusers'.

The same as `lightning-cp bench`.
"""

from lightning_cp.app.commands.bench import main

if __name__ == "__main__":
    main()
