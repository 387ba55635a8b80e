"""A stand-in for NCCL on CPUs that allows only what NCCL guarantees: it finds hangs and races without a GPU.

`run_ranks(world, function, strict=True)` runs the ranks on it, `pytest --strict-comm` all tests with `run_ranks`. An
operation that is posted is sent, with its data, to a coordinator in the test's process (`coordinator.py`), which runs
the operations of each communicator in order, and tells the ranks what is done. Groups made with `backend="gloo"` stay
gloo groups: messages between hosts. What is checked:

- Receive buffers hold 0xFF until `wait` and are not written to; send buffers are not changed before `wait`; buffers in
  use do not overlap.
- The operations of a communicator have the same kind, size, data type and peers on all ranks.
- A send waits for its receive. A transfer outside of a batch uses a communicator of its pair.
- The first use of a communicator, of a kind of collective and of a pair blocks the host until its members use it.
- With `Strict(serial=True)`, a rank runs one operation at a time, in the order of its posts.

If no rank can go on, all ranks raise an error with what each waits for, its queues, and its stacks.
"""

from tests.harness.strict.coordinator import Coordinator
from tests.harness.strict.messages import Strict, StrictError

__all__ = ["Coordinator", "Strict", "StrictError"]
