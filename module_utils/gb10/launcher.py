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
    # Compilers that a package brings along (FlashInfer calls ninja by name) lie beside the packages.
    tools = [f"{folder}/bin" for folder in started["python_path"]]
    environment["PATH"] = ":".join([*tools, environment.get("PATH", os.defpath)])
    argv = [started["python"], "-m", "vllm.entrypoints.cli.main", *started["argv"]]
    os.execve(argv[0], argv, environment)  # noqa: S606 - the point of this file
    return 1


if __name__ == "__main__":
    sys.exit(main())
