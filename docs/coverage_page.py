"""Writes docs/coverage.md: what `autoscale` does with each of JAX's primitives."""

from pathlib import Path

import jax.extend.core.primitives as published

from scalewise.autoscale import RULES, Family
from scalewise.interpret import CONTROL

HERE = Path(__file__).parent
PASSED = (
    "and", "or", "xor", "not", "clz", "population_count", "reduce_and", "reduce_or", "reduce_xor",
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "threefry2x32", "random_bits",
    "random_fold_in", "random_seed", "random_split", "rng_bit_generator", "axis_index",
    "create_token", "after_all", "iota", "empty2",
)  # fmt: skip


def page() -> str:
    """The page's text."""
    names = sorted({getattr(published, n).name for n in dir(published) if n.endswith("_p")})
    lines = [
        "# What `autoscale` does with each primitive",
        "",
        "Made by `python docs/coverage_page.py`; `tests/autoscale/test_coverage.py` runs each row.",
        "A *fallback* computes on plain float32 numbers; its result is a value like any other.",
        "Beyond these, `pure_callback` and `io_callback` of floats are refused, since nobody sees",
        "what they do to a scale, until a recipe's `keep` names them: they get plain float32 then.",
        "",
        "| primitive | what | how |",
        "|---|---|---|",
    ]
    for name in names:
        family = RULES[name].family
        if name in CONTROL or name in ("call", "closed_call", "custom_jvp_call", "custom_vjp_call"):
            what, how = "control flow", "its body is interpreted"
        elif name in PASSED:
            what, how = "passes through", "no floats"
        elif family is Family.FALLBACK:
            what, how = "float32 fallback", Family.FALLBACK.value
        else:
            what, how = f"rule: {family.name.lower()}", family.value
        lines.append(f"| `{name}` | {what} | {how} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (HERE / "coverage.md").write_text(page())
