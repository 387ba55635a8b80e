"""Show versions, devices and kernels of this machine, and test each mode of attention on 2 and 3 ranks.

The same as `lightning-cp doctor`.
"""

import sys

from lightning_cp.app.commands.doctor import main

if __name__ == "__main__":
    sys.exit(main())
