"""Reads a compiled program's HLO text: matrix products, kernels, bytes, collectives, a time bound.

Nothing here needs a device or a plugin. The text is the optimised module of one device, as
``jax.jit(f).lower(...).compile().as_text()`` prints it. Costs are a roofline model's: each kernel
takes the larger of its bytes over the memory bandwidth and its operations over the peak rate, and
kernels run one after another. Launches, caches and the efficiency of a kernel are left out, so the
result is a lower bound of the time, not an estimate of it.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from benchmarks.hlo_costs import library_flops, traffic

# Operations that neither run on the device nor move a byte.
FREE = frozenset({
    "parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all", "partition-id",
    "replica-id", "iota", "opt-barrier",
})  # fmt: skip
COLLECTIVES = frozenset(
    ["all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"]
)
PRODUCTS = frozenset({"dot", "scaled-dot", "convolution"})

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|[^\s(]\S*) ([a-z][\w\-]*)\((.*)$")


UNKNOWN = 1 << 62  # cycles from which on XLA's estimate says that it has none, as of some copies


@dataclass(frozen=True)
class Array:
    """Type of an array: HLO's name of the dtype, and the sizes."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return -(-self.size * bits_of(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Instruction:
    """One line of a computation; `attributes` is the text behind the operands.

    The operand of a parameter is its number, that of a constant its value.
    """

    name: str
    results: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: str = ""

    def called(self, *keys: str) -> tuple[str, ...]:
        """Names of the computations given as one of the attributes, such as ``calls=%fused``."""
        found = re.findall(rf"\b(?:{'|'.join(keys)})=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
        return tuple(n for group in found for n in re.findall(r"[\w.\-]+", group))

    @property
    def target(self) -> str:
        """Name of the library function of a custom call, else empty."""
        found = re.search(r'custom_call_target="([^"]+)"', self.attributes)
        return found[1] if found else ""

    @property
    def config(self) -> dict[str, Any]:
        """The backend's configuration, where it is a JSON object."""
        start = self.attributes.find("backend_config={")
        if start < 0:
            return {}
        return json.JSONDecoder().raw_decode(self.attributes, start + len("backend_config="))[0]


@dataclass(frozen=True)
class Module:
    """Computations of an HLO module by name, and the name of the one that is run."""

    computations: dict[str, tuple[Instruction, ...]]
    entry: str

    @cached_property
    def types(self) -> dict[str, tuple[Array, ...]]:
        """Types of each instruction's results: names are unique within an optimised module."""
        return {name: i.results for name, i in self._lines.items()}

    @cached_property
    def _lines(self) -> dict[str, Instruction]:
        return {i.name: i for lines in self.computations.values() for i in lines}

    def array(self, name: str) -> str:
        """Name of the instruction whose memory ``name`` is, through tuples and bitcasts."""
        line = self._lines.get(name)
        while line is not None:
            if line.opcode == "bitcast":
                name = line.operands[0]
            elif line.opcode == "get-tuple-element" and (
                (whole := self._lines[line.operands[0]]).opcode == "tuple"
            ):
                index = re.search(r"index=(\d+)", line.attributes)
                assert index is not None
                name = whole.operands[int(index[1])]
            else:
                return name
            line = self._lines.get(name)
        return name

    def operands(self, line: Instruction) -> tuple[Array, ...]:
        """Types of an instruction's operands, a tuple's one by one."""
        return tuple(a for name in line.operands for a in self.types[name])


@dataclass(frozen=True)
class Product:
    """A matrix product: dtypes of operands and result, who computes it, multiplies and adds."""

    operands: tuple[str, str]
    result: str
    target: str
    flops: int

    @property
    def bits(self) -> int:
        """Width of the wider operand."""
        return max(map(bits_of, self.operands))

    def __str__(self) -> str:
        target = self.target.removeprefix("__").replace("$lt$matmul", "").replace("$", " ")
        return f"{' x '.join(self.operands)} -> {self.result}, {target}"


@dataclass(frozen=True)
class Kernel:
    """One launch on the device, made `count` times; bytes and cycles are those of one launch."""

    name: str
    count: int
    reads: tuple[Array, ...]
    writes: tuple[Array, ...]
    product: Product | None = None
    cycles: int = 0

    @property
    def bytes(self) -> int:
        return sum(a.bytes for a in self.reads + self.writes)


@dataclass(frozen=True)
class Collective:
    """A collective over groups of `group` devices; `bytes` are those of its operands."""

    opcode: str
    dtype: str
    bytes: int
    group: int
    count: int

    @property
    def sent(self) -> float:
        """Bytes that one device sends in all `count` runs, by the ring algorithm."""
        each = {"all-gather": self.group - 1.0, "collective-permute": 1.0}
        share = (self.group - 1) / self.group
        each |= {"all-reduce": 2 * share, "reduce-scatter": share, "all-to-all": share}
        return each[self.opcode] * self.bytes * self.count


@dataclass(frozen=True)
class Device:
    """Rates of a device.

    Attributes:
        bandwidth: bytes a second to and from memory.
        peaks: operations a second by the operands' bits.
        link: bytes a second that a device sends to others of its node.
        network: the same in a ring over several nodes, whose every device has its own adapter.
        node: devices that `link` joins.
    """

    bandwidth: float
    peaks: dict[int, float]
    link: float = math.inf
    network: float = math.inf
    node: int = 8

    def seconds(self, kernel: Kernel) -> float:
        """Roofline bound of all launches of a kernel."""
        product = kernel.product
        compute = 0.0
        if product:  # at the rate of the narrowest units that take the operands
            compute = product.flops / self.peaks[min(b for b in self.peaks if b >= product.bits)]
        return kernel.count * max(kernel.bytes / self.bandwidth, compute)

    def seconds_sending(self, collective: Collective) -> float:
        """Time in which a device sends what a collective asks of it, at the full rate."""
        rate = self.link if collective.group <= self.node else self.network
        return collective.sent / rate


def bits_of(dtype: str) -> int:
    """Bits of an element by HLO's name of a dtype; 0 for a token."""
    if dtype in ("token", "opaque"):
        return 0
    if dtype == "pred":
        return 8
    named = re.fullmatch(r"(?:f|bf|s|u|c)(\d+)\w*", dtype)
    if named is None:
        raise ValueError(f"unknown HLO dtype {dtype!r}")
    return int(named[1])


# -- parsing -------------------------------------------------------------------------------------


def parse(text: str) -> Module:
    """Computations of an optimised HLO module."""
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name, lines = "", "", []
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            name, lines = header[2], []
            entry = name if header[1] else entry
        elif line.startswith("}"):
            computations[name] = tuple(lines)
        elif name and (found := instruction(line)):
            lines.append(found)
    if not entry:
        raise ValueError("expected the text of an HLO module with an ENTRY computation")
    return Module(computations, entry)


def instruction(line: str) -> Instruction | None:
    """The instruction that a line holds, if any."""
    found = _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line))
    if found is None:
        return None
    rest, depth, end = found[4], 1, 0
    while end < len(rest) and depth:
        depth += (rest[end] == "(") - (rest[end] == ")")
        end += 1
    operands = tuple(re.findall(r"%([\w.\-]+)", rest[:end]))
    if found[3] in ("parameter", "constant"):
        operands = (rest[: end - 1],)
    return Instruction(found[1], arrays(found[2]), found[3], operands, rest[end:])


