"""Engine plugins: the only code of kt_kernel that imports an engine."""
