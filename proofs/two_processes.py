"""Compares training in two processes with one: data-parallel, sharded, with narrow gradients.

    python -m proofs.two_processes

Starts two workers, joined by ``jax.distributed`` on this machine's loopback, and one that has all
of the data to itself. In one step the part of the batch that the second worker has makes its
gradients overflow. Compared are losses, loss scales, skipped steps and the final weights.
"""

import json
import sys

from proofs.workers import free_port, results, start, tell

STEPS, SIZE, WIDTH = 10, 8, 16
WAYS = ("data", "sharded", "mapped", "fp16", "e5m2")
TOLERANCE = dict.fromkeys(WAYS, 1e-3) | {"e5m2": 0.05}  # of a loss: another order of a reduction


def worker(number: int, count: int, port: int, ways: tuple[str, ...]) -> None:
    """Trains in each way in one process of ``count``; prints the results as JSON."""
    import jax

    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", count, number)
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((count,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    found = {}
    for way in ways:
        train = make_step(way)
        state, run = make_run(way, train, mesh)
        rows = []
        for index in range(STEPS):
            whole = batch(index)
            part = slice(number * SIZE // count, (number + 1) * SIZE // count)
            local = {k: v[part] for k, v in whole.items()}
            placed = NamedSharding(mesh, P("data"))
            given = {k: jax.make_array_from_process_local_data(placed, v) for k, v in local.items()}
            state, metrics = run(state, given)
            rows.append([
                float(x.addressable_data(0))
                for x in (metrics.loss, metrics.scale, metrics.finite, metrics.skipped)
            ])  # fmt: skip
        replicate = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))
        weights = replicate(state.params["a"])
        sharded = not state.params["a"].is_fully_replicated
        found[way] = {
            "rows": rows,
            "weights": np.asarray(weights.addressable_data(0), np.float64).ravel().tolist(),
            "sharded": sharded and count > 1,
        }
    tell(found)


def make_step(way: str):
    """Returns the training step of one way."""
    import jax.numpy as jnp
    import optax

    from scalewise.training import DynamicLossScale, step

    def loss(params, batch):
        return jnp.mean(jnp.square(jnp.tanh(batch["x"] @ params["a"]) @ params["b"] - batch["y"]))

    options = {} if way in ("data", "sharded") else {"axis_name": "data"}
    if way in ("fp16", "e5m2"):
        options["comm_format"] = way
    # FP16 operands, and a loss scale that is too high at first
    scaling = DynamicLossScale(initial=2.0**20, interval=4)
    return step(loss, optax.adam(1e-2), "c=f16", scaling=scaling, clip=1.0, **options)


def make_run(way: str, train, mesh):
    """Returns the state on its devices, and the compiled step."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    rng = np.random.default_rng(0)
    params = {
        "a": rng.normal(size=(WIDTH, 32)).astype(np.float32) / 4,
        "b": rng.normal(size=(32, 2)).astype(np.float32) / 6,
    }
    shapes = jax.eval_shape(train.init, params)

    def spec(x):  # FSDP: arrays, also moments and masters, are split along their first axis
        return P("data") if way == "sharded" and x.ndim else P()

    shardings = jax.tree.map(lambda x: NamedSharding(mesh, spec(x)), shapes)
    state = jax.jit(train.init, out_shardings=shardings)(params)
    if way in ("data", "sharded"):
        return state, jax.jit(train, out_shardings=(shardings, NamedSharding(mesh, P())))
    mapped = jax.shard_map(
        train, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    return state, jax.jit(mapped)


def batch(index: int) -> dict:
    """Returns the batch of one step; in step 7 the second half overflows FP16 gradients."""
    import numpy as np

    rng = np.random.default_rng(index)
    y = rng.normal(size=(SIZE, 2)).astype(np.float32)
    if index == 7:
        y[SIZE // 2 :] *= 3e4
    return {"x": rng.normal(size=(SIZE, WIDTH)).astype(np.float32), "y": y}


def prove(ways: tuple[str, ...] = WAYS) -> dict[str, dict]:
    """Returns the differences between the ways.

    Raises:
        SystemExit: the two workers disagree at all, or with one process: on what steps to take, or
            beyond the tolerance on a loss.
    """
    import numpy as np

    (alone,) = results([start("proofs.two_processes", 0, 1, 0, "data")])
    port = free_port()
    first, second = results([start("proofs.two_processes", n, 2, port, *ways) for n in (0, 1)])
    if first != second:
        raise SystemExit("the two processes took different decisions")
    report = {}
    for way in ways:
        mine = np.asarray(first[way]["rows"])
        plain = np.asarray(alone["data"]["rows"])
        weights = np.asarray(first[way]["weights"]) - np.asarray(alone["data"]["weights"])
        report[way] = {
            "loss differs from one process by": float(np.abs(mine[:, 0] / plain[:, 0] - 1).max()),
            "weights differ by": float(np.abs(weights).max()),
            "scales": mine[:, 1].tolist(),
            "same decisions as one process": bool((mine[:, 1:] == plain[:, 1:]).all()),
            "skipped": int(mine[-1, 3]),
            "sharded": first[way]["sharded"],
        }
        off = report[way]["loss differs from one process by"]
        if not (report[way]["same decisions as one process"] and off <= TOLERANCE[way]):
            raise SystemExit(f"{way}: not what one process does: {report[way]}")
    return report


if __name__ == "__main__":
    if len(sys.argv) > 4:
        number, count, port = map(int, sys.argv[1:4])
        worker(number, count, port, tuple(sys.argv[4:]))
    else:
        for name, figures in prove().items():
            print(name, json.dumps(figures))