def arrays(text: str) -> tuple[Array, ...]:
    """Types of the arrays in an HLO type, a tuple's in order."""
    return tuple(
        Array(dtype, tuple(int(n) for n in sizes.split(",") if n))
        for dtype, sizes in _ARRAY.findall(text)
    )


# -- what runs -----------------------------------------------------------------------------------


def executed(module: Module, name: str = "", count: int = 1) -> Iterator[tuple[Instruction, int]]:
    """Instructions that run, with how often: loops by their trip count, the costliest branch."""
    for line in module.computations[name or module.entry]:
        if line.opcode == "while":
            yield from executed(module, line.called("body")[0], count * _trips(module, line))
        elif line.opcode in ("call", "async-start", "call-start"):
            yield from executed(module, line.called("to_apply", "calls")[0], count)
        elif line.opcode == "conditional":
            names = line.called("branch_computations", "true_computation", "false_computation")
            yield from max((list(executed(module, n, count)) for n in names), key=_written)
        elif line.opcode not in FREE and not line.opcode.endswith(("-done", "-update")):
            yield line, count


def _trips(module: Module, loop: Instruction) -> int:
    """How often a loop's body runs; for a TPU only the condition says it: ``i < constant``."""
    known = loop.config.get("known_trip_count", {}).get("n")
    if known:
        return int(known)
    lines = module.computations[loop.called("condition")[0]]
    numbers = [x.operands[0] for x in lines if x.opcode == "constant"]
    counts = len(numbers) == 1 and "direction=LT" in lines[-1].attributes and numbers[0].isdigit()
    return int(numbers[0]) if counts else 1


