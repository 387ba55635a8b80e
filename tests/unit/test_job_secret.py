"""Messages are accepted only with the job's secret, and only as what they were signed for."""

from __future__ import annotations

import pytest

from lightning_cp.errors import JobSecretError
from lightning_cp.job_secret import SECRET, new_secret, signed, verified


def test_a_message_is_accepted_with_the_secret_and_for_its_purpose_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, new_secret())
    message = signed(b"data", "request 1")
    assert verified(message, "request 1") == b"data"
    assert verified(signed(b"", "x"), "x") == b""
    forged = (message[:-1] + b"A", b"", b"data", message[:31], message + b"x")
    for other, purpose in [(message, "request 2"), *((x, "request 1") for x in forged)]:
        with pytest.raises(JobSecretError, match=rf"\({purpose}\) was not sent by a rank of this job.*{SECRET}"):
            verified(other, purpose)
    assert signed(b"ab", "c") != signed(b"b", "ca"), "purpose and data are not concatenated"
    monkeypatch.setenv(SECRET, new_secret())
    with pytest.raises(JobSecretError):
        verified(message, "request 1")
