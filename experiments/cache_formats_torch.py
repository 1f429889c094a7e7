"""The torch modules of ``experiments.cache_formats``, decoded in torch with a cache of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import scalewise.torch as st

from .cache_formats import (
    BYTES,
    FORMATS,
    HEAD,
    HEADS,
    LAYERS,
    LENGTH,
    PARTS,
    STEPS,
    WIDTH,
    batches,
    measured,
    predicted,
)  # fmt: skip

MODELS = {"torch GPT": False, "torch Llama": True}  # whether it is a Llama
SHARED = {"tensor": (0, 1, 2, 3), "head": (0, 1, 3), "token": (2, 3)}  # axes that share a scale


class Cache:
    """Keys or values in torch's own float8, or in the blocks of scalewise.torch."""

    def __init__(self, name: str):
        (self.format, self.scales), self.parts, self.scale = FORMATS[name], [], None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Writes keys or values of new positions, and reads those of all."""
        if self.format == "e4m3fn":
            if self.scale is None or self.scales == "token":
                largest = x.abs().amax(SHARED[self.scales], keepdim=True)
                self.scale = 2.0 ** (torch.floor(torch.log2(largest)) - 8)
            data = (x / self.scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            self.parts.append(data.float() * self.scale)
        else:
            self.parts.append(st.dequantize(st.quantize(x, self.format, axis=-1)))
        return torch.cat(self.parts, 1)


class Block(nn.Module):
    def __init__(self, llama: bool):
        super().__init__()
        self.llama, keys = llama, WIDTH // 2 if llama else WIDTH
        kind = nn.RMSNorm if llama else nn.LayerNorm
        self.norm1, self.norm2 = kind(WIDTH, eps=1e-5), kind(WIDTH, eps=1e-5)
        self.q, self.k, self.v = (nn.Linear(WIDTH, n) for n in (WIDTH, keys, keys))
        self.o, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x, at, store):
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (-1, HEAD)) for f in (self.q, self.k, self.v))
        k, v = store(rotated(k, at) if self.llama else k, v)
        q = rotated(q, at) if self.llama else q
        q, k, v = (z.transpose(1, 2).repeat_interleave(HEADS // z.shape[2], 1) for z in (q, k, v))
        seen = at[:, None] >= torch.arange(k.shape[2])
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        hidden = F.silu(self.gate(y)) * self.up(y) if self.llama else F.gelu(self.up(y))
        return x + self.down(hidden)


def rotated(x, at):
    angle = at[:, None] * 1e4 ** (-torch.arange(0, HEAD, 2) / HEAD)
    sin, cos = angle.sin()[:, None], angle.cos()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Model(nn.Module):
    def __init__(self, llama: bool):
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(llama) for _ in range(LAYERS))
        self.norm, self.head, self.llama = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES), llama

    def logits(self, ids, stores, first=0):
        at = first + torch.arange(ids.shape[1])
        x = self.bytes(ids) if self.llama else self.bytes(ids) + self.places(at)
        for block, store in zip(self.blocks, stores, strict=True):
            x = block(x, at, store)
        return self.head(self.norm(x))

    def forward(self, ids, *errors):
        """Logits, keys and values, to which errors are added."""
        kept, left = [], iter(errors)

        def moved(k, v):
            kept.extend((k, v))
            return k + next(left), v + next(left)

        return self.logits(ids, [moved] * LAYERS), kept


def trained(llama: bool) -> tuple[Model, float]:
    torch.manual_seed(0)
    model, loss = Model(llama), torch.zeros(())
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _, tokens in batches(0, STEPS):
        ids = torch.from_numpy(np.array(tokens)).long()
        out = model.logits(ids[:, :-1], [lambda k, v: (k, v)] * LAYERS)
        loss = F.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval().requires_grad_(False), loss.item()


def rows(llama: bool):
    """Loss, format, measured and predicted KL, and the largest share of it."""
    model, loss = trained(llama)
    ids = torch.from_numpy(np.array(next(batches(1, 1))[1])).long()
    shape = *ids.shape, HEADS // 2 if llama else HEADS, HEAD
    zeros = [torch.zeros(shape) for _ in range(2 * LAYERS)]
    f, params = st.function(model, (ids, *zeros))
    tokens, *e = st.to_jax((ids, *zeros))
    logits, linear, kv = jax.linearize(lambda e: f(params, tokens, *e), e, has_aux=True)
    linear = jax.jit(linear)
    for name in FORMATS:
        caches = [(Cache(name), Cache(name)) for _ in range(LAYERS)]
        stores = [lambda k, v, c=c: (c[0](k), c[1](v)) for c in caches]
        out = torch.cat([model.logits(ids[:, a:b], stores, a) for a, b in PARTS], 1)
        e = []
        for x in st.to_torch(kv):
            cache = Cache(name)
            e.append(jnp.asarray(([cache(x[:, a:b]) for a, b in PARTS][-1] - x).numpy()))
        yield loss, name, measured(logits, jnp.asarray(out.numpy())), *predicted(logits, linear, e)
