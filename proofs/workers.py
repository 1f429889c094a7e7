"""Starts processes of a module on this machine, and collects their results."""

import json
import os
import socket
import subprocess
import sys

MARK = "FOUND"


def free_port() -> int:
    """Returns a free port of this machine."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def start(module: str, *arguments: object) -> subprocess.Popen:
    """Starts ``python -m module arguments``, on CPUs only."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
    )  # fmt: skip


def tell(found: object) -> None:
    """Prints a worker's result for :func:`results`."""
    print(MARK + json.dumps(found), flush=True)


def results(workers: list[subprocess.Popen], seconds: float = 900) -> list:
    """Returns the result of each worker.

    Raises:
        SystemExit: one of them ended otherwise than with exit code 0.
    """
    found = []
    for process in workers:
        out, err = process.communicate(timeout=seconds)
        if process.returncode:
            raise SystemExit(f"a worker ended with {process.returncode}:\n{out}\n{err[-3000:]}")
        line = next(line for line in out.splitlines() if line.startswith(MARK))
        found.append(json.loads(line.removeprefix(MARK)))
    return found
