"""Pairs of programs with one planted difference each, and equal pairs: `python -m failures pairs`.

A pair is right if the tool names a marked line (``# <- name``), or of recordings a marked name, and
one of the pair's kinds; an equal pair, if it names no cause. Of pairs that are only scored (every
other one, by a hash of the name) totals are printed alone.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import math
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FILES = Path(__file__), Path(__file__).with_name("pairs_torch.py")
BF16 = jnp.bfloat16
Sides = tuple[Any, Any]


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two programs, and what is true of them.

    Attributes:
        make: returns both sides, as the tool takes them.
        group: "jax", "torch", "recording"; of equal pairs too.
        kinds: the causes that are right to name; none of an equal pair.
        names: of recordings, the values of which one is right to name.
    """

    name: str
    make: Callable[[], Sides]
    group: str
    kinds: tuple[str, ...]
    names: tuple[str, ...] = ()


PAIRS: dict[str, Pair] = {}


def pair(group: str, kinds: str = "", names: str = "") -> Callable[[Callable], Callable]:
    def add(make: Callable[[], Sides]) -> Callable[[], Sides]:
        name = make.__name__
        PAIRS[name] = Pair(name, make, group, tuple(kinds.split()), tuple(names.split()))
        return make

    return add


def scored() -> set[str]:
    """Returns the pairs that are only scored: every other one of a group, by a hash.

    The names are read from the files, so that they are the same without torch.
    """
    groups: dict[str, list[str]] = {}
    for file in FILES:
        for node in ast.parse(file.read_text()).body:
            for mark in getattr(node, "decorator_list", ()):
                if isinstance(mark, ast.Call) and getattr(mark.func, "id", "") == "pair":
                    group, *kinds = (x.value for x in mark.args if isinstance(x, ast.Constant))
                    groups.setdefault(str(group) if kinds else "equal", []).append(node.name)  # pyright: ignore
    found: set[str] = set()
    for names in groups.values():
        names.sort(key=lambda name: hashlib.sha256(name.encode()).hexdigest())
        found |= set(names[1::2])
    return found


def right_lines(name: str) -> set[tuple[str, int]]:
    """Returns file and number of the lines of statements that end with ``# <- name``."""
    found = set()
    for file in FILES:
        text = file.read_text()
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Assign | ast.AugAssign | ast.Return):
                own = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                marks = [lines[i - 1].partition("# <- ")[2].split() for i in own]
                if any(name in mark for mark in marks):
                    found |= {(file.name, i) for i in own}
    return found


# -- a decoder of two layers -----------------------------------------------------------------------

WIDTH, HEADS, HIDDEN, VOCABULARY, LENGTH, BATCH = 32, 4, 64, 50, 12, 2


def decoder_weights(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int, mean: float = 0.0, scale: float = 0.0) -> jax.Array:
        scale = scale or 1 / math.sqrt(shape[0])
        return jnp.asarray(mean + scale * rng.normal(size=shape), jnp.float32)

    def layer() -> dict[str, jax.Array]:
        return {
            "norm1": normal(WIDTH, mean=1, scale=0.2), "norm2": normal(WIDTH, mean=1, scale=0.2),
            **{name: normal(WIDTH, WIDTH) for name in ("q", "k", "v", "o")},
            "up": normal(WIDTH, HIDDEN), "up_bias": normal(HIDDEN, scale=0.3),
            "down": normal(HIDDEN, WIDTH), "down_bias": normal(WIDTH, scale=0.3),
        }  # fmt: skip

    return {
        "embedding": normal(VOCABULARY, WIDTH, scale=1.0), "layers": [layer(), layer()],
        "norm": normal(WIDTH, mean=1, scale=0.2), "head": normal(WIDTH, VOCABULARY),
    }  # fmt: skip


def tokens(seed: int = 0, batch: int = BATCH) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, VOCABULARY, (batch, LENGTH)))


def rms_norm(x, weight, eps=1e-5):
    mean = jnp.mean(jnp.square(x), -1, keepdims=True)
    return x * jax.lax.rsqrt(mean + eps) * weight  # <- norm_eps norm_plus_one


