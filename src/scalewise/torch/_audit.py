"""``audit``: which line of a torch model loses accuracy in a given format, and a tried fix."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._resolve import resolve
from .._types import PyTree
from ..auditing import Report
from ..auditing import audit as audit_function
from ..autocasting import Policy, PolicyLike
from ..autoscaling import Products, Recipe, RecipeLike, recipes
from ..formats import BF16, FP16, FormatLike, Saturation
from ..formats import format as format_
from ..interpret import Interpretation, trace
from ..rounding import saturation
from ..scaled import Unit
from ..scalifying import Scalify
from ._arguments import checked_model
from ._convert import to_jax, torch_dtype
from ._emulate import NO_SEED, low_function
from ._export import Granularity
from ._fixes import AuditedModel, TorchEmulation, in_torch
from ._function import function, tensors_of
from ._place import is_in_torch
from ._ran import Ran, told
from ._rerun import Rerun
from ._torch import GradScaler, Module, torch


def _with_backward_hooks(model: Module) -> str:
    """Returns the name of a module or parameter with a hook on its gradients, or ""."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            return name or type(model).__name__
    hooked = (name for name, p in model.named_parameters() if p._backward_hooks)
    return next(hooked, "")


def audit(
    model: Module,
    args: Sequence[PyTree] = (),
    kwargs: Mapping[str, PyTree] | None = None,
    *,
    low: FormatLike | PolicyLike | RecipeLike | Interpretation = "fp16",
    loss: Callable[[Any], Any] | None = None,
    grad: bool = False,
    method: str = "forward",
    granularity: Granularity = "operation",
    saturate: Saturation = False,
    autocast: bool = False,
    loss_scale: float | GradScaler | None = None,
    **options: Any,
) -> Report:
    """Audits a torch module: runs it in low precision and in float32, and tries fixes.

    Findings name the lines of the model's own source, or of the library that defines it, and the
    path of the module as scope. See :func:`scalewise.audit`.

    Args:
        model: a ``torch.nn.Module``, or a function of tensors; it isn't changed.
        args, kwargs: arguments of the method.
        low: a format, or a name or dtype of one (JAX's or torch's): the model then runs as for
            :func:`emulate`, and what it computes in float32 by itself stays float32. The reference
            run is the model in float32, exported by itself: its branches, buffers and constants,
            none of them rounded. Or a policy, a recipe or an interpretation, as for
            :func:`scalewise.audit`; the model then runs in its own dtypes.
        loss: a JAX function of the model's results (see :func:`function`) that returns a scalar.
        grad: whether the gradients of the loss with respect to the parameters are audited too.
            Without ``loss`` the result has to be a scalar, or a dict that has one as ``"loss"``.
        method, granularity: as for :func:`function`.
        saturate: as for :func:`scalewise.round_to`.
        autocast: whether the model runs in its own dtypes, as under ``torch.autocast("cuda",
            dtype)`` with torch's lists of operations; those that run in the narrow dtype there are
            rounded to ``low``, a format of at most 16 bits.
        loss_scale: with ``grad=True``, a factor of the loss that is divided out of the gradients.
            Or an enabled ``torch.amp.GradScaler``: the factor is its current scale, and if a
            gradient isn't finite, it skips the step: the audited gradients are then zero.
        options: of :func:`scalewise.audit`: ``trials``, ``reference``, ``device``. With a device,
            FP16 and BF16 mean that operands of products are rounded to them, and all else stays in
            the model's dtypes.

    Returns:
        A :class:`scalewise.Report`. Without ``autocast`` torch itself runs the model once in the
        narrow dtype on the model's device: an error that it raises there is the verdict (the
        field ``raised``), and an error of its results beyond 1.5 of the predicted one is told
        (the field ``ran``).

    Raises:
        ExportError, MissingRuleError: as :func:`function`.
        TypeError: ``grad=True``, and the result is no scalar; ``loss_scale`` is neither a number
            nor a GradScaler.
        ValueError: as :func:`scalewise.audit`; ``loss_scale`` without ``grad=True``, not above 0,
            or a GradScaler that is disabled or gets float16 gradients, which it refuses;
            ``autocast`` with a policy, a recipe or a wider format.

    Example:
        >>> import torch, scalewise.torch
        >>> class Norm(torch.nn.Module):
        ...     def forward(self, x):
        ...         return torch.sqrt(torch.sum(x * x))
        >>> report = scalewise.torch.audit(Norm(), (torch.full((4096,), 16.0),), low="fp16")
        >>> report.findings[0].kind, report.findings[0].primitive
        ('overflow', 'sum')
    """
    model, chosen = checked_model(model, args, kwargs), None
    own = torchs_own = False
    if grad and (hooked := _with_backward_hooks(model)):
        raise ValueError(f"audit: {hooked} has backward hooks, which the audit doesn't run")
    scale = as_loss_scale(loss_scale)
    if isinstance(low, torch.dtype):
        low = str(low).removeprefix("torch.")
    if scale is not None and not grad:
        raise ValueError("audit: loss_scale needs grad=True")
    if isinstance(low, str):
        low = resolve(low, "policy", "format", "recipe", where="audit")
    if options.get("device") is not None:
        low = _recipe_for_device(low)
    if isinstance(low, Policy | Recipe | Scalify | Interpretation):
        if autocast:
            raise ValueError("audit: autocast=True needs a format as low, such as 'fp16' or 'bf16'")
        f, params = function(model, args, kwargs, method=method, granularity=granularity)
        options["saturate"] = saturate
    else:
        fmt = format_(low)
        run = {"method": method, "granularity": granularity, "autocast": autocast}
        chosen = low_function(model, args, kwargs, fmt, reference=True, **run)
        f, params = chosen.f, chosen.params
        low = TorchEmulation(fmt, saturation(saturate, fmt), chosen.dtype)
        torchs_own = fmt == format_(chosen.dtype) and saturate is False
        own = torchs_own and granularity == "operation"
    if scale is not None and scale.skips and jnp.float16 in {x.dtype for x in params.values()}:
        raise ValueError(
            "audit: GradScaler refuses float16 gradients: give a model with float32 parameters"
        )

    target = _target(f, loss, scale, grad)
    given = params, *to_jax(tensors_of(args, kwargs))
    report = audit_function(target, low, **options)(*given)
    if chosen is None:  # JAX's edits are none of torch's source
        return dataclasses.replace(report, run_again=None)
    assert isinstance(low, TorchEmulation)
    program = functools.cache(lambda: trace(target, low, given, {}, name="audit", as_jit=True))
    dtype = torch_dtype(chosen.dtype)
    audited = AuditedModel(chosen.exported, chosen.constants, dtype, program, autocast)
    found, (low_run, wide_run) = in_torch(report, audited), chosen.runs
    again = None
    if report.run_again is not None and torchs_own:
        fixes = [x.fix for x in found.findings if x.fix is not None]
        factor = math.prod((2.0**fix.power for fix in fixes), start=scale.factor if scale else 1.0)
        scale = LossScale(factor, skips=scale is not None and scale.skips)
        kept = frozenset(name for fix in fixes for name in fix.held)
        again = Rerun(model, method, chosen, autocast, loss, grad, factor, scale.gradients, kept)
    found = dataclasses.replace(found, run_again=again)
    return told(found, low_run or Ran(), wide_run if own and loss is None and not grad else None)


