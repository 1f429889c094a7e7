"""Writes docs/coverage.md: what `autoscale` does with each primitive of JAX's public modules.

Every name stands in a table, here or in the library, so that the page is the same on each release
of JAX, and a primitive that a release adds has no row until somebody decides what happens to it.
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

# What is written in front of the family's own words.
KINDS = {
    Family.CALL: "control flow",
    Family.NO_FLOATS: "passes through",
    Family.KERNEL: "warns, float32",
    Family.SPARSE: "warns, float32 fallback",
    Family.CALLBACK: "refused",
    Family.REFERENCE: "mutable array",
    Family.INTERNAL: "internal",
    Family.FALLBACK: "float32 fallback",
}
# What a rule does whose results count as those of a fallback.
SPECIAL = {
    "scaled_dot": "8-bit operands keep their numbers and scales; others are those of a contraction",
    "symmetric_product": "a contraction; its sum with the other operand in the compute dtype",
}
# Primitives of kernel languages, which occur nowhere else: the call of the kernel has a row.
KERNEL_MODULES = ("jax._src.pallas", "jax.experimental.pallas", "jax.experimental.mosaic",
                  "jax._src.thunky")  # fmt: skip
NOT_IMPORTED = ("_src", "pallas", "mosaic", "tools", "jax2tf", "collect_profile", "serialization")


def row(name: str) -> tuple[str, str] | None:
    """What happens to a primitive, and how; None for a name that the table doesn't have."""
    if name in SPECIAL:
        return "rule: product", SPECIAL[name]
    if name not in PRIMITIVES:
        return None
    family = PRIMITIVES[name].family
    return KINDS.get(family, f"rule: {family.name.lower()}"), family.value


def names() -> list[str]:
    """Every name that has a row."""
    return sorted(PRIMITIVES)


def public_primitives() -> set[str]:
    """The primitives that JAX's public modules, experimental ones as well, bring into a process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in pkgutil.walk_packages(jax.__path__, "jax.", onerror=lambda name: None):
            if not any(part in module.name for part in NOT_IMPORTED):
                try:
                    importlib.import_module(module.name)
                except ImportError:  # of what isn't installed
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
    """The page's text."""
    lines = [
        "# What `autoscale` does with each primitive",
        "",
        "Made by `python docs/coverage_page.py`. `tests/autoscale/test_coverage.py` runs the rows",
        "of `jax.extend.core.primitives` and checks that every primitive of JAX's public modules",
        "has a row, on JAX 0.10.2 and on 0.12. A *fallback* computes on plain float32 numbers; its",
        "result is a value like any other. `scatter_apply` is a `scatter` that applies a function",
        "to elements (`x.at[i].apply(f)`). What *warns* does so once, with the source line, until",
        "a recipe's `keep` names it. So does `custom_linear_solve` if its solver multiplies. The",
        "primitives of kernel languages (Pallas, Mosaic) occur only inside of kernels.",
        "",
        "| primitive | what | how |",
        "|---|---|---|",
    ]
    for name in names():
        what, how = row(name) or ("", "")
        lines.append(f"| `{name}` | {what} | {how} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (HERE / "coverage.md").write_text(page())
