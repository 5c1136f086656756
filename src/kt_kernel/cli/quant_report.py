"""What ``kt quant --report`` says of a conversion."""

from __future__ import annotations

import os

import typer

from ..runtime.files import is_inside

_OPTION = "--report"


class Report:
    """Checks, before anything is converted, that a report can be made; then makes it."""

    def __init__(
        self,
        source: str,
        packed: str,
        wanted: bool,
        json_path: str | None,
        text_path: str | None,
        as_it_is: bool,
        threads: int | None,
    ) -> None:
        """Raises typer.BadParameter, OSError naming a file, ValueError for a text that is none or
        too short, ImportError without transformers where they are needed."""
        self._source, self._packed, self._threads = source, packed, threads
        self._wanted, self._json, self._text = wanted, json_path, None
        if not wanted:
            for name, value in (("--report-json", json_path), ("--text", text_path)):
                if value is not None:
                    raise typer.BadParameter(f"belongs to {_OPTION}", param_hint=name)
            return
        from ..checkpoint import open_checkpoint
        from ..checkpoint.kt_kernel.packed import KtPackedCheckpoint

        if as_it_is or isinstance(open_checkpoint(source), KtPackedCheckpoint):
            raise typer.BadParameter(
                "compares with the weights before quantisation, which --from-kt and other weights"
                " that kt-kernel converted do not have",
                param_hint=_OPTION,
            )
        if json_path is not None:
            for folder in (source, packed):
                _refuse_inside(folder, json_path)
            open(json_path, "a").close()  # says now if it cannot be written
        if text_path is not None:
            from ..accuracy.loss import WINDOW, windows_of

            self._text = _read(text_path)
            windows_of(source, self._text, WINDOW)

    def make(self, method: str) -> None:
        """Prints the table, and the loss; writes the JSON."""
        if not self._wanted:
            return
        from ..accuracy.weights import table, to_json, weight_report

        errors = weight_report(self._source, self._packed, method, threads=self._threads)
        print("relative errors of the weights, and of the row that is furthest off")
        print(table(errors))
        if self._json is not None:
            with open(self._json, "w") as file:
                file.write(to_json(errors) + "\n")
        if self._text is not None:
            from ..accuracy.loss import loss_report

            print(
                loss_report(self._source, self._packed, method, self._text, threads=self._threads)
            )


def _refuse_inside(folder: str, path: str) -> None:
    """The input is never written to, and the output holds layers only."""
    if is_inside(folder, path):
        raise typer.BadParameter(
            f"{path} is in {folder}; give a file elsewhere", param_hint="--report-json"
        )


def _read(path: str) -> str:
    with open(path, "rb") as file:
        data = file.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{os.path.abspath(path)}: not a text in UTF-8: {error}") from None