def _written(lines: list[tuple[Instruction, int]]) -> int:
    return sum(a.bytes * count for line, count in lines for a in line.results)


def collective_of(line: Instruction) -> str:
    """The collective's opcode, else empty; asynchronous ones end in ``-start``."""
    opcode = line.opcode.removesuffix("-start")
    return opcode if opcode in COLLECTIVES else ""


def kernels(module: Module) -> list[Kernel]:
    """Launches of the program, collectives left out.

    A kernel reads its operands and writes its results once each, of one that it slices or updates
    in place only these parts; an operand given twice, which XLA passes to the kernel once, is read
    once. The workspace of a library's product isn't counted.
    """
    found = []
    for line, count in executed(module):
        if collective_of(line):
            continue
        reads, writes = traffic(module, line)
        if line.target.startswith("__cu") and len(writes) > 1:
            writes = writes[:-1]
        cycles = re.search(r'"estimated_cycles":"(\d+)"', line.attributes)  # XLA's, for a TPU
        found.append(
            Kernel(
                line.name, count, reads, writes, product_of(module, line),
                int(cycles[1]) if cycles and int(cycles[1]) < UNKNOWN else 0,
            )
        )  # fmt: skip
    return found


def collectives(module: Module) -> list[Collective]:
    """Collectives of the program, one for each operand."""
    return [
        Collective(opcode, a.dtype, a.bytes, _group(line.attributes), count)
        for line, count in executed(module)
        if (opcode := collective_of(line))
        for a in module.operands(line)
    ]


def _group(attributes: str) -> int:
    """Devices in one replica group.

    Groups are written as ``{{0,1},{2,3}}``, as ``[groups,size]<=[...]`` or as the axes of a mesh,
    ``mesh['x'=2,'y'=4] {'y'}``.
    """
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes):
        sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", found[1])}
        return math.prod(sizes[name] for name in re.findall(r"'([^']+)'", found[2]))
    found = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    return len(found[1].split(",")) if found else 1


def product_of(module: Module, line: Instruction) -> Product | None:
    """The matrix product that an instruction computes, itself or inside of its fusion."""
    if kernel := re.search(r'\bname = "(grouped_rows|grouped_sums)"', line.attributes):
        return grouped_product(line, module.operands(line), kernel[1])
    library = line.opcode == "custom-call" and line.target.startswith(("__cublas", "__cudnn"))
    if library or line.opcode in PRODUCTS:
        a, b = module.operands(line)[:2]
        flops = library_flops(line, a, b)
        if flops is None:
            flops = 2 * line.results[0].size * _contracted(line, a, b)
        target = line.target or line.opcode
        return Product((a.dtype, b.dtype), line.results[0].dtype, target, flops)
    lines = (i for name in line.called("calls") for i in module.computations.get(name, ()))
    return next((p for inner in lines if (p := product_of(module, inner))), None)


