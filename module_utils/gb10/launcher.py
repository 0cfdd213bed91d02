"""Becomes the rank's process: no shell and no unit file ever sees its arguments, so none can change them."""

from __future__ import annotations

import os
import sys

from . import rank

# What a service needs from systemd; everything else comes from the rank's own environment.
INHERITED = ("HOME", "USER", "LOGNAME", "LANG", "PATH", "NOTIFY_SOCKET", "CREDENTIALS_DIRECTORY", "INVOCATION_ID")


def main() -> int:
    started = rank.running()
    environment = {key: os.environ[key] for key in INHERITED if key in os.environ} | started["environment"]
    environment["PYTHONPATH"] = ":".join(started["python_path"])
    argv = [started["python"], "-m", "vllm.entrypoints.cli.main", *started["argv"]]
    os.execve(argv[0], argv, environment)  # noqa: S606 - the point of this file
    return 1


if __name__ == "__main__":
    sys.exit(main())
