"""The table of primitives: its rows mean what their columns say, and the rules agree with it."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise
from primitives import FLOATS
from scalewise.autoscale import RULES
from scalewise.primitives import AUTOCAST, FACTS, PRIMITIVES, Family, having, names, params
from scalewise.primitives._row import parsed

ROOT = Path(scalewise.__file__).parent
# The code of a primitive, found by its name: a rule, a lowering, an operation's number, a phrase,
# a Python expression.
CODE = {
    "PARTICULAR", "UNTRACKED", "CONTROL", "NAMES", "DEGREES", "NAN_CAUSES", "EXPRESSIONS",
}  # fmt: skip
SCALED = list(Family)[: list(Family).index(Family.FALLBACK)]


def magnitudes(tree):
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
    return {float(v) for x in floats for v in np.abs(np.asarray(x, np.float64)).ravel()}


def calls(name):
    """(operands, results) of each equation of that primitive in its example."""
    f, arguments = FLOATS[name]
    found = []

    def evaluated(jaxpr, consts, arguments):
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))
        for e in jaxpr.eqns:
            inputs = [v.val if hasattr(v, "val") else values[v] for v in e.invars]
            if e.primitive.name in ("jit", "pjit"):
                outs = evaluated(params.body(e).jaxpr, params.body(e).consts, inputs)
            else:
                outs = e.primitive.bind(*inputs, **e.primitive.get_bind_params(e.params))
                outs = list(outs) if e.primitive.multiple_results else [outs]
            if e.primitive.name == name:
                found.append((inputs, outs))
            values.update(zip(e.outvars, outs, strict=True))
        return [v.val if hasattr(v, "val") else values[v] for v in jaxpr.outvars]

    closed = jax.make_jaxpr(f)(*map(jnp.asarray, arguments))
    evaluated(closed.jaxpr, closed.consts, [jnp.asarray(a) for a in arguments])
    assert found
    return found


def of(fact):
    return pytest.mark.parametrize("name", sorted(having(fact) & FLOATS.keys()))


@pytest.mark.slow
@of("exact")
def test_results_of_an_exact_primitive_are_among_its_operands(name):
    for given, got in calls(name):
        filled = {np.inf, 1.0} if name in ("gather", "sign", "reduce_window_max") else set()
        assert magnitudes(got) <= magnitudes(given) | {0.0} | filled


@of("same_order")
def test_same_order_primitives_keep_the_order(name):
    for given, got in calls(name):
        np.testing.assert_array_equal(np.ravel(got[0]), np.ravel(given[0]))


@of("elementwise")
def test_an_elementwise_primitive_has_a_result_for_each_index(name):
    f, arguments = FLOATS[name]
    todo, found = [jax.make_jaxpr(f)(*map(jnp.asarray, arguments)).jaxpr], 0
    while todo:
        for e in todo.pop().eqns:
            todo += [params.body(e).jaxpr] if e.primitive.name in ("jit", "pjit") else []
            if e.primitive.name == name:
                found += 1
                shape = jnp.broadcast_shapes(*(v.aval.shape for v in e.invars))
                assert {v.aval.shape for v in e.outvars} == {shape}
    assert found


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_rule_is_of_the_family_that_the_table_names(name):
    family = PRIMITIVES[name].family
    assert RULES[name].family is (Family.FALLBACK if family is Family.SPARSE else family)


def test_a_family_that_scales_has_a_rule_for_each_of_its_primitives():
    assert names(lambda row: row.family in SCALED) <= RULES.keys()


@pytest.mark.parametrize(
    "line", ["sin contractive - fast", "sin contractive wide", "sin contractive -\nsin power -"]
)
def test_an_invalid_line_is_refused(line):
    with pytest.raises(ValueError, match=r"primitives/_table.py.*'sin"):
        parsed(line)


def test_every_word_of_the_table_is_used():
    assert {row.autocast for row in PRIMITIVES.values()} == set(AUTOCAST)
    assert frozenset().union(*(row.facts for row in PRIMITIVES.values())) == set(FACTS)
    assert {row.family for row in PRIMITIVES.values()} == set(Family)
    with pytest.raises(ValueError, match="'exakt' is no fact"):
        having("exakt")


def test_parameters_are_read_in_one_file():
    for path in ROOT.rglob("*.py"):
        if path != Path(params.__file__):
            assert not re.search(r"\w\.params(\[|\.get\()", path.read_text()), path


def test_sets_of_primitives_come_from_the_table():
    """Three names of primitives in one literal are a list that belongs into the table."""
    packages = "interpret", "emulate", "autocast", "autoscale", "audit", "training"
    for path in (p for package in packages for p in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if {t.id for t in targets if isinstance(t, ast.Name)} & CODE:
                    continue
                strings = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
                words = [w for s in strings if isinstance(s, str) for w in s.split()]
                named = [w for w in words if w in PRIMITIVES]
                assert len(named) < 3 or len(named) < len(words) / 2, f"{path}: {named}"


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
