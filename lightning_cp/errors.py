"""Exceptions of this package. Each derives from the expected built-in one, so that `except ValueError` still works."""


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
