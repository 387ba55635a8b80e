"""Compare the exactness of diffusers' own context parallelism and of ours on 3 CPU ranks in float64.

The same as `lightning-cp compare`.
"""

import sys

from lightning_cp.app.commands.compare import main

if __name__ == "__main__":
    sys.exit(main())
