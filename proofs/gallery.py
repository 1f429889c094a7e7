"""Checks that the audit finds each failure of examples/gallery.py at its marked line and fixes it.

`python -m proofs.gallery` takes some minutes; `tests/audit/test_gallery.py` checks five of them.
"""

import dataclasses
import inspect
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import scalewise as sw
from examples import gallery


def marked(case: gallery.Case) -> list[int]:
    """Returns the lines marked ``# <- here`` in the function that the case calls."""
    function = case.call
    if function.__name__ == "<lambda>":
        function = gallery.apply_update
    source, start = inspect.getsourcelines(function)
    return [start + i for i, line in enumerate(source) if line.rstrip().endswith("# <- here")]


def check(name: str) -> str:
    """Audits one case and returns its first finding in a line.

    Raises:
        AssertionError: the first finding has another line or kind, or its fix doesn't help.
    """
    case = gallery.GALLERY[name]
    arguments = case.arguments()
    report = sw.audit(case.call, case.low, trials=10)(*arguments)
    assert report.findings, "nothing was found"
    worst = report.findings[0]
    lines = marked(case)
    assert lines, "no line is marked"
    assert worst.file is not None, "the finding has no line"
    assert Path(worst.file).name == "gallery.py", worst.file
    assert worst.line in lines, f"line {worst.line}, not {lines}"
    assert worst.kind in case.kinds, f"{worst.kind}, not {case.kinds}"
    assert worst.fix, "no fix helps"
    halved = worst.error_after <= 0.5 * worst.error_before
    fewer = worst.non_finite_after < worst.non_finite_before
    assert halved or fewer, "the fix doesn't halve the error"
    assert report.error_fixed <= report.error, "all fixes together increase the error"
    first = min((x for x in report.findings if x.fix), key=lambda x: x.order)
    assert first.fix is not None
    want = case.call(*arguments)
    for fixed, measured in (
        (first.fix.apply(case.call), (first.non_finite_after, first.error_after)),
        (report.apply_fixes(case.call), dataclasses.astuple(report.error_fixed)),
    ):
        applied = error(fixed(*arguments), want)
        close = abs(applied[1] - measured[1]) <= 1e-2 * measured[1] + 1e-6
        close |= measured[1] == math.inf and applied[0] > 0
        assert applied[0] == measured[0], (applied, measured)
        assert close, f"fix.apply has the error {applied}, the audit measured {measured}"
    return f"{worst.kind} at line {worst.line}: {worst.fix}"


def error(outs: Any, want: Any) -> tuple[int, float]:
    """Returns how many numbers aren't finite, and the root mean square of the relative errors."""
    lost, shares = 0, []
    for low, wide in zip(jax.tree.leaves(outs), jax.tree.leaves(want), strict=True):
        if not jnp.issubdtype(wide.dtype, jnp.floating):
            continue
        low, wide = np.float64(low), np.float64(wide)
        lost += int(np.sum(~np.isfinite(low) & np.isfinite(wide)))
        finite = np.isfinite(low) & np.isfinite(wide)
        noise, signal = (np.sum(np.where(finite, x, 0.0) ** 2) for x in (low - wide, wide))
        shares.append(noise / signal if signal else noise)
    return lost, float(np.sqrt(np.mean(shares)))


def main() -> None:
    for name in gallery.GALLERY:
        print(f"{name}: {check(name)}", flush=True)


if __name__ == "__main__":
    main()
