"""Plant one fault after another in the package, and see that the default tests find each.

    python -m tests.planted           all faults
    python -m tests.planted 3 17      faults 3 and 17

Run it before and after a change that removes tests. Each line is a fault: file, old text (found once in the file), new
text, and the tests that must fail: of the default suite, or `full` ones on the stand-in for NCCL. Files are restored.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "lightning_cp"


class Fault(NamedTuple):
    """One fault."""

    file: str
    old: str
    new: str
    tests: str


_EXACT = "dist/attention/test_exactness.py"
_STRICT, _PATCHES = "dist/comm/test_strict.py -m full -k", "pipelines/pipefusion"
FAULTS = (
    # attention: wrong direction, dropped mask, parts merged or summed wrongly
    Fault("comm/ring_exchange.py", "owner = (rank - step) % size", "owner = (rank + step) % size", _EXACT),
    Fault("comm/ring_exchange.py", "total.add_(grad)", "total.copy_(grad)", _EXACT),
    Fault("attention/ring.py", 'if mask is None or ring.mask_kind != "key_mask" else [mask]', "", _EXACT),
    Fault("attention/gathered.py", "ranks, s, b, width, d).sum(0)", "ranks, s, b, width, d)[0]", _EXACT),
    Fault("attention/merge.py", "torch.nan_to_num(b.lse - a.lse", "torch.nan_to_num(a.lse - b.lse", _EXACT),
    Fault(
        "attention/keys.py", "positions[-1].stop <= ring.q_start + 1", "positions[-1].stop <= ring.q_start + 2", _EXACT
    ),
    Fault("attention/ulysses.py", "total[:, :, rank_heads.key] +=", "total[:, :, rank_heads.key] =", _EXACT),
    Fault("kernels/local.py", "is_finite else part.lse.masked_fill(", "True else part.lse.masked_fill(", _EXACT),
    Fault(
        "attention/sparse/needed.py",
        ".index_add_(1, places, x)",
        ".index_copy_(1, places, x)",
        "dist/attention/test_sparse.py",
    ),
    Fault(
        "comm/shards.py", "total = total + unpack_tensors", "total = unpack_tensors", "models/test_models.py -k flux"
    ),
    Fault(
        "comm/halo.py",
        "halo.shape[dim]).add_(halo)",
        "halo.shape[dim]).copy_(halo)",
        "dist/comm/test_neighbours.py dist/comm/test_comm.py",
    ),
    # engine: what a plan splits, random numbers, segments
    Fault("plans/flux.py", '"txt_ids": split(-2, "text"),', "", "models/test_models.py -k flux"),
    Fault("plans/wan.py", ', "rotary_emb": split(1, "image")}', "}", "models/test_models.py -k wan"),
    Fault("engine/attention/dropout.py", 'f"{drawn}/{rank}"', 'f"{drawn}"', "dist/engine/test_shard_dropout.py"),
    Fault(
        "engine/attention/segments.py",
        "positions[:, None] >= torch",
        "positions[:, None] > torch",
        "unit/engine dist/engine/test_engine_features.py models/test_models.py",
    ),
    # strategies: gradients and values that are summed, counted twice or read by the wrong rank
    Fault("strategies/gradients.py", "(total / group.size())", "total", "dist/strategies/test_gradients.py"),
    Fault(
        "strategies/sample_counts.py",
        "else total.div_(groups.context_size)",
        "else total",
        "dist/strategies/test_sample_counts.py",
    ),
    Fault("data/peer_batches.py", "_divided(batches.order", "_divided(batches", "dist/strategies/test_batches.py"),
    Fault("callbacks/ema.py", "_average.add_trained(pl_module)", "_average", "dist/strategies/test_partial_steps.py"),
    Fault("data/sampler.py", "return self.data_rank * (", "return 0 * (", "unit/data"),
    Fault(
        "training/ema.py", "(1 + step) / (10 + step)", "(1 + step) / (1 + step)", "dist/strategies/test_ema_callback.py"
    ),
    Fault("finetune/objectives/flow.py", "noise - clean", "clean - noise", "unit/finetune/objectives"),
    # pipelines
    Fault(
        "pipelines/pipefusion/patches.py",
        "return buffer.tensors[0].sum(0)",
        "return buffer.tensors[0][0]",
        "models/test_patches.py",
    ),
    Fault(
        "pipelines/guidance/branches.py",
        "kwargs, self.ranks.cfg)[self.ranks.cfg_rank]",
        "kwargs, self.ranks.cfg)[0]",
        "pipelines/test_pipelines.py",
    ),
    # settings: a rule removed, a bound moved, the names of a message exchanged
    Fault("recipes/settings/table.py", "batch_size log_every", "batch_size", "unit/recipes/test_rules.py"),
    Fault("rules.py", "value > self.above", "value >= self.above", "unit/recipes/test_rules.py"),
    Fault(
        "recipes/settings/consistency.py",
        "trace_step={step} is not valid: must be at most max_steps={last}",
        "max_steps={last} is not valid: must be at most trace_step={step}",
        "unit/recipes/test_settings.py",
    ),
    Fault(
        "strategies/settings.py",
        "check_shares(self.shares, ring=self.config.ring, ulysses=self.config.ulysses)",
        "pass",
        "unit/strategies unit/mesh",
    ),
    # files and processes
    Fault(
        "checkpoint/manifest.py",
        "if actual != entry:",
        "if actual.size_bytes != entry.size_bytes:",
        "unit/checkpoint faults/checkpoint",
    ),
    Fault("checkpoint/manifest.py", "if version != FORMAT:", "if False:", "unit/checkpoint faults/checkpoint"),
    Fault(
        "comm/agree.py",
        'if (difference := first_difference(by_rank, "")) is not None:',
        "if False:",
        "dist/attention/test_shares.py",
    ),
    Fault("pytorch.py", " and not replaces_folder:", ":", "dist/checkpoint/test_trainer_checkpoints.py"),
    Fault("launch/cause.py", "exit_code=128 - code", "exit_code=0", "unit/launch faults/launch"),
    # a grid: dQ not summed over the row, a partial result merged twice, rows and columns exchanged
    Fault("attention/grid.py", "Grads(grads.sum(0, dtype=", "Grads(grads[:1].sum(0, dtype=", _EXACT),
    Fault("attention/grid.py", "zip(*parts, strict=True):", "[*zip(*parts), *zip(*parts)]:", _EXACT),
    Fault("mesh/groups.py", "row=row, column=column,", "row=column, column=row,", _EXACT),
    # transfers: read before they are complete, given back in flight, posted in an order in which ranks wait in a circle
    Fault(
        "comm/ring_exchange.py", "chunk.clear()\n        pending.wait()\n", "chunk.clear()\n", f"{_STRICT} attention"
    ),
    Fault(
        "comm/ring_exchange.py", "        pending.wait()\n        BUFFERS.give(outgoing)\n", "", f"{_STRICT} attention"
    ),
    Fault("attention/ulysses.py", "    pending.wait()\n", "", f"{_STRICT} attention"),
    Fault(
        f"{_PATCHES}/links.py",
        "buffer, pending = self._incoming.pop(key)\n        pending.wait()",
        "buffer, _ = self._incoming.pop(key)",
        f"{_STRICT} patches",
    ),
    Fault(
        f"{_PATCHES}/transfers.py", "while len(self._delayed) > newest:", "while self._delayed:", f"{_STRICT} patches"
    ),
)


def find(fault: Fault) -> bool:
    """Plant a fault, run its tests, and restore the file. Returns: True if a test fails."""
    path, root = PACKAGE / fault.file, Path(__file__).parents[1]
    text = path.read_text()
    assert text.count(fault.old) == 1, f"{fault.old!r} must be once in {fault.file}"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header"]
    tests = [
        part if part.startswith("-") or before in ("-k", "-m") else f"tests/{part}"
        for before, part in _words(fault.tests)
    ]
    path.write_text(text.replace(fault.old, fault.new))
    try:
        ended = subprocess.run([*command, *tests], cwd=root, capture_output=True, text=True)
    finally:
        path.write_text(text)
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr  # no test has run
    last = next((line for line in reversed(ended.stdout.splitlines()) if line.startswith(("FAILED", "ERROR"))), "")
    print(f"  {last[:160]}")
    return ended.returncode == 1


def _words(tests: str) -> list[tuple[str, str]]:
    words = tests.split()
    return list(zip(["", *words], words, strict=False))


def main() -> None:
    """Plant the faults with the given numbers, or all. The exit code is the number of faults that no test has found."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # the file is restored
    numbers = [int(argument) for argument in sys.argv[1:]] or range(len(FAULTS))
    missed = 0
    for number in numbers:
        found = find(FAULTS[number])
        missed += not found
        print(f"{number:2} {'found ' if found else 'MISSED'} {FAULTS[number].file}: {FAULTS[number].old}", flush=True)
    sys.exit(missed)


if __name__ == "__main__":
    main()
