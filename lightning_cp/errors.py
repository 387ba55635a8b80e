"""Exceptions of this package. Each derives from the expected built-in one, so that `except ValueError` still works."""

# Parts of the messages of gloo, NCCL and TCPStore about a peer that has exited or is unreachable.
_LOST = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited", "DistNetworkError")
_TIMED_OUT = ("Timed out waiting", "timeout caused pair closure")


class ShapeError(ValueError):
    """Tensors with inconsistent shapes, dtypes or lengths."""


class PlanError(ValueError):
    """A plan that does not fit its model, or a model without a plan."""


class GuidanceError(ValueError):
    """CFG branches that cannot be distributed over ranks."""


class MediaError(ValueError):
    """A sample that cannot be written in the requested format."""


class KernelError(ValueError):
    """An attention kernel that is unknown, or does not support the requested computation."""


class PeerMismatchError(RuntimeError):
    """Ranks that must do the same do not: they were given different data or settings, or run different modules."""


class CallFailedError(RuntimeError):
    """A pipeline call that failed on another rank, and has therefore ended on all ranks that share the sample."""


class CallCancelledError(CallFailedError):
    """A call of a parallel pipeline was cancelled, or its time limit has passed. The next call works."""


class JobSecretError(RuntimeError):
    """A rank, or a message of a rank, that does not know the secret of the job."""


class InterceptionError(RuntimeError):
    """A block ran on a shard but its attention bypassed the engine: its result would be wrong."""


class NonFiniteError(FloatingPointError):
    """A loss, a gradient or a weight that is inf or NaN."""


class DataError(RuntimeError):
    """A data set or sampler that did not yield the batches that training needs."""


class ExportError(RuntimeError):
    """Trained weights, or a file that belongs to them, that could not be written."""


class FamilyError(ValueError):
    """A pipeline without a model family, or data that does not fit its family."""


class CacheError(ValueError):
    """A latent cache that is missing, unfinished, damaged or in use."""


class StaleCacheError(CacheError):
    """A latent cache that was made with other weights, settings or package versions."""


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
