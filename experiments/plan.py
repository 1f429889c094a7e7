"""Plans of formats: how well they are predicted, what they gain over heuristics, what they cost.

    python -m experiments.plan [PART ...] [--models gpt moe resnet] [--out docs/plan.jsonl]

``predict``: 100 random plans of weights and activations in NVFP4, MXFP8 and BF16, predicted and
measured KL divergence: rank correlation, median ratio; ``loss``: the same of the loss.
``choose``: at equal mean bits of weights,
the plan beside every uniform format and beside heuristics, on data that it hasn't seen. A heuristic
gives wide formats to the largest weights, to the first and last layers, or to those of the lowest
SQNR, in that order while the budget lasts, and of all pairs of a narrow and a wide format it gets
the one that measures best. ``cost``: processor time and memory beside an audit of a training step.
Each for random and for trained weights. The torch models need torch.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import scalewise as sw
from scalewise.autoscaling import Boundaries, Operand
from scalewise.interpret import trace
from scalewise.planning._sites import WIDE
from scalewise.planning._space import Choice, Lists, Space

PLANS, SEEDS, STEPS = 100, (0, 1, 2), 150
CHOSEN_FROM = ("nvfp4", "mxfp8_e4m3", "bf16")
UNIFORM = ("mxfp4", "nvfp4", "mxfp6_e2m3", "mxfp8_e4m3", "bf16")
BUDGETS = (4.5, 5.0, 6.25, 8.25)
MODELS = ("gpt", "moe", "resnet", "torch transformer", "torch cnn")


class Model(NamedTuple):
    """Logits as a function of parameters and inputs, and inputs to plan and to measure with."""

    logits: Callable[..., jax.Array]
    params: Any
    seen: tuple
    unseen: tuple


def jax_model(name: str, trained: bool, seed: int) -> Model:
    from experiments import models

    program = models.model(name)
    module = models.module_of(program)
    state, step = program.init(seed), jax.jit(program.train_step)
    stream = iter(models.batches(program, seed))
    for batch in itertools.islice(stream, STEPS if trained else 0):
        state, _ = step(state, batch)
    if name == "resnet":
        statistics = state["statistics"]
        if not trained:  # the running statistics of a fresh network are those of no data
            images = next(stream)["images"]
            statistics = module.logits(state["params"], images, None)[1]
        seen = next(stream)["images"]
        own = lambda p, x: module.logits(p, x, statistics)[0]  # noqa: E731
        return Model(own, state["params"], (seen,), (models.held_out(program)[0]["images"],))
    own = module.logits if name == "gpt" else lambda p, x: module.logits(p, x)[0]
    # half a batch keeps the runs short
    seen, unseen = (b[: len(b) // 2, :-1] for b in (next(stream), models.held_out(program)[0]))
    return Model(own, state["params"], (seen,), (unseen,))


def torch_model(name: str, trained: bool, seed: int) -> Model:
    import torch
    from torch.nn.functional import cross_entropy

    from experiments import plan_torch
    from scalewise import torch as st

    torch.manual_seed(seed)
    model, batches = plan_torch.MODELS[name](seed)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for x, y in itertools.islice(batches, STEPS if trained else 0):
        optimizer.zero_grad()
        cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()
    model.eval()
    (seen, _), (unseen, _) = next(batches), next(batches)
    logits, params = st.function(model, (seen,))
    return Model(logits, params, (st.to_jax(seen),), (st.to_jax(unseen),))


def model(name: str, trained: bool, seed: int) -> Model:
    if name.startswith("torch "):
        return torch_model(name.removeprefix("torch "), trained, seed)
    return jax_model(name, trained, seed)


def space_of(
    m: Model,
    inputs: tuple,
    weights: Sequence[str],
    activations: Sequence[str | None],
    objective: Literal["kl", "loss"] = "kl",
) -> Space:
    program = trace(m.logits, Boundaries.of(WIDE), (m.params, *inputs), {}, name="plan")
    lists = Lists([Operand(x) for x in weights], [x and Operand(x) for x in activations])
    return Space(program, lists, objective, 0, "logits")


def predict(name: str, trained: bool) -> Iterator[dict[str, Any]]:
    m = model(name, trained, 0)
    yield {"objective": "kl", **predicted(space_of(m, m.seen, CHOSEN_FROM, CHOSEN_FROM))}


def predict_loss(name: str, trained: bool) -> Iterator[dict[str, Any]]:
    from experiments import models

    program, m = models.model(name), model(name, trained, 0)
    batch = jax.tree.map(lambda x: x[: len(x) // 2], next(iter(models.batches(program, 1))))
    assert program.loss_of is not None
    loss = Model(program.loss_of, m.params, (batch,), ())
    yield {
        "objective": "loss",
        **predicted(space_of(loss, (batch,), CHOSEN_FROM, CHOSEN_FROM, "loss")),
    }


def predicted(space: Space) -> dict[str, Any]:
    from scipy.stats import spearmanr

    random = np.random.default_rng(PLANS)  # not the seed of the plans that the prediction runs
    choices = [tuple(random.integers(len(o)) for o in space.options) for _ in range(PLANS)]
    runs = [space.run(choice) for choice in choices]
    said, measured = (np.array([getattr(r, k) for r in runs]) for k in ("predicted", "measured"))
    parts = np.array([_parts(space, x.choice) for x in runs])
    return {
        "rank": float(spearmanr(said, measured).statistic),
        "ratio": float(np.median(said / measured)),
        "ratio_10_90": [float(x) for x in np.percentile(said / measured, [10, 90])],
        "measured": [float(measured.min()), float(np.median(measured)), float(measured.max())],
        "additive_rank": float(spearmanr(parts.sum(1), measured).statistic),
        "spread": float(measured.std()),
        "roundings": float(np.mean(np.count_nonzero(parts, axis=1))),
        "together": _together(space, random, choices),
    }


def _parts(space: Space, choice: Choice) -> np.ndarray:
    """Returns the effect of each rounding of a plan alone."""
    theta = space.theta(choice)
    return np.array([space.emulate(space.family.chosen([c])) if t else 0.0
                     for c, t in enumerate(theta)])  # fmt: skip


def _together(space: Space, random: np.random.Generator, choices: Sequence[Choice]) -> float:
    """Returns the standard deviation of the effect of two roundings of a plan beyond both alone."""
    found = []
    for choice in choices:
        both = random.choice(np.flatnonzero(space.theta(choice)), 2, replace=False)
        alone = sum(space.emulate(space.family.chosen([c])) for c in both)
        found.append(space.emulate(space.family.chosen(both)) - alone)
    return float(np.std(found))


def sqnr(space: Space, i: int, fmt: str, contracted_last: bool) -> float:
    """Signal to noise of a site's weights in a format, their blocks along the contracted axis."""
    arrays = dict(zip(space.program.arguments, space.program.arrays, strict=True))
    found = []
    for path in space.sites[i].weights:
        w = jnp.asarray(arrays[path])
        w = w if contracted_last else w.reshape(-1, w.shape[-1]).T
        noise = jnp.sum((sw.dequantize(sw.quantize(w, fmt)) - w) ** 2)
        found.append(float(jnp.sum(w**2) / noise))
    return min(found)


