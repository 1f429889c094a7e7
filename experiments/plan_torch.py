"""Two torch models for ``experiments.plan``, with batches of synthetic data that they can learn."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from experiments.torch_models import GroupNormCNN

Batches = Iterator[tuple[Tensor, Tensor]]
CLASSES, SIZE, BATCH = 5, 16, 32


class Transformer(nn.Module):
    """Two encoder layers that predict the next of 64 tokens."""

    def __init__(self, tokens: int = 64, width: int = 64):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(tokens, width), nn.Embedding(32, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.ModuleList([layer, type(layer)(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )])  # fmt: skip
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        n = tokens.shape[1]
        x = self.embedding(tokens) + self.positions(torch.arange(n))
        mask = torch.full((n, n), -1e9).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x)


def counters(seed: int) -> Batches:
    """Sequences that step by 1 to 5 modulo 64, with a tenth of the tokens random."""
    random = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(64, (BATCH, 1), generator=random)
        step = torch.randint(1, 6, (BATCH, 1), generator=random)
        clean = (start + step * torch.arange(33)) % 64
        noise = torch.rand(clean.shape, generator=random) < 0.1
        drawn = torch.randint(64, clean.shape, generator=random)
        seen = torch.where(noise, drawn, clean)
        yield seen[:, :-1], clean[:, 1:]


def gratings(seed: int) -> Batches:
    """Noisy gratings of five directions."""
    random = torch.Generator().manual_seed(seed)
    x, y = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    while True:
        kind = torch.randint(CLASSES, (BATCH,), generator=random)
        angle = (kind * torch.pi / CLASSES)[:, None, None]
        phase = 6.28 * torch.rand((BATCH, 1, 1), generator=random)
        wave = torch.sin(x * angle.cos() + y * angle.sin() + phase)
        noise = torch.randn((BATCH, 3, SIZE, SIZE), generator=random)
        yield wave[:, None] + noise, kind


MODELS: dict[str, Callable[[int], tuple[nn.Module, Batches]]] = {
    "transformer": lambda seed: (Transformer(), counters(seed)),
    "cnn": lambda seed: (GroupNormCNN(), gratings(seed)),
}