def _recipe_for_device(low: Any) -> Any:
    """Returns the recipe that rounds the operands of products alone to a format of 16 bits."""
    if isinstance(low, Policy | Recipe | Scalify | Interpretation):
        return low
    fmt = format_(low)
    found = {FP16: recipes.fp16, BF16: recipes.bf16}.get(fmt)
    if found is None:
        return fmt
    return dataclasses.replace(found, products=Products.short(fmt, fmt, scaling=Unit()))


def _target(
    f: Callable[..., PyTree], loss: Callable | None, scale: LossScale | None, grad: bool
) -> Callable[..., PyTree]:
    def audited(params: PyTree, *tensors: ArrayLike) -> PyTree:
        outs = f(params, *tensors, key=NO_SEED)
        try:
            return outs if loss is None else loss(outs)
        except Exception as error:
            if isinstance(loss, torch.nn.Module) or is_in_torch(error):
                raise TypeError(
                    "audit: loss is a JAX function of the model's results; for a loss of torch "
                    "audit a module whose forward returns it"
                ) from error
            raise

    def scalar(params: PyTree, *tensors: ArrayLike) -> PyTree:
        outs = audited(params, *tensors)
        outs = outs.get("loss") if isinstance(outs, Mapping) else outs
        if not isinstance(outs, jax.Array) or outs.shape:
            raise TypeError("audit(grad=True) needs a scalar: pass loss=, a function of the result")
        return outs

    target = value_and_gradients(scalar, scale) if grad else audited
    target.__name__ = target.__qualname__ = f.__name__
    return target


@dataclasses.dataclass(frozen=True)
class LossScale:
    """A factor of the loss, which is divided out of the gradients."""

    factor: float  # above 0
    skips: bool = False  # whether a step is skipped if one of its gradients isn't finite

    def gradients(self, scaled: PyTree) -> PyTree:
        """Returns the gradients that the optimizer applies, from those of the scaled loss.

        As ``GradScaler`` does, it multiplies by ``1 / factor``, rounded to float32. In a skipped
        step all gradients are zero.
        """
        inverse, leaves = 1 / self.factor, jax.tree.leaves(scaled)
        with jax.named_scope("GradScaler"):
            found = jax.tree.map(lambda g: g * inverse, scaled)
            if not self.skips or not leaves:
                return found
            finite = functools.reduce(jnp.logical_and, [jnp.all(jnp.isfinite(g)) for g in leaves])
            return jax.tree.map(lambda g: jnp.where(finite, g, jnp.zeros_like(g)), found)


def value_and_gradients(
    f: Callable[..., jax.Array], scale: LossScale | None
) -> Callable[..., tuple[jax.Array, PyTree]]:
    """Returns a function of the value of ``f``, without the scale, and the gradients that the
    optimizer applies."""

    def gradients(params: PyTree, *others: ArrayLike) -> tuple[jax.Array, PyTree]:
        def scaled(params: PyTree) -> tuple[jax.Array, jax.Array]:
            value = f(params, *others)
            return (value if scale is None else value * scale.factor), value

        (_, value), found = jax.value_and_grad(scaled, has_aux=True)(params)
        return value, found if scale is None else scale.gradients(found)

    return gradients


def as_loss_scale(given: Any) -> LossScale | None:
    if given is None:
        return None
    if isinstance(given, torch.amp.GradScaler):
        if not given.is_enabled():
            raise ValueError(
                "audit: the GradScaler is disabled, as that for 'cuda' is without a GPU; "
                "torch.amp.GradScaler('cpu') does the same"
            )
        return LossScale(given.get_scale(), skips=True)
    if isinstance(given, bool) or not isinstance(given, int | float | np.number):
        name = type(given).__name__
        raise TypeError(f"audit: loss_scale is a number or a torch.amp.GradScaler, not {name}")
    if not given > 0:
        raise ValueError(f"audit: loss_scale is a number above 0, not {given}")
    return LossScale(float(given))