def heuristics(space: Space, torch_layout: bool) -> dict[str, list[int]]:
    """Returns in which order each heuristic gives sites with weights a wide format."""
    own = [i for i, site in enumerate(space.sites) if site.elements]
    ends = [x for pair in zip(own, reversed(own), strict=True) for x in pair]
    return {
        "largest wide": sorted(own, key=lambda i: -space.sites[i].elements),
        "first and last wide": list(dict.fromkeys(ends)),
        "SQNR": sorted(own, key=lambda i: sqnr(space, i, "nvfp4", torch_layout)),
    }


def greedy(space: Space, order: Sequence[int], limit: float) -> Iterator[Choice]:
    """Yields for each pair of formats the choice that a heuristic makes within a budget."""
    formats = range(len(UNIFORM))
    for low, high in itertools.combinations_with_replacement(formats, 2):
        choice = [low if len(o) > 1 else 0 for o in space.options]
        if space.cost(choice) > limit * (1 + 1e-9):
            continue
        for i in order:
            wide = [*choice[:i], high, *choice[i + 1 :]]
            choice = wide if space.cost(wide) <= limit * (1 + 1e-9) else choice
        yield tuple(choice)


def choose(name: str, trained: bool, seed: int) -> Iterator[dict[str, Any]]:
    m = model(name, trained, seed)
    space, unseen = (space_of(m, inputs, UNIFORM, [None]) for inputs in (m.seen, m.unseen))
    measured = functools.cache(lambda choice: unseen.emulate(space.theta(choice)))
    orders = heuristics(space, name.startswith("torch"))
    found = space.predict.front(space.columns, space.costs)
    for budget in BUDGETS:
        best = space.confirmed(found.choices[found.within(budget)], budget)
        seen = {"plan": best.measured}
        row: dict[str, Any] = {"budget": budget, "plan": measured(best.choice), "seen": seen}
        for k, fmt in enumerate(UNIFORM):
            choice = tuple(k if len(o) > 1 else 0 for o in space.options)
            if space.cost(choice) <= budget * (1 + 1e-9):
                row[f"uniform {fmt}"] = measured(choice)
        for rule, order in orders.items():
            # its best pair by the data that the plan was made with, as the plan's own runs
            choices = sorted(set(greedy(space, order, budget)))
            tried = min(map(space.run, choices), key=lambda x: x.measured)
            row[rule], seen[rule] = measured(tried.choice), tried.measured
        yield row


