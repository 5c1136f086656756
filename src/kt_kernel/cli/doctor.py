"""``kt doctor``: what may keep a server with kt options from starting."""

from __future__ import annotations


def doctor() -> int:
    """Look at the installation, the engines and this machine, and say what is wrong."""
    from ..diagnosis import engines, environment, machine
    from ..diagnosis.finding import Level

    looks = (
        machine.package,
        engines.engines,
        machine.cpus,
        machine.memory,
        machine.gpus,
        machine.folders,
        environment.environment,
    )
    problems = 0
    for look in looks:
        for finding in look():
            problems += finding.level is Level.PROBLEM
            print(f"{finding.level.value:<9}{finding.subject:<13}{finding.text}", flush=True)
    if problems:
        print(f"kt: {problems} problem{'s' * (problems > 1)}, see above")
    return 1 if problems else 0
