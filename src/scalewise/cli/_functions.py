"""`scalewise audit`, `plan`, `record`, `compare-programs`: run functions of users' files."""

import inspect
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from .._user_file import function_file
from ._command import check, computed, refusal, shown, tell, unused


def audit(
    target: str,
    *,
    fmt: str = "fp16",
    recipe: str | None = None,
    device: str | None = None,
    args: str | None = None,
    reference: str | None = None,
    trials: int = 40,
    steps: int = 1,
    batches: str | None = None,
    data: str | None = None,
    seed: int = 0,
    out: list[Path] | None = None,
    everything: bool = False,
    sheet: bool = False,
    framework: str | None = None,
    grad: bool = False,
    autocast: bool = False,
    loss_scale: float | None = None,
) -> None:
    """Report which lines lose accuracy in low precision, and changes that were tried.

    Exits with 1 if the verdict is No, with 2 if the audit or writing a file fails.

    Args:
        fmt (--format NAME): The format to audit, or an autocast policy.
        recipe (NAME): A recipe of autoscale to audit instead of a format: fp8, ...
        device (NAME): With a recipe: whose matrix units add up products.
        reference (--reference --shadow DTYPE): The precision to compare with: float32 or float64.
        trials (>= 0): The number of runs to try fixes with.
        steps (>= 1): The number of calls, each with the last result.
        batches (FUNCTION): A function of that file that returns the second argument of a step's
            number.
        data (FUNCTION): Instead of --args and --batches, a function that returns both as a
            pair.
        sheet: Print each line's share of the error, too, and write it to a JSON file.
        framework (NAME): jax, or torch: the function returns a module, or a pair of it and its
            inputs. Default: found from the file.
        grad: Audit a torch model's gradients, too.
        autocast: Audit a torch model as under torch.autocast('cuda').
        loss_scale: The factor of a torch model's loss, as of GradScaler.

    Example:
        scalewise audit model.py:train_step --args example --out report.html
    """
    check(target, out)
    from scalewise.auditing import writable  # JAX takes a second to import: not for --help
    from scalewise.autoscaling.recipes import recipe as named

    with refusal(ValueError, TypeError, NotImplementedError):
        paths = [writable(path) for path in out or ()]
        low = fmt if recipe is None else named(recipe)
        options = {"reference": reference, "trials": trials}
        training = {"grad": grad, "autocast": autocast, "loss_scale": loss_scale}
        calls = {"steps": steps, "batches": batches, "data": data}
        if _is_torch(target, framework):
            unused(calls | {"steps": steps > 1, "device": device}, "functions of JAX")
            report = _of_torch(target, low, args, seed, options | training)
        else:
            unused(training, "torch models (--framework torch)")
            report = _of_function(target, low, args, seed, options | {"device": device}, calls)
        balance = _sheet_of(report) if sheet else None  # before a JSON file is written
        shown(report, paths, everything=everything)
        if balance is not None:
            balance.show(everything=everything)
    if report.fails:
        raise typer.Exit(1)


def _sheet_of(report: Any) -> Any:
    try:
        return report.sheet
    except ValueError as problem:  # the report is printed all the same
        tell(str(problem))
        return None


def _is_torch(target: str, framework: str | None) -> bool:
    if framework not in (None, "jax", "torch"):
        raise ValueError(f"--framework {framework!r}: expected jax or torch")
    if framework is not None:
        return framework != "jax"
    return _makes_a_torch_model(target)


def _makes_a_torch_model(target: str) -> bool:
    """Returns whether a function of a file that imports torch returns a module without arguments.

    The file is run again where it is audited.
    """
    text = ""
    with suppress(OSError, UnicodeDecodeError):
        text = Path(target.rpartition(":")[0]).read_text()
    if not re.search(r"^\s*(import|from) torch\b", text, re.M):
        return False
    from scalewise.auditing import load_function
    from scalewise.torch import is_model

    function, _ = load_function(target)
    if any(p.default is p.empty for p in inspect.signature(function).parameters.values()):
        return False
    with suppress(Exception):  # the audit of a JAX function reports it
        return is_model(function())
    return False


def _of_function(
    target: str, low: Any, args: str | None, seed: int, options: Any, calls: Mapping[str, Any]
) -> Any:
    from scalewise import audit as run_audit
    from scalewise.auditing import inputs, load_function, user_errors

    function, module = load_function(target)
    options |= {"steps": calls["steps"]}
    run_audit(function, low, **options)  # before the data is loaded: invalid options raise
    positional, keywords, per_step = inputs(
        function, module, args, calls["batches"], calls["data"], seed
    )
    with user_errors(module):
        return run_audit(function, low, batches=per_step, **options)(*positional, **keywords)


