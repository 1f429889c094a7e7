"""Adapters: functions of a program and its arguments that return what a tool says."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

from ..programs import Answer

REPEATS = 5  # calls of a compiled program whose median time is taken
JAX = ("gallery", "corpus", "trainings", "contact")
TORCH = ("torch", "steps")


def _of(sets: tuple[str, ...], module: str, name: str) -> dict[str, tuple[str, str]]:
    return dict.fromkeys(sets, (module, name))


# By name: the module and the function for each set.
TOOLS: dict[str, dict[str, tuple[str, str]]] = {
    "scalewise": _of(JAX, "audit", "scalewise") | _of(("torch",), "torch_tools", "scalewise"),
    "debug_nans": _of(JAX, "jax_checks", "debug_nans"),
    "debug_infs": _of(JAX, "jax_checks", "debug_infs"),
    "checkify": _of(JAX, "jax_checks", "checkify"),
    "debug_nans_op_by_op": _of(JAX, "jax_checks", "debug_nans_op_by_op"),
    "debug_infs_op_by_op": _of(JAX, "jax_checks", "debug_infs_op_by_op"),
    "detect_anomaly": _of(TORCH, "torch_tools", "detect_anomaly"),
    "debug_underflow_overflow": _of(TORCH, "torch_tools", "debug_underflow_overflow"),
    "tensor_checker": _of(("paddle",), "paddle_checker", "tensor_checker"),
}


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def steady(call: Callable[[], Any]) -> float:
    """Returns the median time of a call, after the first."""
    return statistics.median(timed(call)[1] for _ in range(REPEATS))


def checked(plain: Callable[[], bool], check: Callable[[], Answer]) -> Answer:
    """Returns what a check says of a program, with times beside those without it.

    The first time holds tracing and compiling. The steady one is measured where it is silent.

    Args:
        plain: runs the program; returns whether all its results are finite.
        check: runs it under the check.
    """
    finite, first = timed(plain)
    again = steady(plain)
    answer, first_checked = timed(check)
    again_checked = 0.0 if answer.findings else steady(check)
    times = {
        "finite": finite,
        "first": [round(first_checked, 4), round(first, 4)],
        "steady": [round(again_checked, 7), round(again, 7)],
    }
    return dataclasses.replace(answer, details=times)
