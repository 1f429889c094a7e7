"""Every program of the gallery is recorded with every tool; the tools are heard."""

import pytest
from failures.programs import load
from failures.runner import row, rows

from cases import nightly

NANS, INFS, CHECKIFY, INFS_OP_BY_OP = "debug_nans", "debug_infs", "checkify", "debug_infs_op_by_op"
TOOLS = (NANS, INFS, CHECKIFY, "debug_nans_op_by_op", INFS_OP_BY_OP)


def test_every_program_is_recorded():
    recorded = {(name, tool) for set, name, tool in rows() if set == "gallery"}
    audits = {name for name, tool in recorded if tool == "scalewise"}
    assert audits == set(load("gallery"))
    others = {name for name, x in load("gallery").items() if x.device is None}
    assert {(name, tool) for name in others for tool in TOOLS} <= recorded


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("Adam's epsilon", {NANS: "nothing", INFS: "line", CHECKIFY: "line"}),
        *nightly(
            [
                ("A mask of -1e10", {NANS: "line", INFS: "nothing", INFS_OP_BY_OP: "line"}),
                ("256 + 1", dict.fromkeys(TOOLS, "nothing")),
                ("LayerNorm", dict.fromkeys((NANS, INFS, CHECKIFY), "nothing")),
            ]
        ),
    ],
)
def test_what_the_checks_of_jax_say(program, expected):
    found = {tool: row(load("gallery")[program], tool) for tool in expected}
    assert {tool: one["verdict"] for tool, one in found.items()} == expected
    recorded = {tool: rows()["gallery", program, tool]["where"] for tool in expected}
    assert {tool: one["where"] for tool, one in found.items()} == recorded
