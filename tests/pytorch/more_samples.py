"""Arguments for the rules of gradients, losses, distances, transforms and resampling."""

import torch

from pytorch.samples import (
    AFFINE,
    IMAGE,
    INDEX,
    MASK,
    POSITIVE,
    ROW,
    SIGNAL,
    VOLUME,
    A,
    X,
    Y,
    normal,
)

ALL = [True, True, True]
KERNEL = normal(6, 2, 3, 2, seed=10)
GRID = normal(2, 5, 3, 2, seed=17) * 0.8
TRIPLE = normal(4, 3, seed=23), normal(5, 3, 2, seed=24), normal(4, 2, seed=25)
SPECTRUM = torch.complex(normal(3, 3, seed=18), normal(3, 3, seed=19))
TARGET = torch.sigmoid(Y)
CLASSES = torch.tensor([[3, 0, -1, 1], [1, -1, 0, 2], [2, 2, 1, 0]])

LOSSES = {
    A.mse_loss.default: [(X, Y), (X, Y, 0), (X, Y, 2)],
    A.l1_loss.default: [(X, Y), (X, Y, 0)],
    A.smooth_l1_loss.default: [(X, Y), (X, Y, 0, 0.5), (X, Y, 2, 0.0)],
    A.huber_loss.default: [(X, Y), (X, Y, 0, 0.5)],
    A.kl_div.default: [(X, TARGET), (X, TARGET * MASK, 0), (X, Y, 2, {"log_target": True})],
    A.binary_cross_entropy.default: [(TARGET, TARGET), (TARGET, TARGET, POSITIVE, 0)],
    A.binary_cross_entropy_with_logits.default: [
        (X * 4, TARGET),
        (X, TARGET, POSITIVE, POSITIVE[0], 0),
    ],
    A._cdist_forward.default: [(X, Y[:2], p, None) for p in (2.0, 1.0, 3.0, 0.0, float("inf"))],
    A.sigmoid_backward.default: [(X, TARGET)],
    A.tanh_backward.default: [(X, Y.tanh())],
    A._softmax_backward_data.default: [(X, Y.softmax(-1), -1, torch.float32)],
    A._log_softmax_backward_data.default: [(X, Y.log_softmax(-1), -1, torch.float32)],
    A.binary_cross_entropy_backward.default: [(X, TARGET, TARGET.flip(0), None, 0)],
    A.smooth_l1_loss_backward.default: [(X, X, Y, 0, 0.5)],
    A.logit.default: [(TARGET,), (TARGET, 0.2)],
    torch.ops.prims.convert_element_type.default: [(X, torch.int32), (X, torch.float32)],
    A._trilinear.default: [(*TRIPLE, [1, 3], [0], [1, 2], [2, 3])],
    A._pdist_forward.default: [(X, p) for p in (2.0, 1.0, float("inf"))],
    A.multilabel_margin_loss.default: [(X, CLASSES), (X[0], CLASSES[0], 2)],
    A.multilabel_margin_loss_forward.default: [(X, CLASSES, 0), (X[0], CLASSES[0], 1)],
}
BACKWARD = {
    A.convolution_backward.default: [
        (normal(2, 6, 4, 4, seed=22), IMAGE, KERNEL, [6], [2, 1], [1, 0], [1, 2], False, [0, 0], 2,
         ALL),
        (normal(2, 6, 14, 8, seed=22), IMAGE, normal(4, 3, 3, 2, seed=11), [6], [2, 1], [1, 0],
         [1, 2], True, [1, 0], 2, ALL),
        (normal(2, 4, 9, seed=22), SIGNAL, normal(4, 4, 3, seed=12), [4], [1], [1], [1], False, [0],
         1, ALL),
    ],
}  # fmt: skip
TRANSFORMS = {
    A._fft_r2c.default: [
        (X, [1], 0, True),
        (X, [0, 1], 1, True),
        (X, [1], 2, False),
    ],
    A._fft_c2r.default: [(SPECTRUM, [1], 2, 4), (SPECTRUM, [0, 1], 0, 5)],
    A.grid_sampler_2d.default: [
        (IMAGE, GRID, mode, padding, corners)
        for mode, padding, corners in [
            (0, 0, False), (0, 1, True), (0, 2, False), (0, 2, True), (1, 0, False), (1, 1, False),
        ]
    ],
    A.as_strided.default: [(IMAGE, [3, 2, 5], [50, 0, 3], 4), (X, [2, 2], [1, 4])],
    A.as_strided_scatter.default: [(X, Y[:2, :2], [2, 2], [4, 1], 1)],
    A.diagonal_scatter.default: [(X, ROW[:3]), (IMAGE, IMAGE[..., 0, :5], -2, 2, 3)],
    A.atan2.out: [(X, Y, {"out": torch.zeros(3, 4)})],
    A.max_pool3d_with_indices.default: [(VOLUME, [2]), (VOLUME, [3, 2, 2], [2], [1], [1], True)],
    A._native_batch_norm_legit.default: [
        (IMAGE, *AFFINE, ROW.clone(), POSITIVE[1].clone(), True, 0.1, 1e-5)
    ],
    A.addmv.default: [(X[:, 0], X, ROW, {"beta": 0.5, "alpha": 2})],
    A.addr.default: [(X, Y[:, 0], ROW)],
    A.addbmm.default: [(normal(5, 5, seed=27), normal(2, 5, 8), normal(2, 8, 5, seed=1))],
}  # fmt: skip
MORE = LOSSES | BACKWARD | TRANSFORMS

