"""Writes docs/coverage.md: how `autoscale` handles each primitive of JAX's public modules.

The names come from the table in `scalewise.primitives`, so that the page is the same on each
release of JAX. A test fails for a primitive of a new release that has no row.
"""

import importlib
import pkgutil
import sys
import warnings
from pathlib import Path

import jax
import jax.extend.core as jex

from scalewise.primitives import PRIMITIVES, Family

HERE = Path(__file__).parent

# The page's first word for families whose name isn't printed.
KINDS = {
    Family.CALL: "control flow",
    Family.NO_FLOATS: "passes through",
    Family.KERNEL: "warns, float32",
    Family.SPARSE: "warns, float32 fallback",
    Family.REFERENCE: "mutable array",
    Family.INTERNAL: "internal",
    Family.FALLBACK: "float32 fallback",
}
# Rules of primitives that belong to the family of fallbacks.
SPECIAL = {
    "scaled_dot": "8-bit operands keep their numbers and scales; others are those of a contraction",
    "symmetric_product": "a contraction; its sum with the other operand in the compute dtype",
}
# Primitives of kernel languages have no row, since they occur only in kernels; a kernel's call has.
KERNEL_MODULES = ("jax._src.pallas", "jax.experimental.pallas", "jax.experimental.mosaic",
                  "jax._src.thunky")  # fmt: skip
NOT_IMPORTED = ("_src", "pallas", "mosaic", "tools", "jax2tf", "collect_profile", "serialization")


def row(name: str) -> tuple[str, str] | None:
    """Returns how a primitive is handled, in short and in words; None without a row."""
    if name in SPECIAL:
        return "rule: product", SPECIAL[name]
    if name not in PRIMITIVES:
        return None
    family = PRIMITIVES[name].family
    return KINDS.get(family, f"rule: {family.name.lower()}"), family.value


def names() -> list[str]:
    """Returns every name that has a row."""
    return sorted(PRIMITIVES)


def public_primitives() -> set[str]:
    """Returns the primitives of JAX's public modules, experimental ones included."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in pkgutil.walk_packages(jax.__path__, "jax.", onerror=lambda name: None):
            if not any(part in module.name for part in NOT_IMPORTED):
                try:
                    importlib.import_module(module.name)
                except ImportError:  # of a package that isn't installed
                    continue
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "jax":
            for value in list(vars(module).values()):
                if isinstance(value, jex.Primitive):
                    found.setdefault(value, set()).add(name)
    return {
        p.name
        for p, modules in found.items()
        if not any(m.startswith(KERNEL_MODULES) for m in modules)
    }


def page() -> str:
    """Returns the page's text."""
    lines = [
        "# How `autoscale` handles each primitive",
        "",
        "Made by `python docs/coverage_page.py`. `tests/autoscale/test_coverage.py` runs the rows",
        "of `jax.extend.core.primitives` and checks that every primitive of JAX's public modules",
        "has a row, on JAX 0.10.2 and on 0.12. A *fallback* computes on plain float32 numbers; its",
        "result is a value like any other. `scatter_apply` is a `scatter` that applies a function",
        "to elements (`x.at[i].apply(f)`). A primitive that *warns* does so once, with the source",
        "line, unless a recipe's `keep` names it. `custom_linear_solve` warns if its solver",
        "multiplies. The primitives of kernel languages (Pallas, Mosaic) occur only inside of",
        "kernels.",
        "",
        "| primitive | handling | meaning |",
        "|---|---|---|",
    ]
    for name in names():
        what, how = row(name) or ("", "")
        lines.append(f"| `{name}` | {what} | {how} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (HERE / "coverage.md").write_text(page())
