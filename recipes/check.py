"""Check a plan: run a model alone and context-parallel in every mode, and print which outputs and gradients differ.

The same as `lightning-cp check`.
"""

from lightning_cp.app.commands.check import main

if __name__ == "__main__":
    main()
