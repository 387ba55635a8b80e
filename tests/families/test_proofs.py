"""Every family passes the proofs of capture, oracle and batch, and a proof fails for each mistake."""

from __future__ import annotations

import pytest
import torch

from lightning_cp.families import family_for
from lightning_cp.family_check import FamilyReport, capture_proof, check_family
from tests.families.cases import CAPTIONS, CASES, made, media
from tests.families.mistakes import MISTAKES
from tests.families.report import record

pytestmark = pytest.mark.filterwarnings("ignore")
FIRST = [name for name in {case.pipe: name for name, case in reversed(CASES.items())}.values() if name != "flux"]


def _failed(report: FamilyReport) -> dict[str, str]:
    return {x.name: f"{x.found}: {x.error:.1e}, allowed {x.tolerance:.1e}" for x in report.proofs if not x.passed}


def _record(name: str, report: FamilyReport, suffix: str = "") -> None:
    for proof in report.proofs:
        record(report.family, report.pipeline, name, f"{proof.name}{suffix}", proof.error)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.default("flux_kontext]", "wan]", "sd3]", "qwen_image]", "flux_controlnet]")
def test_float32(name: str) -> None:
    report = check_family(made(name), CASES[name].captions, media(name))
    _record(name, report)
    assert not _failed(report)
    assert report.proofs[0].error == 0


@pytest.mark.parametrize("name", ["flux", *FIRST[::8]])
@pytest.mark.full
def test_bfloat16(name: str) -> None:
    report = check_family(made(name, torch.bfloat16), CASES[name].captions, media(name))
    _record(name, report, " bf16")
    assert not _failed(report)


def test_capture_with_texts_of_two_lengths() -> None:
    """The mask of QwenImage's text reaches the transformer only in a batch with several lengths."""
    pipe, given = made("qwen_image"), media("qwen_image")
    assert capture_proof(pipe, family_for(pipe), CAPTIONS, given).passed


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.default("sign]", "mask_of_the_text")
def test_a_mistake_is_found(name: str) -> None:
    mistake = MISTAKES[name]
    pipe = made(mistake.case)
    wrong = mistake.make(type(family_for(pipe)))
    report = check_family(pipe, CASES[mistake.case].captions, media(mistake.case), family=wrong(wrong.read_facts(pipe)))
    assert set(_failed(report)) == mistake.found_by
