"""`scalewise tune`: finds cheap formats that keep a function's outputs within a tolerance."""

from pathlib import Path

from ._results import check, computed


def tune(
    target: str,
    *,
    tol: float = 0.001,
    fmt: list[str] | None = None,
    args: str | None = None,
    seed: int = 0,
    out: list[Path] | None = None,
) -> None:
    """Find the narrowest formats of a function's parts that keep its outputs within a tolerance.

    Args:
        tol: The outputs' relative error to keep, against float32.
        fmt (--format NAME): A format to try; may be given again. Default: bf16.

    Example:
        scalewise tune model.py:loss_of --args example --format bf16
    """
    check(target, out)
    # JAX takes a second to import: not for --help
    from scalewise.auditing import tune as tuned
    from scalewise.auditing import writable

    formats = tuple(fmt or ("bf16",))
    computed(lambda f: tuned(f, tol=tol, formats=formats), target, args, seed, out, writable)
