"""Encode a data set of pictures or videos once, so that fine-tuning needs neither the VAE nor the text encoders.

The same as `lightning-cp precompute`.
"""

from lightning_cp.app.commands.precompute import main

if __name__ == "__main__":
    main()
