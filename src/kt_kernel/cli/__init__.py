"""The command ``kt``. main.py: its parts together; running.py: errors and exit codes; one module a
part."""
