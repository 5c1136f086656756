"""What the package needs of the process and the machine: threads, files, locks, the CPU variant."""
