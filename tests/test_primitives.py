"""The table of primitives: its rows mean what their columns say, and the rules agree with it."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import scalewise
from scalewise.autoscaling import RULES
from scalewise.primitives import AUTOCAST, FACTS, PRIMITIVES, Family, having, names, params
from scalewise.primitives._table import parsed

ROOT = Path(scalewise.__file__).parent
# The code of a primitive, found by its name: a rule, a lowering, an operation's number, a phrase,
# a Python expression.
CODE = {
    "PARTICULAR", "UNTRACKED", "CONTROL", "NAMES", "DEGREES", "NAN_CAUSES", "SINGULAR",
    "EXPRESSIONS", "INFIX", "REDUCTIONS", "TABLE", "MOVES",
}  # fmt: skip
# Files whose strings are expressions to match, or functions of jax.numpy and torch.
OTHER_VOCABULARY = {"_rewrites.py", "functions.py", "_rules.py", "_elementwise.py", "_edits.py"}
SCALED = list(Family)[: list(Family).index(Family.FALLBACK)]


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_rule_is_of_the_family_that_the_table_names(name):
    family = PRIMITIVES[name].family
    assert RULES[name].family is (Family.FALLBACK if family is Family.SPARSE else family)


def test_a_family_that_scales_has_a_rule_for_each_of_its_primitives():
    assert names(lambda row: row.family in SCALED) <= RULES.keys()


@pytest.mark.parametrize(
    "line",
    [
        "contractive - fast: sin", "contractive - nan=fast: sin", "contractive wide: sin",
        "contractive -: sin\npower -: sin", "contractive - sin",
    ],
)  # fmt: skip
def test_an_invalid_line_is_refused(line):
    with pytest.raises(ValueError, match=r"primitives/_table.py.* sin'"):
        parsed(line)


def test_every_word_of_the_table_is_used():
    assert {row.autocast for row in PRIMITIVES.values()} == set(AUTOCAST)
    assert frozenset().union(*(row.facts for row in PRIMITIVES.values())) == set(FACTS)
    assert {row.family for row in PRIMITIVES.values()} == set(Family)
    with pytest.raises(ValueError, match="'exakt' is no fact"):
        having("exakt")


def test_parameters_are_read_in_one_file():
    own = ROOT / "ops" / "_operation.py"  # of its own primitives
    for path in ROOT.rglob("*.py"):
        if path not in (Path(params.__file__), own):
            assert not re.search(r"\w\.params(\[|\.get\()", path.read_text()), path


def words(node):
    """The strings of a literal or pattern, split; of a dict those of its keys."""
    roots = node.keys if isinstance(node, ast.Dict) else [node]
    found = [
        n.value for root in roots if root for n in ast.walk(root) if isinstance(n, ast.Constant)
    ]
    return [word for s in found if isinstance(s, str) for word in s.split()]


def test_sets_of_primitives_come_from_the_table():
    """Three names of primitives in one literal are a list that belongs into the table."""
    literals = ast.Tuple | ast.List | ast.Set | ast.Dict | ast.MatchOr | ast.Constant
    for path in ROOT.rglob("*.py"):
        if path.name in OTHER_VOCABULARY:
            continue
        tree = ast.parse(path.read_text())
        assigned = [n for n in ast.walk(tree) if isinstance(n, ast.Assign | ast.AnnAssign)]
        code = {
            id(inner)
            for node in assigned
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name) and target.id in CODE
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, literals) and id(node) not in code:
                named = [w for w in words(node) if w in PRIMITIVES]
                named = [w for w in named if PRIMITIVES[w].family is not Family.CALL]
                if len(named) >= 3 and len(named) >= len(words(node)) / 2:
                    raise AssertionError(f"{path}:{node.lineno}: {named}")


def test_a_missing_parameter_names_the_file_to_change():
    scan = SimpleNamespace(primitive=SimpleNamespace(name="scan"), params={"body": 1, "size": 2})
    with pytest.raises(params.ParameterError, match=r"scan has no parameter 'jaxpr', only body, "):
        params.body(scan)
    with pytest.raises(LookupError, match=r"'num_consts'.* to scalewise/primitives/params.py"):
        params.scan(scan)
    with pytest.raises(LookupError, match="'newly_manual_axes' or 'manual_axes', only"):
        params.shard_map(scan.__class__(primitive=scan.primitive, params={
            "mesh": 0, "in_specs": 0, "out_specs": 0, "jaxpr": 0}))  # fmt: skip
    with pytest.raises(LookupError, match="'axes', only body, size"):
        params.replaced(scan, size=3, axes=())
    assert params.replaced(scan, size=3) == {"body": 1, "size": 3}
