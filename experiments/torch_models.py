"""Small models of many kinds for ``experiments.torch_architectures``.

Each returns what its loss is computed from: the error of a loss, one number, is mostly chance. A
cross entropy's log_softmax is left out as well: torch's CPU kernel for the last axis also rounds
the logarithm of the sum, its kernels for other axes and for CUDA don't
(``tests/pytorch/test_operations.py``, ``ROUND_WITHIN``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


class GroupNormCNN(nn.Module):
    """A convolutional classifier with group norms and a residual connection."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.block = nn.Sequential(
            nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1),
            nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1),
        )  # fmt: skip
        self.head = nn.Linear(16, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        x = F.max_pool2d(x + self.block(x), 2)
        return self.head(x.mean((2, 3)))


class UNetBlock(nn.Module):
    """A denoiser with time embeddings, self-attention over pixels, and one skip connection."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.first, self.down = nn.Conv2d(3, width, 3, 1, 1), nn.Conv2d(width, width, 3, 2, 1)
        self.norm, self.qkv = nn.GroupNorm(4, width), nn.Conv2d(width, 3 * width, 1)
        self.up = nn.ConvTranspose2d(width, width, 4, 2, 1)
        self.last = nn.Conv2d(2 * width, 3, 3, 1, 1)

    def embedded(self, t: Tensor) -> Tensor:
        frequencies = torch.exp(torch.arange(8) * (-9.21 / 8))
        angles = t[:, None] * frequencies.to(t.dtype)
        return self.time(torch.cat((angles.sin(), angles.cos()), -1))

    def forward(self, noisy: Tensor, t: Tensor) -> Tensor:
        skip = self.first(noisy)
        x = self.down(skip) + self.embedded(t)[:, :, None, None]
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).chunk(3, -1)
        attended = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        x = F.gelu(x + attended.transpose(1, 2).reshape(x.shape))
        return self.last(torch.cat((self.up(x), skip), 1))


class LSTMClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(32, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        states, (last, _) = self.lstm(self.embedding(tokens))
        return self.head(states.amax(1) + torch.cat((last[-2], last[-1]), -1))


class Discriminator(nn.Module):
    """A discriminator with spectral norms, and the terms of its hinge loss."""

    def __init__(self):
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.layers = nn.Sequential(
            norm(nn.Conv2d(3, 8, 4, 2, 1)), nn.LeakyReLU(0.2), norm(nn.Conv2d(8, 16, 4, 2, 1)),
            nn.LeakyReLU(0.2), nn.Flatten(), norm(nn.Linear(64, 1)),
        )  # fmt: skip

    def forward(self, real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor]:
        return F.relu(1 - self.layers(real)), F.relu(1 + self.layers(fake))


class PatchTransformer(nn.Module):
    """A vision transformer of torch's own layers, with a class token."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(normal(1, 1, width, scale=0.02))
        self.positions = nn.Parameter(normal(1, 5, width, scale=0.02))
        layer = nn.TransformerEncoderLayer(
            width, 2, 32, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).mT
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.positions
        return self.head(self.norm(self.encoder(x)[:, 0]))


class MessagePassing(nn.Module):
    """A graph network: messages along edges, summed by ``index_add`` and averaged."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.message = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))
        self.update = nn.ModuleList(nn.GRUCell(width, width) for _ in range(2))
        self.head = nn.Linear(width, 1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, goal = edges
        degree = torch.zeros(len(nodes), dtype=nodes.dtype).index_add(
            0, goal, torch.ones(len(goal), dtype=nodes.dtype)
        )
        for message, update in zip(self.message, self.update, strict=True):
            sent = F.relu(message(torch.cat((nodes[source], nodes[goal]), -1)))
            received = torch.zeros_like(nodes).index_add(0, goal, sent)
            nodes = update(received / degree.clamp(min=1)[:, None], nodes)
        return self.head(nodes).squeeze(-1)


class VAE(nn.Module):
    """A variational autoencoder; its noise is an input."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 32), nn.ELU(), nn.Linear(32, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ELU(), nn.Linear(32, 32))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        decoded = self.decoder(mean + noise * torch.exp(0.5 * log_variance))
        kl = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(-1)
        return F.binary_cross_entropy_with_logits(decoded, x.sigmoid(), reduction="none"), kl


class MixtureOfExperts(nn.Module):
    """Two of four experts for each token, and the terms of a loss that balances them."""

    def __init__(self, width: int = 16, experts: int = 4):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.first = nn.Parameter(normal(experts, width, 32, scale=0.2))
        self.second = nn.Parameter(normal(experts, 32, width, seed=1, scale=0.2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chances = self.router(x).softmax(-1)
        weights, chosen = chances.topk(2, -1)
        gates = torch.zeros_like(chances).scatter(
            -1, chosen, weights / weights.sum(-1, keepdim=True)
        )
        hidden = F.silu(torch.einsum("td,edh->teh", x, self.first))
        y = torch.einsum("teh,ehd,te->td", hidden, self.second, gates)
        share = F.one_hot(chosen[:, 0], chances.shape[-1]).to(x.dtype).mean(0)
        return y, share * chances.mean(0)


class Contrastive(nn.Module):
    """Two encoders whose cosine similarities a learned temperature scales."""

    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(24, 32), nn.Mish(), nn.Linear(32, 16))
        self.right = nn.Sequential(nn.Linear(12, 32), nn.Mish(), nn.Linear(32, 16))
        self.temperature = nn.Parameter(torch.tensor(2.6592))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        similar = F.cosine_similarity(self.left(a)[:, None], self.right(b)[None], dim=-1)
        return similar * self.temperature.exp()


class TiedTransformer(nn.Module):
    """A language model whose output layer has the embedding's weights."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3))
        self.up, self.down = nn.Linear(width, 64), nn.Linear(32, width)
        self.output = nn.Linear(width, 50, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.embedding.embedding_dim**0.5
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        gate, value = self.up(self.norms[1](x)).chunk(2, -1)
        x = x + self.down(F.silu(gate) * value)
        return self.output(self.norms[2](x))


IMAGES = normal(4, 3, 8, 8)
MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "CNN with group norms": lambda: (GroupNormCNN(), (IMAGES,)),
    "diffusion UNet": lambda: (UNetBlock(), (IMAGES, torch.tensor([1.0, 10.0, 100.0, 900.0]))),
    "LSTM classifier": lambda: (LSTMClassifier(), (integers(50, 4, 7),)),
    "GAN discriminator": lambda: (
        Discriminator(), (normal(64, 3, 8, 8), normal(64, 3, 8, 8, seed=1))
    ),
    "vision transformer": lambda: (PatchTransformer(), (IMAGES,)),
    "graph network": lambda: (MessagePassing(), (normal(10, 16), integers(10, 2, 30))),
    "VAE": lambda: (VAE(), (normal(8, 32), normal(8, 8, seed=1))),
    "mixture of experts": lambda: (MixtureOfExperts(), (normal(12, 16),)),
    "contrastive loss": lambda: (Contrastive(), (normal(8, 24), normal(8, 12, seed=1))),
    "tied transformer": lambda: (TiedTransformer(), (integers(50, 2, 7),)),
}  # fmt: skip
