"""A call, made with arguments that it accepts and with others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .specs import good, tries

ARGUMENT_ERRORS = (ValueError, TypeError, IndexError)


class Case:
    """A call that succeeds, and what its arguments accept.

    extra: more arguments, and the error that they raise. errors: other errors that may be raised.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        *,
        extra: list[tuple[dict[str, Any], type[BaseException]]] | None = None,
        errors: tuple[type[BaseException], ...] = (),
        **specs: Any,
    ) -> None:
        self.call, self.specs, self.extra = call, specs, extra or []
        self.errors = (*ARGUMENT_ERRORS, *errors)

    def check(self, announce: Callable[[str], None]) -> Iterator[str]:
        """Makes all calls. Yields the faults."""
        usual = {name: good(spec) for name, spec in self.specs.items()}
        announce("good arguments")
        self.call(**usual)
        announce("an argument too many")
        try:
            self.call(**usual, no_such_argument=1)
            yield "an argument too many is accepted"
        except TypeError:
            pass
        for name, spec in self.specs.items():
            for one in tries(spec):
                label = f"{name}={one.value!r:.200}"
                announce(label)
                try:
                    self.call(**usual | {name: one.value})
                except self.errors as error:
                    if isinstance(error, ValueError) and one.says not in str(error):
                        yield f"{label}: {one.says} is not in the message: {error}"
                    continue
                except Exception as error:
                    yield f"{label}: {type(error).__name__}: {error}"
                    continue
                if one.refused:
                    yield f"{label} is accepted"
        for given, expected in self.extra:
            announce(f"{given!r:.200}")
            try:
                self.call(**usual | given)
                yield f"{given} is accepted"
            except expected:
                pass


class NoConstructor(Case):
    """A class whose objects only come from other calls."""

    def check(self, announce: Callable[[str], None]) -> Iterator[str]:
        for arguments in ((), (None,), (0, 0)):
            announce(f"{arguments}")
            try:
                self.call(*arguments)
                yield f"{arguments} is accepted"
            except TypeError:
                pass
