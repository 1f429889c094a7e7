"""Writes docs/torch_coverage.md: which ATen operations `scalewise.torch` has rules for.

Needs torch: run it with the Python of `make test-torch`.
"""

import operator
from pathlib import Path
from typing import Any

import torch

from scalewise.torch import RULES
from scalewise.torch._registry import rule_of

HERE = Path(__file__).parent


def core() -> set[Any]:
    """Returns the overloads that torch tags as core ATen."""
    names = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")}
    found = set()
    for packet in {name.removeprefix("aten::").partition(".")[0] for name in names}:
        operation = getattr(torch.ops.aten, packet)
        overloads = [getattr(operation, overload) for overload in operation.overloads()]
        found |= {x for x in overloads if torch.Tag.core in x.tags}
    return found


def page() -> str:
    """Returns the page's text."""
    known = core()
    wanted = {str(x) for x in known}
    covered = {str(x) for x in {*RULES, *filter(rule_of, known)} if x is not operator.getitem}
    lines = [
        "# ATen operations with a rule",
        "",
        "Made by `python docs/torch_coverage_page.py`. `tests/pytorch/test_rules.py` compares each",
        "one with torch in float32, float16 and bfloat16. `torch.export` decomposes those that",
        "aren't core ATen and have no rule to those that are.",
        "",
        f"{len(covered)} operations have a rule, of torch's {len(wanted)} core ones "
        f"{len(wanted & covered)}.",
        "",
        "## Core ATen without a rule",
        "",
        "torch decomposes them; or the size of a result depends on numbers, which a JAX function",
        "can't have; or an operand is changed, which exports don't have.",
        "",
        ", ".join(f"`{name.removeprefix('aten.')}`" for name in sorted(wanted - covered)),
        "",
        "## With a rule",
        "",
        "| operation | overloads | core ATen |",
        "|---|---|---|",
    ]
    packets: dict[str, list[str]] = {}
    for name in sorted(covered):
        packet, _, overload = name.removeprefix("aten.").rpartition(".")
        packets.setdefault(packet or name, []).append(overload)
    for packet, overloads in packets.items():
        of_core = [o for o in overloads if f"aten.{packet}.{o}" in wanted]
        lines.append(f"| `{packet}` | {', '.join(overloads)} | {', '.join(of_core)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (HERE / "torch_coverage.md").write_text(page())