def rms_norm_plus_one(x, weight, eps=1e-5):
    mean = jnp.mean(jnp.square(x), -1, keepdims=True)
    return x * jax.lax.rsqrt(mean + eps) * (1 + weight)  # <- norm_plus_one


def rotated(x, base=10000.0):
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * base ** (-jnp.arange(half) / half)  # <- rope_base
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]  # <- rope_base
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)  # <- rope_base


def attention(p, x, scale=None, base=10000.0):
    b, t, d = x.shape
    heads = (b, t, HEADS, d // HEADS)
    q, k, v = ((x @ p[name]).reshape(heads) for name in "qkv")  # <- swapped_layers
    scale = (d // HEADS) ** -0.5 if scale is None else scale
    logits = (
        jnp.einsum("bqhd,bkhd->bhqk", rotated(q, base), rotated(k, base)) * scale
    )  # <- attention_scale
    logits = jnp.where(jnp.tril(jnp.ones((t, t), bool)), logits, -1e9)
    return (
        jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v).reshape(x.shape) @ p["o"]
    )  # <- transposed_output


def gelu(x, constant=0.7978845608028654):
    return 0.5 * x * (1 + jnp.tanh(constant * (x + 0.044715 * x**3)))  # <- gelu_constant


def mlp(p, x, activation=gelu):
    return (
        activation(x @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]
    )  # <- missing_bias quantised_hidden


def mlp_without_bias(p, x):
    return gelu(x @ p["up"] + p["up_bias"]) @ p["down"]  # <- missing_bias


def mlp_in_fp8(p, x):
    hidden = gelu(x @ p["up"] + p["up_bias"])
    scale = jnp.max(jnp.abs(hidden)) / 448  # <- quantised_hidden
    narrow = (hidden / scale).astype(jnp.float8_e4m3fn).astype(
        jnp.float32
    ) * scale  # <- quantised_hidden
    return narrow @ p["down"] + p["down_bias"]  # <- quantised_hidden


def head(p, x):
    return x @ p["head"]  # <- head_bf16


def head_in_bf16(p, x):
    return (x.astype(BF16) @ p["head"].astype(BF16)).astype(jnp.float32)  # <- head_bf16


def decoder(p, ids, *, norm=rms_norm, attend=attention, feed=mlp, last=head):
    x = p["embedding"][ids]
    for layer in p["layers"]:
        x = x + attend(layer, norm(x, layer["norm1"]))
        x = x + feed(layer, norm(x, layer["norm2"]))
    return last(p, norm(x, p["norm"]))


def variant(**parts: Callable) -> Callable:
    return functools.partial(decoder, **parts)


def of_decoder(**parts: Callable) -> Sides:
    p, ids = decoder_weights(), tokens()
    return (decoder, p, ids), (variant(**parts), p, ids)


@pair("jax", "constant")
def norm_eps():
    return of_decoder(norm=functools.partial(rms_norm, eps=1e-6))


@pair("jax", "constant")
def rope_base():
    return of_decoder(attend=functools.partial(attention, base=500000.0))


@pair("jax", "constant")
def attention_scale():
    return of_decoder(attend=functools.partial(attention, scale=WIDTH**-0.5))


@pair("jax", "dtype")
def head_bf16():
    return of_decoder(last=head_in_bf16)


@pair("jax", "missing")
def missing_bias():
    return of_decoder(feed=mlp_without_bias)


@pair("jax", "missing")
def norm_plus_one():
    return of_decoder(norm=rms_norm_plus_one)


@pair("jax", "rounded constant")
def gelu_constant():
    return of_decoder(feed=functools.partial(mlp, activation=functools.partial(gelu, constant=0.8)))


@pair("jax", "quantised")
def quantised_hidden():
    return of_decoder(feed=mlp_in_fp8)


@pair("jax", "weight")
def swapped_layers():
    p, ids = decoder_weights(), tokens()
    first, second = p["layers"]
    wrong = p | {"layers": [first | {"v": second["v"]}, second]}
    return (decoder, p, ids), (decoder, wrong, ids)


@pair("jax", "weight")
def transposed_output():
    p, ids = decoder_weights(), tokens()
    first, second = p["layers"]
    wrong = p | {"layers": [first, second | {"o": second["o"].T}]}
    return (decoder, p, ids), (decoder, wrong, ids)


# -- a mixture of experts, and sums in chunks ------------------------------------------------------

EXPERTS = 6


def experts_weights(dtype=jnp.float32) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(3)
    shapes = (
        (WIDTH, EXPERTS),
        (EXPERTS, WIDTH, HIDDEN),
        (EXPERTS, HIDDEN, WIDTH),
        (WIDTH, VOCABULARY),
    )
    made = [jnp.asarray(rng.normal(size=s) / math.sqrt(s[-2]), dtype) for s in shapes]
    return *made, jnp.asarray(rng.normal(size=(24, WIDTH)), dtype)


def routed(router, up, down, last, x, gates):
    hidden = jax.nn.silu(jnp.einsum("td,edh->teh", x, up))
    out = jnp.einsum("teh,ehd->ted", hidden, down)
    return (x + jnp.sum(out * gates[..., None], 1)) @ last


def experts(router, up, down, last, x):
    gates = jax.nn.softmax(x @ router)  # <- router_bf16
    return routed(router, up, down, last, x, gates)


def experts_bf16_router(router, up, down, last, x):
    gates = jax.nn.softmax(
        (x.astype(BF16) @ router.astype(BF16)).astype(jnp.float32)
    )  # <- router_bf16
    return routed(router, up, down, last, x, gates)


@pair("jax", "dtype")
def router_bf16():
    args = experts_weights()
    return (experts, *args), (experts_bf16_router, *args)


def combined_at_once(router, up, down, last, x):
    gates = jax.nn.softmax((x @ router).astype(jnp.float32))
    hidden = jax.nn.silu(jnp.einsum("td,edh->teh", x, up))
    out = jnp.einsum("teh,ehd->ted", hidden, down).astype(jnp.float32)
    return (x + jnp.sum(out * gates[..., None], 1).astype(BF16)) @ last  # <- expert_by_expert


def combined_one_by_one(router, up, down, last, x):
    gates = jax.nn.softmax((x @ router).astype(jnp.float32))
    hidden = jax.nn.silu(jnp.einsum("td,edh->teh", x, up))
    out = jnp.einsum("teh,ehd->ted", hidden, down).astype(jnp.float32)
    total = jnp.zeros_like(x)
    for e in range(EXPERTS):
        total = total + (out[:, e] * gates[:, e, None]).astype(BF16)  # <- expert_by_expert
    return (x + total) @ last


@pair("jax", "order")
def expert_by_expert():
    args = experts_weights(BF16)
    return (combined_at_once, *args), (combined_one_by_one, *args)


def split_product(w1, w2, x, *, chunks):
    hidden = jnp.tanh(x @ w1)
    n = hidden.shape[-1] // chunks
    total = jnp.zeros((len(x), w2.shape[1]), x.dtype)
    for i in range(chunks):
        total = total + hidden[:, i * n : (i + 1) * n] @ w2[i * n : (i + 1) * n]  # <- chunked_sum
    return total


def product_weights(dtype) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(5)
    shapes = (WIDTH, 256), (256, VOCABULARY), (20, WIDTH)
    return tuple(jnp.asarray(rng.normal(size=s) / math.sqrt(WIDTH), dtype) for s in shapes)


@pair("jax", "order")
def chunked_sum():
    args = product_weights(BF16)
    return (functools.partial(split_product, chunks=1), *args), (
        functools.partial(split_product, chunks=64), *args,
    )  # fmt: skip


# -- equal pairs -----------------------------------------------------------------------------------


@pair("jax")
def equal_chunks_float32():
    args = product_weights(jnp.float32)
    return (functools.partial(split_product, chunks=1), *args), (
        functools.partial(split_product, chunks=64), *args,
    )  # fmt: skip


def by_microbatches(p, ids):
    return jnp.concatenate([decoder(p, ids[i : i + 1]) for i in range(len(ids))])


@pair("jax")
def equal_microbatches():
    p, ids = decoder_weights(), tokens(batch=4)
    return (decoder, p, ids), (by_microbatches, p, ids)


def attention_fused(p, x):
    b, t, d = x.shape
    q, k, v = jnp.split(x @ jnp.concatenate([p[name] for name in "qkv"], 1), 3, -1)
    q, k, v = (y.reshape(b, t, HEADS, -1).swapaxes(1, 2) for y in (q, k, v))
    q, k = (rotated(y.swapaxes(1, 2)).swapaxes(1, 2) for y in (q, k))
    logits = (q * (d // HEADS) ** -0.5) @ k.swapaxes(-1, -2)
    logits = jnp.where(jnp.tril(jnp.ones((t, t), bool)), logits, -jnp.inf)
    weights = jnp.exp(logits - jax.nn.logsumexp(logits, -1, keepdims=True))
    return (weights @ v).swapaxes(1, 2).reshape(x.shape) @ p["o"]


@pair("jax")
def equal_fused_attention():
    return of_decoder(attend=attention_fused)


def scanned(p, ids):
    layers = jax.tree.map(lambda *some: jnp.stack(some), *p["layers"])

    def one(x, layer):
        x = x + attention(layer, rms_norm(x, layer["norm1"]))
        return x + mlp(layer, rms_norm(x, layer["norm2"])), None

    x, _ = jax.lax.scan(one, p["embedding"][ids], layers)
    return head(p, rms_norm(x, p["norm"]))


@pair("jax")
def equal_scan():
    p, ids = decoder_weights(), tokens()
    return (decoder, p, ids), (scanned, p, ids)


@pair("jax")
def equal_bf16_heads_permuted():
    p, ids = jax.tree.map(lambda x: x.astype(BF16), decoder_weights()), tokens()
    order = np.arange(WIDTH).reshape(HEADS, -1)[::-1].ravel()
    moved = [
        layer | {n: layer[n][:, order] for n in "qkv"} | {"o": layer["o"][order]}
        for layer in p["layers"]
    ]
    return (decoder, p, ids), (decoder, p | {"layers": moved}, ids)


# -- recordings: folders of arrays -----------------------------------------------------------------


def recorded(p, ids, *, scale=1.0, bias=True, cache=None, engine=False, layers=(0, 1)):
    """Returns the values of a decoder by name, as a trainer writes them or as an engine does."""
    found: dict[str, Any] = {}

    def keep(name: str, x: Any) -> Any:
        found[f"{len(found):03d}_{name}"] = np.asarray(x)
        return x

    x = keep("embed", p["embedding"][ids] * scale)
    for i in layers:
        w = p["layers"][i]
        y = keep(f"{i}_norm_in", rms_norm(x, w["norm1"]))
        b, t, d = y.shape
        q, k, v = (y @ w[n] for n in "qkv")
        if engine:
            keep(f"{i}_qkv_proj", jnp.concatenate([q, k, v], -1))
        q, k, v = (z.reshape(b, t, HEADS, -1) for z in (q, k, v))
        if cache is not None:
            k, v = (z.astype(cache).astype(z.dtype) for z in (k, v))
        for n, z in (("q", q), ("keys", k), ("values", v)):
            keep(f"{i}_{n}", z.swapaxes(1, 2) if engine else z)
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (d // HEADS) ** -0.5
        logits = jnp.where(jnp.tril(jnp.ones((t, t), bool)), logits, -1e9)
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v).reshape(x.shape)
        x = keep(f"{i}_resid_mid", x + keep(f"{i}_attn_out", y @ w["o"]))
        y = keep(f"{i}_gelu", gelu(rms_norm(x, w["norm2"]) @ w["up"] + w["up_bias"]))
        y = keep(f"{i}_mlp_out", y @ w["down"] + (w["down_bias"] if bias else 0))
        x = keep(f"{i}_resid_out", x + y)
    keep("logits", rms_norm(x, p["norm"]) @ p["head"])
    return found


FOLDERS: list[tempfile.TemporaryDirectory] = []


def folder(arrays: dict[str, np.ndarray], ending: str) -> Path:
    FOLDERS.append(tempfile.TemporaryDirectory())
    where = Path(FOLDERS[-1].name)
    if ending == "npy":
        for name, x in arrays.items():
            np.save(where / f"{name}.npy", x)
    else:
        from scalewise.scaled import save_safetensors

        save_safetensors(where / "values.safetensors", arrays)
    return where


def recordings(**changed: Any) -> Sides:
    p, ids = decoder_weights(), tokens()
    a, b = recorded(p, ids), recorded(p, ids, engine=True, **changed)
    return folder(a, "npy"), folder(b, "safetensors")


@pair("recording", "missing", "mlp_out")
def recorded_missing_bias():
    return recordings(bias=False)


@pair("recording", "constant", "embed")
def recorded_embedding_scale():
    return recordings(scale=math.sqrt(WIDTH))


@pair("recording", "quantised dtype", "keys values")
def recorded_fp8_cache():
    return recordings(cache=jnp.float8_e4m3fn)


@pair("recording", "weight", "norm_in")
def recorded_swapped_layers():
    return recordings(layers=(1, 0))


@pair("recording")
def equal_recordings():
    return recordings()


# -- the runner ------------------------------------------------------------------------------------


def compared(sides: Sides) -> Any:
    from scalewise.auditing import compare

    return compare(*sides)


def judged(of: Pair, tool: Callable[[Sides], Any]) -> dict[str, Any]:
    """Asks a tool about a pair; its answer has ``cause`` (with ``kind``), and ``first``: texts."""
    sides = of.make()
    start = time.perf_counter()
    found = tool(sides)
    seconds = time.perf_counter() - start
    cause = found.cause
    row = {
        "said": found.verdict, "seconds": seconds, "kind": cause.kind if cause else "",
        "tried": bool(cause and cause.tried), "predicted": found.predicted and found.predicted.kl,
        "measured": found.gap and found.gap.kl,
    }  # fmt: skip
    if not of.kinds:
        return row | {"right": cause is None}
    kinds = set(of.kinds)
    row["kind right"] = cause is not None and (
        cause.kind in kinds or cause.kind.split()[0] in kinds
    )
    if of.names:
        row["where right"] = any(n in place for n in of.names for place in found.where)
    else:
        places = set(re.findall(r"(\w+\.py):(\d+)", " ".join(found.where)))
        lines = {(file, str(line)) for file, line in right_lines(of.name)}
        row["where right"] = bool(places & lines)
    return row | {"right": row["where right"]}


def score(names: Sequence[str], tool: Callable[[Sides], Any] = compared) -> int:
    """Prints each pair that is looked at, and totals of both halves."""
    try:
        from . import pairs_torch as pairs_torch
    except ModuleNotFoundError as missing:
        print(f"without the pairs of torch: {missing}")
    blind, totals = scored(), {}
    if names and any(n in blind for n in names):
        print("some of these pairs are only scored")
        return 1
    for of in PAIRS.values():
        if names and of.name not in names:
            continue
        try:
            row = judged(of, tool)
        except Exception as error:
            if of.name not in blind:
                print(f"{of.name}: {type(error).__name__}: {error}")
                if names:
                    raise
            row = {"right": False, "seconds": 0.0}
        half = "scored" if of.name in blind else "seen"
        total = totals.setdefault((half, of.group if of.kinds else "equal"), [])
        total.append(row)
        if half == "seen" and "said" in row:
            marks = " ".join(
                f"{x}: {'yes' if row[x] else 'NO'}"
                for x in ("where right", "kind right", "right", "tried") if x in row
            )  # fmt: skip
            print(f"{of.name}: {marks} ({row['seconds']:.1f} s)\n   {row['said']}", flush=True)
    for (half, group), rows in sorted(totals.items()):
        places = sum(bool(r.get("right")) for r in rows)
        kinds = sum(bool(r.get("kind right")) for r in rows)
        tried = sum(bool(r.get("tried")) for r in rows)
        predicted = [r for r in rows if r.get("predicted")]
        near = sum(abs(r["predicted"] / r["measured"] - 1) <= 0.2 for r in predicted)
        longest = max(r["seconds"] for r in rows)
        print(
            f"{half}, {group}: {places} of {len(rows)} right"
            + ("" if group == "equal" else f", kind {kinds}, change tried {tried}")
            + f"; gap predicted within 20 %: {near} of {len(predicted)}; at most {longest:.1f} s"
        )
    return 0
