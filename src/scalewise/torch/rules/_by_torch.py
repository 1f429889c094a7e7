"""Operations whose derivative torch's engine computes: from their results, as they were rounded, or
with values of its own at ties and zeros.

All others have the derivative of their rule: from the operands, rounded once. So have
``layer_norm`` and ``glu``, of which CUDA's kernels, unlike those for a CPU, keep float32 inside.
"""

from __future__ import annotations

from .._registry import BY_TORCH
from .._torch import aten

_NAMES = """
    sigmoid tanh rsqrt sqrt exp2 log2 log10 reciprocal atanh erf erfc erfinv hypot pow
    logsumexp var std linalg_vector_norm softmax _softmax log_softmax _log_softmax
    abs atan2 copysign relu clamp clamp_min clamp_max hardtanh hardsigmoid hardswish
    relu6 elu celu selu softplus fmax fmin digamma i0 angle div
    median nanmedian
    l1_loss binary_cross_entropy smooth_l1_loss
    sigmoid_backward tanh_backward _softmax_backward_data _log_softmax_backward_data
"""
for _packet in (getattr(aten, name) for name in _NAMES.split()):
    every = (getattr(_packet, x) for x in _packet.overloads() if "out" not in x)
    BY_TORCH.update(x for x in every if len(x._schema.returns) == 1)
