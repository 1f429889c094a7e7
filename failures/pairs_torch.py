"""Pairs of a torch model and its port to JAX."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from .pairs import BF16, HEADS, LENGTH, VOCABULARY, WIDTH, Sides, pair


class Attention(nn.Module):
    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = scale

    def forward(self, x):
        q, k, v = self.c_attn(x).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(  # <- port_attention_scale port_swapped_keys
            q,
            k,
            v,
            is_causal=True,
            scale=self.scale,  # <- port_attention_scale port_swapped_keys
        )
        return self.c_proj(y.transpose(1, 2).flatten(-2))  # <- port_transposed port_missing_bias


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.c_fc, self.c_out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))  # <- port_norm_eps_torch
        h = nn.functional.gelu(self.c_fc(self.ln_2(x)))  # <- port_gelu port_norm_eps_torch
        return x + self.c_out(h)  # <- port_rounded_weight


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList([Block(), Block()])
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))  # <- port_head_bf16 port_norm_eps_torch


def model() -> nn.Module:
    torch.manual_seed(0)
    made = Model().eval()
    with torch.no_grad():
        for name, p in made.named_parameters():
            if p.ndim == 1:
                p.copy_(
                    torch.randn_like(p) * 0.2 + (1.0 if "ln" in name and "weight" in name else 0)
                )
            else:
                p.copy_(torch.randn_like(p) / math.sqrt(p.shape[-1]))
    return made


def ids() -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCABULARY, (2, LENGTH))


# -- the port --------------------------------------------------------------------------------------


def layer_norm(p, x, eps=1e-5):
    centred = x - jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(centred**2, -1, keepdims=True)
    return centred / jnp.sqrt(variance + eps) * p["scale"] + p["bias"]  # <- port_norm_eps_torch


def dense(p, x):
    y = x @ p["kernel"]  # <- port_transposed port_rounded_weight
    return y + p["bias"] if "bias" in p else y  # <- port_missing_bias


def attention(p, x, scale=(WIDTH // HEADS) ** -0.5, order=(0, 1, 2)):
    parts = jnp.split(dense(p["qkv"], x), 3, -1)
    q, k, v = (parts[i].reshape(*x.shape[:2], HEADS, -1) for i in order)
    scores = (
        jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale
    )  # <- port_attention_scale port_swapped_keys
    mask = jnp.arange(x.shape[1])[:, None] >= jnp.arange(x.shape[1])
    probabilities = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
    return dense(p["out"], jnp.einsum("bhqk,bkhd->bqhd", probabilities, v).reshape(x.shape))


def gelu(x):
    return jax.nn.gelu(x, approximate=False)


def tanh_gelu(x):
    return jax.nn.gelu(x, approximate=True)  # <- port_gelu


def last(p, x):
    return x @ p["head"]  # <- port_head_bf16


def last_in_bf16(p, x):
    return jnp.asarray(x.astype(BF16) @ p["head"].astype(BF16), jnp.float32)  # <- port_head_bf16


def port(p, tokens, *, norm=layer_norm, attend=attention, activation=gelu, logits=last):
    x = p["wte"][tokens] + p["wpe"][: tokens.shape[1]]
    for layer in p["layers"]:
        x = x + attend(layer["attn"], norm(layer["ln1"], x))
        x = x + dense(layer["down"], activation(dense(layer["up"], norm(layer["ln2"], x))))
    return logits(p, norm(p["ln"], x))


def ported(made: nn.Module) -> dict[str, Any]:
    weights = {k: jnp.asarray(v.numpy()) for k, v in made.state_dict().items()}

    def linear(name: str) -> dict[str, jax.Array]:
        return {"kernel": weights[f"{name}.weight"].T, "bias": weights[f"{name}.bias"]}

    def norm(name: str) -> dict[str, jax.Array]:
        return {"scale": weights[f"{name}.weight"], "bias": weights[f"{name}.bias"]}

    layers = [
        {
            "ln1": norm(f"h.{i}.ln_1"), "ln2": norm(f"h.{i}.ln_2"),
            "attn": {"qkv": linear(f"h.{i}.attn.c_attn"), "out": linear(f"h.{i}.attn.c_proj")},
            "up": linear(f"h.{i}.c_fc"), "down": linear(f"h.{i}.c_out"),
        }
        for i in range(2)
    ]  # fmt: skip
    return {
        "wte": weights["wte.weight"], "wpe": weights["wpe.weight"], "layers": layers,
        "ln": norm("ln_f"), "head": weights["head.weight"].T,
    }  # fmt: skip


def sides(change: Callable[[dict], object] = lambda p: None, **parts: Callable) -> Sides:
    made = model()
    p = ported(made)
    change(p)
    return (made, torch.from_numpy(ids())), (functools.partial(port, **parts), p, ids())


@pair("torch", "constant")
def port_norm_eps_torch():
    return sides(norm=functools.partial(layer_norm, eps=1e-6))


@pair("torch", "function")
def port_gelu():
    return sides(activation=tanh_gelu)


@pair("torch", "weight")
def port_transposed():
    def change(p):
        p["layers"][0]["attn"]["out"]["kernel"] = p["layers"][0]["attn"]["out"]["kernel"].T

    return sides(change)


@pair("torch", "weight")
def port_swapped_keys():
    return sides(attend=functools.partial(attention, order=(0, 2, 1)))


@pair("torch", "missing")
def port_missing_bias():
    return sides(lambda p: p["layers"][1]["attn"]["out"].pop("bias"))


@pair("torch", "dtype")
def port_head_bf16():
    return sides(logits=last_in_bf16)


@pair("torch", "constant")
def port_attention_scale():
    return sides(attend=functools.partial(attention, scale=WIDTH**-0.5))


@pair("torch", "quantised")
def port_rounded_weight():
    def change(p):
        down = p["layers"][1]["down"]
        down["kernel"] = down["kernel"].astype(BF16).astype(jnp.float32)

    return sides(change)


@pair("torch")
def equal_port():
    return sides()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2)
        self.norm, self.last = nn.BatchNorm2d(8), nn.Linear(8, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        return self.last(torch.relu(self.second(x)).mean((2, 3)))


def convolutions(p, x):
    def conv(name, x, stride, padding):
        layout = ("NHWC", "HWIO", "NHWC")
        kernel = p[f"{name}.weight"].transpose(2, 3, 1, 0)
        y = jax.lax.conv_general_dilated(x, kernel, stride, padding, dimension_numbers=layout)
        return y + p[f"{name}.bias"]

    x = conv("first", x, (1, 1), "SAME")
    x = (x - p["norm.running_mean"]) / jnp.sqrt(p["norm.running_var"] + 1e-5)
    x = jax.nn.relu(x * p["norm.weight"] + p["norm.bias"])
    x = jax.nn.relu(conv("second", x, (2, 2), "VALID"))
    return jnp.mean(x, (1, 2)) @ p["last.weight"].T + p["last.bias"]


@pair("torch")
def equal_convolutions():
    torch.manual_seed(2)
    made = Convolutions().eval()
    x = torch.randn(2, 3, 9, 9)
    p = {k: jnp.asarray(v.numpy()) for k, v in made.state_dict().items()}
    return (made, x), (convolutions, p, x.permute(0, 2, 3, 1).numpy())
