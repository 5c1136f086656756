"""The output of ``kt quant --report``."""

from __future__ import annotations

import os

import typer

from ..runtime.files import is_inside, need_writable, write_output

_OPTION = "--report"


class Report:
    """Checks that a report can be made before anything is converted, and makes it afterwards."""

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
        """Raises typer.BadParameter, OSError naming a file, ValueError if the text is too short or
        not UTF-8, or ImportError if transformers is needed but not installed."""
        self._source, self._packed, self._threads = source, packed, threads
        self._wanted, self._json, self._text = wanted, json_path, None
        if not wanted:
            for name, value in (("--report-json", json_path), ("--text", text_path)):
                if value is not None:
                    raise typer.BadParameter(f"needs {_OPTION}", param_hint=name)
            return
        from ..checkpoint import open_checkpoint
        from ..checkpoint.kt_kernel.packed import KtPackedCheckpoint

        if as_it_is or isinstance(open_checkpoint(source), KtPackedCheckpoint):
            raise typer.BadParameter(
                "the report needs the weights before quantisation; kt-kernel's converted weights do"
                " not have them",
                param_hint=_OPTION,
            )
        if json_path is not None:
            for folder in (source, packed):
                _refuse_inside(folder, json_path)
            need_writable(json_path)
        if text_path is not None:
            from ..accuracy.loss import WINDOW, windows_of

            self._text = _read(text_path)
            try:
                windows_of(source, self._text, WINDOW)
            except ValueError as error:
                raise ValueError(f"{text_path}: {error}") from None

    def make(self, method: str) -> None:
        """Prints the table and the loss, and writes the JSON file."""
        if not self._wanted:
            return
        from ..accuracy.weights import table, to_json, weight_report

        errors = weight_report(self._source, self._packed, method, threads=self._threads)
        print("relative error of the weights, and of the worst row")
        print(table(errors))
        if self._json is not None:
            write_output(self._json, to_json(errors) + "\n")
        if self._text is not None:
            from ..accuracy.loss import loss_report

            print(
                loss_report(self._source, self._packed, method, self._text, threads=self._threads)
            )


def _refuse_inside(folder: str, path: str) -> None:
    """The input is never written to, and the output holds layers only."""
    if is_inside(folder, path):
        raise typer.BadParameter(
            f"{path} is inside {folder}; choose a file elsewhere", param_hint="--report-json"
        )


def _read(path: str) -> str:
    with open(path, "rb") as file:
        data = file.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{os.path.abspath(path)}: not UTF-8 text: {error}") from None