def cost(name: str, trained: bool) -> Iterator[dict[str, Any]]:
    """Runs each part in a process of its own, whose time and memory are its own."""
    for part in ("plan", "audit"):
        command = [sys.executable, "-m", "experiments.plan", "--own", part, "--models", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        yield {"what": part, **json.loads(done.stdout.splitlines()[-1])}


def own_cost(part: str, name: str) -> dict[str, float]:
    m = model(name, False, 0)
    # not getrusage: its peak is that of the process that started this one, if that was larger
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the present memory
    before, start = _memory("VmRSS"), time.process_time()
    if part == "plan":
        sw.plan(m.logits, 6.0, objective="kl")(m.params, *m.seen)
    else:
        from experiments import models

        program = models.model(name)
        batch = next(iter(models.batches(program, 0)))
        sw.audit(program.train_step, "fp16")(program.init(0), batch)
    return {"seconds": time.process_time() - start, "mib": _memory("VmHWM") - before}


def _memory(field: str) -> float:
    """Returns a field of Linux's ``/proc/self/status``, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(x for x in lines if x.startswith(field)).split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["predict", "loss", "choose", "cost"])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--out", type=Path, help="replaces the rows of these parts and models")
    parser.add_argument("--own", choices=("plan", "audit"))
    given = parser.parse_args()
    if given.own:
        print(json.dumps(own_cost(given.own, given.models[0])))
        return
    if given.out and given.out.exists():
        rows = [json.loads(line) for line in given.out.read_text().splitlines()]
        kept = [r for r in rows if r["part"] not in given.parts or r["model"] not in given.models]
        given.out.write_text("".join(json.dumps(r) + "\n" for r in kept))
    for part, name, trained in itertools.product(given.parts, given.models, (False, True)):
        own = part in ("cost", "loss") and name.startswith("torch ")
        if own or (part == "cost" and trained):
            continue
        for seed in SEEDS if part == "choose" else (0,):
            rows = choose(name, trained, seed) if part == "choose" else PARTS[part](name, trained)
            for row in rows:
                about = {"part": part, "model": name, "trained": trained, "seed": seed}
                line = json.dumps(about | row)
                print(line, flush=True)
                if given.out:
                    with given.out.open("a") as file:
                        file.write(line + "\n")


PARTS = {"predict": predict, "loss": predict_loss, "cost": cost}

if __name__ == "__main__":
    main()
