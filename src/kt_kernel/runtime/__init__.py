"""The process and the machine: threads, files, locks, forks, the choice of kernels."""
