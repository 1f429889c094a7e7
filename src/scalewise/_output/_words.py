"""Words of printed sentences."""

from __future__ import annotations


def counted(n: int, what: str) -> str:
    """``1 trial``, ``1,024 trials``, ``2 fixes``."""
    plural = "es" if what.endswith("x") else "s"
    return f"{n:,} {what}" + (plural if n != 1 else "")
