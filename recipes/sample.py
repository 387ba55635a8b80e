"""Sample from a checkpoint of recipes/train.py, or with a diffusers pipeline, on one rank or several.

The same as `lightning-cp sample`.
"""

from lightning_cp.app.commands.sample import main

if __name__ == "__main__":
    main()
