"""Programs on several devices, each in a process: their number is fixed when JAX starts."""

import os
import subprocess
import sys
import textwrap


def run_on_devices(count: int, program: str) -> None:
    """Runs a Python program on so many CPU devices; it fails if the program does."""
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_force_host_platform_device_count={count}"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
