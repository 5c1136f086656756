"""Engine plugins: the only code of kt_kernel that imports an engine."""

from kt_kernel import _conflict

with _conflict.told_to_engines():  # what a plugin imports on its first lines
    import kt_kernel.options  # noqa: F401
