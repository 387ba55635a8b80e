"""Plan the degrees of parallelism: which layouts of the ranks fit, how long a step takes, and what bounds it.

The same as `lightning-cp plan`.
"""

import sys

from lightning_cp.app.commands.plan import main

if __name__ == "__main__":
    sys.exit(main())
