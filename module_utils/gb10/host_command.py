"""Run a tool that may hang, within a bound."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence


class CommandError(Exception):
    """The tool gave no usable answer; the message is one line for an operator."""


class MissingCommandError(CommandError):
    """The tool is not installed."""


class SilentCommandError(CommandError):
    """The tool gave no answer within the bound."""


def run_bounded(argv: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """Exit status and output (both streams, as nvidia-smi prints its errors on either) of ``argv``.

    Raises MissingCommandError or SilentCommandError. After the bound the process is killed and not waited for:
    a tool stuck in the driver ignores SIGKILL, and waiting for it is the hang that the bound prevents.
    """
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise MissingCommandError(f"{argv[0]} cannot be run: {error.strerror}") from error
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise SilentCommandError(f"{argv[0]} gave no answer in {timeout_s:g} s") from None
    return process.returncode, output