def grouped_product(line: Instruction, operands: tuple[Array, ...], name: str) -> Product:
    """The product of scalewise's kernel for groups, whose first operands are factors and
    indices; with scales for blocks it multiplies in bfloat16."""
    _, a, b, *scales = (x for x in operands if x.dtype != "s32")
    dtypes = ("bf16", "bf16") if scales else (a.dtype, b.dtype)
    flops = 2 * a.size * line.results[0].shape[-1]
    return Product(dtypes, line.results[0].dtype, name, flops)


def _contracted(line: Instruction, a: Array, b: Array) -> int:
    """Length of the sums of a product."""
    if labels := re.search(r"dim_labels=\w+_(\w+)->", line.attributes):
        return math.prod(n for n, label in zip(b.shape, labels[1], strict=True) if label != "o")
    if found := re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line.attributes):
        axes = [int(n) for n in found[1].split(",") if n]
    elif gemm := line.config.get("gemm_backend_config"):
        axes = [int(n) for n in gemm["dot_dimension_numbers"]["lhs_contracting_dimensions"]]
    else:
        axes = [-1]  # block-scaled products of cuDNN take both operands with the sum last
    return math.prod(a.shape[i] for i in axes)


# -- summary -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """Cost of a program on a device; times in seconds, traffic in bytes by opcode and dtype.

    `launches` counts collectives by opcode: XLA joins those of one kind whose operands are ready.
    """

    products: Counter[Product]
    kernels: int
    bytes_outside: int
    seconds_products: float
    seconds_outside: float
    cycles: int
    collectives: Counter[tuple[str, str]]
    sent: Counter[tuple[str, str]]
    seconds_sending: float
    launches: Counter[str]

    @property
    def seconds(self) -> float:
        """The kernels' bound; collectives are not in it."""
        return self.seconds_products + self.seconds_outside

    @property
    def seconds_overlapped(self) -> float:
        """The bound of kernels and collectives that run at the same time throughout."""
        return max(self.seconds, self.seconds_sending)

    @property
    def lines(self) -> list[str]:
        """Numbers of products by operands (in either order), result and who computes them."""
        counts: Counter[str] = Counter()
        for product, n in self.products.items():
            first, second = sorted(product.operands)
            counts[str(replace(product, operands=(first, second)))] += n
        return [f"{n} {name}" for name, n in sorted(counts.items())]


def summary(module: Module, device: Device) -> Summary:
    """Products, kernels, bytes outside of products, bound and collectives of a program."""
    launches = kernels(module)
    products = [(k, k.product) for k in launches if k.product]
    rest = [k for k in launches if not k.product]
    counts: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    exchanged = collectives(module)
    for c in exchanged:
        counts[c.opcode, c.dtype] += c.bytes * c.count
        sent[c.opcode, c.dtype] += round(c.sent)
    return Summary(
        products=_counted((p, k.count) for k, p in products),
        kernels=sum(k.count for k in launches),
        bytes_outside=sum(k.bytes * k.count for k in rest),
        seconds_products=sum(device.seconds(k) for k, _ in products),
        seconds_outside=sum(device.seconds(k) for k in rest),
        cycles=sum(k.cycles * k.count for k in launches),
        collectives=counts,
        sent=sent,
        seconds_sending=sum(map(device.seconds_sending, exchanged)),
        launches=_counted((op, n) for x, n in executed(module) if (op := collective_of(x))),
    )


def _counted(pairs: Iterable[tuple[Any, int]]) -> Counter[Any]:
    counts: Counter[Any] = Counter()
    for key, count in pairs:
        counts[key] += count
    return counts
