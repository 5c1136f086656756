"""The command ``kt``.

main.py assembles the commands, each of which has a module of its own; running.py turns errors into
exit codes.
"""
