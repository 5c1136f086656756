"""Engine plugins: the only code of kt_kernel that imports an engine."""

from kt_kernel import _conflict

with _conflict.told_to_engines():  # all that a plugin imports before it can tell of a fault itself
    from . import common, contract, failure  # noqa: F401
