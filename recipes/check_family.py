"""Check a model family: prove that training feeds the transformer as the pipeline does when it samples.

The same as `lightning-cp check-family`.
"""

from lightning_cp.app.commands.check_family import main

if __name__ == "__main__":
    main()
