"""Recognise errors of exchanges with a rank that has exited or cannot be reached."""

from lightning_cp.errors import CallFailedError

# Parts of the messages of gloo, NCCL and TCPStore.
_LOST = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited", "DistNetworkError")
_TIMED_OUT = ("Timed out waiting", "timeout caused pair closure")


def is_lost_connection(text: str) -> bool:
    """Return True if an error's text says that the connection to another rank broke."""
    return any(part in text for part in _LOST)


def is_failed_exchange(text: str) -> bool:
    """Return True if an error's text says that an exchange with other ranks failed: a broken connection, a time-out."""
    return is_lost_connection(text) or any(part in text for part in _TIMED_OUT)


def raise_if_lost(error: Exception, when: str) -> None:
    """Raise CallFailedError if an error says that a connection broke. Args: when: when it did, for the message."""
    if is_lost_connection(str(error)):
        raise CallFailedError(
            f"the connection to another rank broke {when}: it has exited or cannot be reached. End the job; the output "
            "of that rank has the cause"
        ) from error
