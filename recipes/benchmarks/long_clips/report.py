"""Write what bench=long_clips counted: tables, long_clips.json and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_cp.files import writing_new
from lightning_cp.planning.devices import GB
from lightning_cp.recipes.benchmarks.long_clips.activations import ActivationsRow
from lightning_cp.recipes.benchmarks.long_clips.curve import TRAININGS, ClipRow
from lightning_cp.recipes.benchmarks.plots import colours


def activations_table(rows: Sequence[ActivationsRow]) -> list[str]:
    """Return the lines of a Markdown table of the activations."""
    lines = [
        "| checkpointing | ranks | activations per rank, MB | × ranks / one rank |",
        "|---|---|---|---|",
    ]
    for row in rows:
        lines.append(f"| {row.checkpointing} | {row.ranks} | {row.activation_bytes / 1e6:.2f} | {row.share:.2f} |")
    return lines


def clips_table(rows: Sequence[ClipRow]) -> list[str]:
    """Return the lines of a Markdown table of the longest clips."""
    lines = [
        "| training | GB | ranks | frames | seconds | tokens | GB used | activations, GB | largest part | peak in "
        "| frames per rank and GB of activations | MB of one more frame, all ranks |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        begin = f"| {row.training} | {row.memory_gb:g} | {row.ranks} |"
        used, needed = sum(row.peak.values()) / GB, row.next_bytes / GB
        if not row.latent_frames:
            lines.append(
                f"{begin} – | – | – | {needed:.1f} for one frame | – | {row.largest} | {row.peak_part} | – | – |"
            )
            continue
        lines.append(
            f"{begin} {row.frames:,} | {row.seconds:.0f} | {row.tokens:,} | {used:.1f} | "
            f"{row.peak['activations'] / GB:.1f} | {row.largest} | {row.peak_part} | {row.frames_per_gb:.1f} | "
            f"{row.frame_bytes / 1e6:.0f} |"
        )
    return lines


def curve_table(rows: Sequence[ClipRow]) -> list[str]:
    """Return the lines of a Markdown table of frames by number of ranks, a row for each training and memory.

    The last two columns compare the memory of one more frame, on all ranks together, between the numbers of ranks.
    """
    ranks = sorted({row.ranks for row in rows})
    lines = [
        f"| training | GB | {' | '.join(f'{n} ranks' if n > 1 else '1 rank' for n in ranks)} "
        "| one more frame, MB on all ranks | largest / smallest |",
        "|---" * (len(ranks) + 4) + "|",
    ]
    for name, memory in dict.fromkeys((row.training, row.memory_gb) for row in rows):
        found = {row.ranks: row for row in rows if (row.training, row.memory_gb) == (name, memory)}
        frames = [f"{found[n].frames:,}" if n in found and found[n].latent_frames else "–" for n in ranks]
        sizes = [row.frame_bytes / 1e6 for row in found.values() if row.latent_frames]
        spread = [f"{min(sizes):.0f} to {max(sizes):.0f}", f"{max(sizes) / min(sizes):.3f}"] if sizes else ["–", "–"]
        lines.append(f"| {name} | {memory:g} | {' | '.join([*frames, *spread])} |")
    return lines


def draw_clips(rows: Sequence[ClipRow], path: Path) -> None:
    """Draw the seconds of the longest clips by number of ranks, as PNG: a panel for each memory."""
    from matplotlib.figure import Figure

    memories = sorted({row.memory_gb for row in rows})
    figure = Figure(figsize=(4.2 * len(memories), 3.6), layout="constrained")
    panels: Any = figure.subplots(1, len(memories), sharey=True, squeeze=False)
    palette = colours(TRAININGS)
    ticks = sorted({row.ranks for row in rows})
    for axis, memory in zip(panels[0], memories, strict=True):
        for name in dict.fromkeys(row.training for row in rows):
            points = [x for x in rows if (x.training, x.memory_gb) == (name, memory) and x.latent_frames]
            if points:
                last = max(points, key=lambda row: row.ranks)
                axis.plot([x.ranks for x in points], [x.seconds for x in points], "o-", color=palette[name], label=name)
                ideal = [last.seconds * n / last.ranks for n in (ticks[0], last.ranks)]
                axis.plot([ticks[0], last.ranks], ideal, ":", color=palette[name], linewidth=1)
        axis.set(title=f"{memory:g} GB per rank", xlabel="ranks", xscale="log", yscale="log")
        axis.set_xticks(ticks, [str(x) for x in ticks], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    panels[0][0].set_ylabel("longest clip, s at 16 fps\n(dotted: in proportion to ranks)")
    handles = {
        label: handle for axis in panels[0] for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(TRAININGS), frameon=False)
    with writing_new(path):
        figure.savefig(path, dpi=90)


def write(activations: Sequence[ActivationsRow], clips: Sequence[ClipRow], folder: Path) -> list[Path]:
    """Write long_clips.md, long_clips.json and, with clips, long_clips.png. Returns: their paths."""
    page, data, picture = (folder / f"long_clips.{suffix}" for suffix in ("md", "json", "png"))
    lines = ["# Long clips", ""]
    if activations:
        lines += ["## Activations", "", *activations_table(activations), ""]
    if clips:
        lines += ["## Longest clips", "", *curve_table(clips), "", *clips_table(clips), ""]
    values = {
        "activations": [asdict(row) for row in activations],
        "clips": [{**asdict(row), "frames": row.frames, "seconds": row.seconds, "tokens": row.tokens} for row in clips],
    }
    with writing_new(page):
        page.write_text("\n".join(lines), encoding="utf-8")
    with writing_new(data):
        data.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    if clips:
        draw_clips(clips, picture)
    return [page, data, *([picture] if clips else [])]
