"""Every family passes the proofs of capture, oracle and batch, and a proof fails for each mistake."""

from __future__ import annotations

import pytest
import torch

from lightning_cp.families import family_for
from lightning_cp.family_check import FamilyReport, capture_proof, check_family
from tests.families.cases import CAPTIONS, CASES, made, media
from tests.families.mistakes import MISTAKES
from tests.families.report import record
from tests.harness.cases import grouped

pytestmark = pytest.mark.filterwarnings("ignore")
_DEFAULT = ("flux_kontext", "wan", "sd3", "qwen_image", "flux_controlnet")
_DEFAULT_MISTAKES = ("sign", "mask_of_the_text")


# the other pipelines of each model, and the other mistakes by the proofs that find them
_CASES = {name: [name] for name in _DEFAULT}
_CASES |= grouped((x for x in CASES if x not in _DEFAULT), lambda x: f"other {x.partition('_')[0]}")
_MISTAKES = {name: [name] for name in _DEFAULT_MISTAKES}
_MISTAKES |= grouped(
    (x for x in MISTAKES if x not in _DEFAULT_MISTAKES), lambda x: " and ".join(sorted(MISTAKES[x].found_by))
)


def _failed(report: FamilyReport) -> dict[str, str]:
    return {x.name: f"{x.found}: {x.error:.1e}, allowed {x.tolerance:.1e}" for x in report.proofs if not x.passed}


def _record(name: str, report: FamilyReport, suffix: str = "") -> None:
    for proof in report.proofs:
        record(report.family, report.pipeline, name, f"{proof.name}{suffix}", proof.error)


@pytest.mark.parametrize("names", _CASES.values(), ids=_CASES)
@pytest.mark.default(len(_DEFAULT))
def test_float32(names: list[str]) -> None:
    for name in names:
        report = check_family(made(name), CASES[name].captions, media(name))
        _record(name, report)
        assert not _failed(report), name
        assert report.proofs[0].error == 0, name


@pytest.mark.parametrize("name", ["flux", "wan", "sana_euler", "ltx2"])
@pytest.mark.full
def test_bfloat16(name: str) -> None:
    report = check_family(made(name, torch.bfloat16), CASES[name].captions, media(name))
    _record(name, report, " bf16")
    assert not _failed(report)


def test_capture_with_texts_of_two_lengths() -> None:
    """The mask of QwenImage's text reaches the transformer only in a batch with several lengths."""
    pipe, given = made("qwen_image"), media("qwen_image")
    assert capture_proof(pipe, family_for(pipe), CAPTIONS, given).passed


@pytest.mark.parametrize("names", _MISTAKES.values(), ids=_MISTAKES)
@pytest.mark.default(len(_DEFAULT_MISTAKES))
def test_a_mistake_is_found(names: list[str]) -> None:
    for name in names:
        mistake = MISTAKES[name]
        pipe, given = made(mistake.case), (CASES[mistake.case].captions, media(mistake.case))
        wrong = mistake.make(type(family_for(pipe)))
        report = check_family(pipe, *given, family=wrong(wrong.read_facts(pipe)))
        assert set(_failed(report)) == mistake.found_by, name
