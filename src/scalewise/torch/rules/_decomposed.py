"""Composite operations of one kernel, and others, that are computed as torch decomposes them: in
16 bits only their results are rounded."""

from __future__ import annotations

import functools

from .._registry import decomposed, rule
from .._torch import aten

# Names of overloads, "default" left out.
_DECOMPOSED = """
    clip min.other max.other lerp.Scalar lerp.Tensor addcmul addcdiv frac
    contiguous to.dtype to.dtype_layout to.device type_as fill.Scalar
    zeros_like ones_like empty_like new_zeros new_ones new_empty
    elu celu selu softplus hardtanh hardsigmoid hardswish _safe_softmax rms_norm
    gelu silu mish glu relu6 leaky_relu _prelu_kernel threshold softshrink hardshrink
    log_sigmoid logit
    native_layer_norm layer_norm native_group_norm group_norm
    _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
    _native_batch_norm_legit _native_batch_norm_legit.no_stats
    sum var.dim argsort _softmax _log_softmax softmax.int log_softmax.int
    flatten.using_ints unflatten.int t mT adjoint movedim.intlist squeeze squeeze.dim
    expand_as broadcast_to stack split.Tensor split_with_sizes chunk unbind.int narrow
    slice_scatter select_scatter roll repeat repeat_interleave.self_int tril triu diff
    reflection_pad1d reflection_pad2d reflection_pad3d
    replication_pad1d replication_pad2d replication_pad3d
    index_select index_add bucketize.Tensor
    mv dot addmm addmv addr baddbmm trace conv1d conv2d conv3d
    max_pool1d max_pool2d max_pool3d avg_pool1d
    adaptive_avg_pool1d adaptive_avg_pool2d _adaptive_avg_pool2d
    upsample_nearest2d.vec upsample_bilinear2d.vec multilabel_margin_loss
    real imag resolve_conj resolve_neg
    sigmoid_backward tanh_backward _softmax_backward_data _log_softmax_backward_data
    binary_cross_entropy_backward smooth_l1_loss_backward
"""
for _name in _DECOMPOSED.split():
    _packet, _, _overload = _name.partition(".")
    _target = getattr(getattr(aten, _packet), _overload or "default")
    rule(_target)(functools.partial(decomposed, _target))
