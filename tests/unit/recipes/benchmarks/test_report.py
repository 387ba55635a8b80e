"""Figures become rows, cells and pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_cp.recipes.benchmarks import modes, sparse
from lightning_cp.recipes.benchmarks.links import check_links
from lightning_cp.recipes.benchmarks.measure import Figures
from lightning_cp.recipes.benchmarks.plots import colours, draw_workload
from lightning_cp.recipes.benchmarks.report import cells_of, count_ranks, markdown_page, rows_of, write_csv
from lightning_cp.recipes.benchmarks.subject import ONE_THREAD, UNCHECKED, Subject

FOUND = {
    ONE_THREAD: Figures(times_s=[4.0, 5.0, 4.5], peak_bytes=10_000_000),
    "ring": Figures(times_s=[1.2, 1.0, 2.0, 1.1], peak_bytes=3_000_000, sent_bytes=8, exchanges=3, waited=0.25),
    "theirs": Figures(refused="ValueError: not | here"),
}


def test_times_become_multiples_of_the_limit() -> None:
    one, ring, theirs = rows_of("attention", 512, 4, FOUND)
    assert one["ratio"] == pytest.approx(4), "one process does the work of four ranks"
    assert ring["ratio"] == pytest.approx(1.0 / (4.0 / 4))
    assert ring["median_ratio"] == pytest.approx(1.15 / (4.5 / 4))
    assert ring["spread"] == pytest.approx((2.0 - 1.1) / 1.15)
    assert set(theirs) == {"workload", "tokens", "ranks", "subject", "refused"}, "nothing was measured"
    assert "waited" not in one


def test_a_page_holds_the_command_and_every_subject(tmp_path: Path) -> None:
    rows = rows_of("attention", 512, 4, FOUND)
    page = markdown_page(rows, modes._COLUMNS, about="*ms* is", command="python recipes/bench.py", pictures=["a.png"])
    assert " by\n\n    python recipes/bench.py\n\n*ms* is\n\n![a](a.png)" in page
    assert "## Attention, 512 tokens, 4 ranks" in page
    assert "| ring | 1000.0 | 1.00 | 1.02 | 78 % | 3.0 | 0.0 | 3 | 25 % |  |" in page
    assert "| theirs | ValueError: not / here |" in page
    assert {len(line) for line in cells_of(rows, modes._COLUMNS)} == {10}
    write_csv(rows, tmp_path / "bench.csv")
    assert (tmp_path / "bench.csv").read_text().splitlines()[2].startswith("attention,512,4,ring,1.0,1.15,")


def test_a_sparse_mask_is_compared_with_its_share_of_the_work() -> None:
    ring = Figures(times_s=[2.0], sent_bytes=8, exchanges=1, waited=0.0)
    masked = Figures(times_s=[1.0], sent_bytes=2, exchanges=1, waited=0.0, work=0.25)
    figures = {ONE_THREAD: FOUND[ONE_THREAD], sparse.UNMASKED: ring, "frames": masked}
    kinds = {"frames": {"work": 0.25, "imbalance": 1.5}}
    subjects = [Subject(name, lambda: lambda: None, **kinds.get(name, {})) for name in figures]
    rows = sparse.sparse_rows(512, 2, figures, subjects)
    assert [row["ratio"] for row in rows] == [2, 1, 2], "a quarter of 4 s on 2 ranks is 0.5 s"
    assert [row.get("sent_share") for row in rows] == [None, 1, 0.25]
    cells = cells_of(rows, sparse._COLUMNS)
    assert cells[-1] == ["frames", "0.25", "1000.0", "2.00", "1.78", "0 %", "0.0", "25 %", "1.50"]


def test_the_cost_of_comparing_peers_is_the_median_of_pairs() -> None:
    unchecked = Figures(times_s=[1.0, 2.0, 4.0])
    checked = Figures(times_s=[1.1, 2.02, 4.02])
    figures = {ONE_THREAD: Figures(times_s=[1.0]), "ring": checked, "ring" + UNCHECKED: unchecked}
    rows = modes.with_check_cost(rows_of("training", 512, 2, figures), figures)
    assert [row.get("check_cost") for row in rows] == [None, pytest.approx(0.01), None]
    assert [line[-1] for line in cells_of(rows, modes._COLUMNS)] == ["", "+1.0 %", ""]


@pytest.mark.parametrize("lengths", [(512,), (512, 1024)])
@pytest.mark.default(1)
def test_a_subject_refused_at_one_length_is_drawn_at_the_others(lengths: tuple[int, ...], tmp_path: Path) -> None:
    rows = [row for ranks in (2, 4) for length in lengths for row in rows_of("attention", length, ranks, FOUND)]
    rows += rows_of("attention", 2048, 4, FOUND | {"theirs": FOUND["ring"]})
    draw_workload(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_each_curve_has_its_own_colour_and_noisy_times_are_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    subjects = {f"subject {i}": Figures(times_s=[1.0, 1.0, 1.0, 1.0], peak_bytes=1) for i in range(14)}
    for lengths in ((512, 1024), (512,)):
        rows = [row for length in lengths for row in rows_of("attention", length, 1, FOUND | subjects)]
        draw_workload(rows, tmp_path / "picture.png")
    lines, bars = (figure.axes[0] for figure in drawn)
    curves = [line for line in lines.lines if line.get_label() in {"ring", *subjects}]
    assert len({line.get_color() for line in curves}) == len(curves) == 15
    assert not any(line.get_clip_on() for line in curves)
    hollow = [line.get_xdata()[0] for line in lines.lines if line.get_markerfacecolor() == "white"]
    assert hollow == [512, 1024]  # only ring's spread is above 30 %
    assert lines.get_title() == "1 rank: time, × limit (hollow: spread above 30 %)"
    assert [text.get_text() for text in bars.texts if "spread" in text.get_text()] == ["0.25 (spread 78 %)"]


def test_one_rank_is_singular() -> None:
    assert [count_ranks(n) for n in (1, 2)] == ["1 rank", "2 ranks"]
    assert len(set(colours(str(i) for i in range(20)).values())) == 20


def test_slow_links_need_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "link_mbit=200 makes network namespaces: it needs Linux, root" in check_links(200)
    assert "link_mbit=-1 is not valid" in check_links(-1)
    assert not check_links(None)
