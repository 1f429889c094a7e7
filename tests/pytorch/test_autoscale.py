"""``st.autoscale``: the user's own loop, optimizer and checkpoints, under a recipe."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import scalewise.torch as st
from pytorch.samples import normal

pytestmark = pytest.mark.filterwarnings("ignore")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), nn.MultiheadAttention(32, 4, batch_first=True)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x, target, scale=1.0):
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        x = x + self.down(F.gelu(self.up(x)))
        return {"loss": F.mse_loss(x, target) * scale, "x": x, "largest": x.argmax(-1)}


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 3)

    def forward(self, x, target):
        y = self.second(torch.relu(self.norm(self.first(x)))).mean((2, 3))
        return {"loss": F.mse_loss(y, target)}


def made(kind, *shapes):
    torch.manual_seed(0)
    return kind().train(), [normal(*shape, seed=i) for i, shape in enumerate(shapes)]


MODELS = {
    "block": (Block, (2, 8, 32), (2, 8, 32)),
    "convolutions": (Convolutions, (8, 3, 8, 8), (8, 4)),
}


def trained(model, batch, steps):
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*batch)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("block", "fp8"), pytest.param("block", "fp16", marks=SLOW),
     pytest.param("block", "mxfp8", marks=SLOW), ("convolutions", "fp16"),
     pytest.param("convolutions", "fp8", marks=SLOW)],
)  # fmt: skip
def test_the_users_loop_trains_under_a_recipe(name, recipe):
    model, batch = made(*MODELS[name])
    plain = trained(copy.deepcopy(model), batch, 20)
    scaled = st.autoscale(model, recipe)
    low = trained(scaled, batch, 20)
    assert low != plain
    assert low[-1] < 0.95 * low[0]
    np.testing.assert_allclose(low, plain, rtol=0.02)
    assert isinstance(scaled, type(model))
    assert scaled.state_dict().keys() == model.state_dict().keys()
    if name == "convolutions":
        assert int(scaled.norm.num_batches_tracked) == 20
    reloaded = made(*MODELS[name])[0]
    reloaded.load_state_dict(scaled.state_dict())
    twice = [m.eval()(*batch)["loss"].item() for m in (reloaded, scaled)]
    assert twice[0] == pytest.approx(twice[1], rel=0.02)


@pytest.mark.parametrize(
    ("recipe", "allowed"), [pytest.param("fp16", 2e-3, marks=SLOW), ("fp8", 0.15)]
)
def test_gradients_are_those_of_the_recipe(recipe, allowed):
    """Beside the gradients of the plain model: fp8 rounds operands to 3 to 4 bits, nothing else."""
    model, batch = made(*MODELS["block"])
    x = batch[0].requires_grad_()
    wants = torch.autograd.grad(model(*batch)["loss"], [x, *model.parameters()])
    out = st.autoscale(model, recipe)(*batch)
    assert out["largest"].dtype == torch.int64
    gots = torch.autograd.grad(out["loss"], [x, *model.parameters()])
    squares = [((g - w).norm() ** 2, w.norm() ** 2) for g, w in zip(gots, wants, strict=True)]
    error = float((sum(a for a, _ in squares) / sum(b for _, b in squares)).sqrt())
    assert 1e-5 < error < allowed


def test_a_loss_outside_frozen_parameters_and_other_arguments():
    model, batch = made(*MODELS["block"])
    model.up.requires_grad_(False)
    scaled = st.autoscale(model, "fp16")
    F.l1_loss(scaled(*batch)["x"], batch[1]).backward()
    found = {name for name, p in scaled.named_parameters() if p.grad is not None}
    assert found == {name for name, _ in model.named_parameters() if not name.startswith("up")}
    with torch.no_grad():
        once, twice = (scaled(*batch, scale=s)["loss"] for s in (1.0, 2.0))
    assert float(twice) == pytest.approx(2 * float(once), rel=1e-3)
    copied = copy.deepcopy(scaled)
    with torch.no_grad():
        copied.down.weight.zero_()
        assert scaled(*batch)["loss"].item() == pytest.approx(once.item())
        assert copied(*batch)["loss"].item() != pytest.approx(once.item(), rel=1e-3)


@pytest.mark.parametrize("recipe", ["fp16", pytest.param("nvfp4", marks=SLOW)])
def test_dropout_and_stochastic_roundings_follow_torchs_seed(recipe):
    model = st.autoscale(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).train(), recipe)
    x = normal(4, 64)
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(model(x).detach())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0] == 0, results[2] == 0)
    model.eval()
    assert not (model(x) == 0).any()


def test_recipes_with_a_history_are_refused():
    with pytest.raises(ValueError, match="keeps no history"):
        st.autoscale(nn.Linear(4, 4), "fp8_delayed")
