"""What ``kt doctor`` looks at: the installation, the engines, the machine and the environment.

Each function returns findings. None of them starts an engine or changes anything.
"""
