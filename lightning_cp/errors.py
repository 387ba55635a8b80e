"""Errors of our own. Each is also the built-in error a caller would expect, so `except ValueError` keeps working."""


class ShapeError(ValueError):
    """Tensors whose shapes, dtypes or lengths do not fit together."""


class PlanError(ValueError):
    """A plan that does not fit its model, or a model without a plan."""


class GuidanceError(ValueError):
    """Branches of guidance that cannot be shared out."""


class MediaError(ValueError):
    """A sample that cannot be written as asked."""


class KernelError(ValueError):
    """An attention kernel that is unknown, or cannot compute what was asked of it."""


class PeerMismatchError(RuntimeError):
    """Ranks of one context group were given different data."""


class InterceptionError(RuntimeError):
    """A block ran on a shard without its attention passing through the engine: its result would be wrong."""


class NonFiniteError(FloatingPointError):
    """A loss, a gradient or a weight that is inf or NaN."""


class DataError(RuntimeError):
    """A data set or sampler that did not give what training needs."""
