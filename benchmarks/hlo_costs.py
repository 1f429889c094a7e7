"""Counts an HLO instruction's reads and writes of slices, and the operations of libraries."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.hlo import Array, Instruction, Module

SLICES = frozenset({"dynamic-slice", "slice", "gather"})
UPDATE = "dynamic-update-slice"


def traffic(module: Module, line: Instruction) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Types of the arrays that an instruction reads and writes.

    Of an operand that is only sliced or gathered from, the slices are read. One that is updated in
    place is read and written where it is updated. An array given under two names counts once.
    """
    body = [i for name in line.called("calls") for i in module.computations.get(name, ())]
    if line.opcode != "fusion":
        operands = {module.array(name): name for name in line.operands}
        whole = {name: module.types[name] for name in operands.values()}
        return _of_slice(line, whole)
    given, reads, updated = set(), [], {}
    by_number = {i.operands[0]: i.name for i in body if i.opcode == "parameter"}
    for index, name in enumerate(line.operands):
        if module.array(name) in given:
            continue
        given.add(module.array(name))
        found = _parts(module, body, by_number.get(str(index), ""))
        if found is None:
            reads += module.types[name]
            continue
        cut, written = found
        whole = sum(a.bytes for a in module.types[name])
        reads += cut if sum(a.bytes for a in cut) < whole else module.types[name]
        for a in written:
            updated[module.types[name][0].shape] = a
    writes = [updated.pop(a.shape, a) for a in line.results]
    return tuple(reads), tuple(writes)


def _of_slice(line: Instruction, whole: dict) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    reads = tuple(a for types in whole.values() for a in types)
    if line.opcode in SLICES:
        return line.results, line.results
    if line.opcode == UPDATE and len(reads) > 1:
        return (reads[1],), (reads[1],)
    return reads, line.results


def _parts(
    module: Module, body: list[Instruction], name: str
) -> tuple[list[Array], list[Array]] | None:
    """Types of the slices that a fusion reads of a parameter, and of those that it updates in
    place; None if it reads all of it."""
    cut, updated, names = [], [], {name}
    for line in body:
        if not names & set(line.operands):
            continue
        if line.opcode == "bitcast":
            names.add(line.name)
        elif line.opcode in SLICES and line.operands[0] in names:
            cut += line.results
        elif line.opcode == UPDATE and line.operands[0] in names:
            if any(line.name in i.operands for i in body if i.opcode not in ("tuple", "bitcast")):
                return None
            updated += module.types[line.operands[1]]
        else:
            return None
    return (cut, updated) if cut or updated else None


def library_flops(line: Instruction, a: Array, b: Array) -> int | None:
    """Operations of a function of cuDNN; None for others.

    Attention multiplies two pairs of matrices forward, and five backward, whose scores may be
    masked. Each of a convolution's three products multiplies every number of the forward result by
    a kernel's numbers of one feature.
    """
    if "fmha" in line.target:
        scores = line.config["cudnn_fmha_backend_config"]["intermediate_tensor_shape"]
        products = 5 if "Backward" in line.target else 2
        return 2 * products * math.prod(map(int, scores["dimensions"])) * a.shape[-1]
    if "cudnn$conv" not in line.target:
        return None
    labels = re.search(r"dim_labels=\w+_(\w+)->", line.attributes)
    assert labels is not None
    result, kernel = line.results[0], b
    if "BackwardInput" in line.target:
        result = a
    elif "BackwardFilter" in line.target:
        result, kernel = b, line.results[0]
    features = kernel.shape[labels[1].index("o")]
    return 2 * result.size * kernel.size // features