COMPLEX = torch.complex(X, Y)
SQUARE = normal(2, 4, 4, seed=21)
POSITIVE_DEFINITE = SQUARE @ SQUARE.mT + 4 * torch.eye(4)
FACTOR = torch.linalg.cholesky(POSITIVE_DEFINITE)
COLUMNS = normal(2, 4, 3, seed=22)
LOGS = normal(8, 2, 4, seed=31).log_softmax(-1)
LABELS, STEPS_OF, LABELS_OF = torch.tensor([[1, 1, 2], [2, 3, 1]]), *torch.tensor([[8, 7], [3, 1]])
MORE |= {
    A.complex.default: [(X, Y)], A.polar.default: [(X.abs(), Y)],
    A.real.default: [(COMPLEX,)], A.imag.default: [(COMPLEX,)], A.angle.default: [(COMPLEX,)],
    A._conj.default: [(COMPLEX,)], A.conj_physical.default: [(COMPLEX,)],
    A._conj_physical.default: [(COMPLEX,)], A.resolve_conj.default: [(COMPLEX,)],
    A.resolve_neg.default: [(X,)], A.view_as_real.default: [(COMPLEX,)],
    A.view_as_real_copy.default: [(COMPLEX,)],
    A.view_as_complex.default: [(normal(3, 4, 2),)],
    A.view_as_complex_copy.default: [(normal(3, 4, 2),)],
    A._fft_c2c.default: [(COMPLEX, [1], n, way) for n in (0, 1, 2) for way in (True, False)],
    A.kthvalue.default: [(X, 2), (X, 3, 0, True)],
    A.median.dim: [(X, 1), (X, 0, True), (torch.tensor([[1.0, float("nan"), 2.0]]), 1)],
    A.median.default: [(X,)],
    A.cummax.default: [(X, 1), (X, 0)], A.cummin.default: [(X, 1)],
    A.logcumsumexp.default: [(X, 1)],
    A.adaptive_max_pool2d.default: [(IMAGE, [3, 2])],
    A.adaptive_max_pool3d.default: [(VOLUME, [2, 3, 2])],
    A._upsample_bilinear2d_aa.default: [(IMAGE, [3, 4], False), (IMAGE, [9, 11], False)],
    A._upsample_bicubic2d_aa.default: [(IMAGE, [3, 4], False), (IMAGE, [9, 11], False)],
    A.linalg_cholesky_ex.default: [(POSITIVE_DEFINITE,), (POSITIVE_DEFINITE, {"upper": True})],
    A.linalg_inv_ex.default: [(POSITIVE_DEFINITE,)],
    A.linalg_solve_triangular.default: [
        (FACTOR, COLUMNS, {"upper": False}), (FACTOR.mT, COLUMNS, {"upper": True}),
        (FACTOR, COLUMNS.mT, {"upper": False, "left": False}),
    ],
    A.cholesky_solve.default: [(COLUMNS, FACTOR)],
    A.trace.default: [(SQUARE[0],)],
    A.searchsorted.Tensor: [
        (X.sort().values, Y), (X.sort().values, Y, {"right": True}), (ROW.sort().values, Y),
        (X, Y, {"side": "right", "sorter": X.argsort()}),
    ],
    A.bucketize.Tensor: [(X, ROW.sort().values), (X, ROW.sort().values, {"right": True})],
    A.mode.default: [(INDEX, 1), (INDEX.float(), 0, True)],
    A.nanmedian.dim: [(X, 1), (torch.tensor([[1.0, float("nan"), 2.0]]), 1, True)],
    A.nanmedian.default: [(X,)],
    A.polygamma.default: [(1, POSITIVE), (2, POSITIVE)],
    A.igamma.default: [(POSITIVE, POSITIVE + 0.2)], A.igammac.default: [(POSITIVE, Y.abs() + 1)],
    A.special_zeta.default: [(POSITIVE + 1.5, POSITIVE)],
    A.special_ndtri.default: [(TARGET,)],
    **{f.default: [(X,)] for f in (A.i0, A.special_i0e, A.special_i1, A.special_i1e)},
    A.special_log_ndtr.default: [(X,)],
    A.fmax.default: [(X, torch.where(MASK, X, float("nan")))],
    A.fmin.default: [(X, torch.where(MASK, X, float("nan")))],
    A.min.other: [(X, Y)], A.max.other: [(X, Y)],
    A.frexp.Tensor: [(X,)],
    A.round.decimals: [(X, {"decimals": 1}), (X * 100, {"decimals": -1})],
    A.diff.default: [(X,), (INDEX, 1, 0), (X, 1, 1, ROW[:3, None], None)],
    **{getattr(A, f"__{n}__").Tensor: [(INDEX, INDEX + 1), (MASK, X > Y)]
       for n in ("and", "or", "xor")},
    **{getattr(A, f"__{n}__").Scalar: [(INDEX, 3)] for n in ("and", "or", "xor")},
    A.to.dtype_layout: [(X, {"dtype": torch.float32})],
    A.grid_sampler_3d.default: [
        (VOLUME, normal(1, 3, 2, 2, 3, seed=30), mode, padding, corners)
        for mode, padding, corners in [(0, 0, False), (0, 2, True), (1, 1, False)]
    ],
    A.cholesky.default: [(POSITIVE_DEFINITE,), (POSITIVE_DEFINITE, True)],
    A.cholesky_inverse.default: [(FACTOR,), (FACTOR.mT, True)],
    A.triangular_solve.default: [(COLUMNS, FACTOR.mT), (COLUMNS, FACTOR, False, True)],
    A.scatter.reduce: [(X, 1, INDEX[:, :2], Y, {"reduce": "add"})],
    A.scatter.value_reduce: [(X, 1, torch.tensor([[0], [1], [2]]), 2.0, {"reduce": "multiply"})],
    A.index_reduce.default: [
        (X, 0, torch.tensor([2, 0, 2]), Y, kind, {"include_self": own})
        for kind, own in [("mean", True), ("amax", False), ("prod", True)]
    ] + [
        (INDEX, 0, torch.tensor([1, 1]), INDEX - 3, kind, {"include_self": own})
        for kind, own in [("mean", True), ("amax", False), ("amin", False)]
    ],
    A.put.default: [(X, torch.tensor([1, 5]), ROW[:2]), (X, torch.tensor([1, 1]), ROW[:2], True)],
    A.repeat_interleave.Tensor: [(torch.tensor([2, 0, 3]), {"output_size": 5})],
    A.embedding_renorm.default: [(X, INDEX[:1], 0.5, 2.0)],
    torch.ops.scalewise.ctc_loss.default: [
        (LOGS, LABELS, STEPS_OF, LABELS_OF, 0, reduction, False) for reduction in (0, 1, 2)
    ] + [
        (LOGS, torch.tensor([1, 1, 2, 2]), STEPS_OF, LABELS_OF, 0, 0, False),
        (LOGS, LABELS, torch.tensor([1, 7]), LABELS_OF, 0, 1, True),
        (LOGS[:, 0], LABELS[0], STEPS_OF[0], LABELS_OF[0], 0, 0, False),
    ],
    A.nonzero_static.default: [(X > 0, {"size": 4}), (MASK, {"size": 20, "fill_value": -7})],
}  # fmt: skip