def _of_torch(target: str, low: Any, args: str | None, seed: int, options: Any) -> Any:
    import scalewise.torch as st
    from scalewise.torch import load

    loaded = load(target, args, seed)
    return st.audit(loaded.model, loaded.args, loaded.kwargs, low=low, **options)


EXPORTS = ("python", "compressed-tensors")


def plan(
    target: str,
    *,
    bits: float | None = None,
    error: float | None = None,
    objective: str = "auto",
    fmt: list[str] | None = None,
    activation: str | None = None,
    export: str | None = None,
    args: str | None = None,
    seed: int = 0,
    out: list[Path] | None = None,
) -> None:
    """Find the formats of a function that change its results least, at a given cost.

    Args:
        bits: The mean bits of a weight.
        error: Instead, the objective's limit; the fewest bits that keep it.
        objective (NAME): What is kept small: kl (of logits), loss, error (of all results), or
            auto.
        fmt (--format NAME): A format of weights; may be given again. Default: nvfp4,
            mxfp8_e4m3, bf16.
        activation (NAME): The format of activations. weights: the weight's own. Default:
            unrounded.
        export (NAME): Print it as python or compressed-tensors as well.

    Example:
        scalewise plan model.py:logits --bits 6 --objective kl --args example
    """
    check(target, out)
    with refusal(ValueError):
        if export not in (None, *EXPORTS):
            raise ValueError(f"--export is {export!r}; expected one of {', '.join(EXPORTS)}")
    # JAX takes a second to import: not for --help
    from scalewise.auditing import writable
    from scalewise.planning import plan as planned

    options: dict[str, Any] = {"objective": objective, "activations": activation}
    options |= {"formats": tuple(fmt)} if fmt else {}
    with refusal(ValueError, TypeError):
        if (bits is None) == (error is None):
            raise ValueError("plan: expected --bits 6 (the mean bits of a weight) or --error")
    found = computed(
        lambda f: planned(f, bits, error=error, **options), target, args, seed, out, writable
    )
    if export is not None:
        with refusal(ValueError):
            made = getattr(found, export.replace("-", "_"))()
            typer.echo(made if isinstance(made, str) else json.dumps(made, indent=1))


def record(
    target: str,
    *,
    args: str | None = None,
    fused: bool = False,
    seed: int = 0,
    out: Path | None = None,
    everything: bool = False,
) -> None:
    """Show the first non-finite number that a function computes on this device, and its numbers.

    Exits with 1 if an operation makes a non-finite number, with 2 if the run or writing fails.

    Args:
        fused: Read the numbers within one compiled program.
        out (FILE): A .safetensors file to write, for `scalewise compare-programs`.

    Example:
        scalewise record model.py:train_step --out here.safetensors
    """
    files = None if out is None else [out]
    check(target, files)
    # JAX takes a second to import: not for --help
    from scalewise.auditing import record as recorded
    from scalewise.auditing import recordable

    recording = computed(
        lambda f: recorded(f, fused=fused),
        target, args, seed, files, recordable, everything=everything,
    )  # fmt: skip
    if recording.first_non_finite is not None:
        raise typer.Exit(1)


def compare_programs(
    first: str,
    second: str,
    *,
    args: str | None = None,
    seed: int = 0,
    out: list[Path] | None = None,
    everything: bool = False,
    json: bool = False,
) -> None:
    """Say where two programs, or recordings of their values, part, and why.

    Exits with 1 if there is a cause, with 2 if they can't be compared.

    Args:
        first (PROGRAM): FILE:FUNCTION of JAX, or of one that returns a torch model and its inputs;
            or recorded values: a folder of .npy and .safetensors files, or one of them,
            or a recording.
        second (PROGRAM): Another one.
        args (FUNCTION): A function of both files that returns the arguments.

    Example:
        scalewise compare-programs train.py:logits engine.py:logits --args example
    """
    both = first, second
    with refusal(ValueError):
        for target in both:
            if not Path(target).exists():
                function_file(target)
    from scalewise.auditing import compare, writable  # JAX takes a second to import: not for --help

    with refusal(ValueError, TypeError, NotImplementedError):
        paths = [writable(path) for path in out or ()]
        found = compare(*(_side(target, args, seed) for target in both))
        shown(found, paths, json, everything=everything)
    if getattr(found, "causes", ()):
        raise typer.Exit(1)


def _side(target: str, args: str | None, seed: int) -> Any:
    """Returns what ``compare`` takes for one program of the command line."""
    from scalewise.auditing import arguments, load_function

    if Path(target).exists():
        return target
    if _makes_a_torch_model(target):
        from scalewise.torch import load

        loaded = load(target, args, seed)
        return loaded.model, *loaded.args, *loaded.kwargs.values()
    function, module = load_function(target)
    positional, keywords = arguments(function, module, args, seed)
    return function, *inspect.signature(function).bind(*positional, **keywords).args
