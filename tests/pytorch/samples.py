"""Arguments for each overload with a rule: float tensors are cast to the dtype under test."""

import operator

import torch

import scalewise.torch  # noqa: F401 (it defines the operations of its own)

A = torch.ops.aten


def normal(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


X, Y, Z = normal(3, 4), normal(3, 4, seed=1), normal(3, 4, seed=2)
ROW = normal(4, seed=3)
SPECIAL = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1.5, -2.0])
UNIT = torch.linspace(-0.9, 0.9, 12).reshape(3, 4)
POSITIVE = X.abs() + 0.5
INTS = torch.tensor([[5, -3, 7, 0], [1, 2, -8, 4], [9, 6, -1, 3]])
NONZERO = torch.tensor([2, -3, 4, 5])
BITS = torch.tensor([1, 2, 3, 1])
MASK = X > 0
IMAGE = normal(2, 4, 7, 6, seed=4)
SIGNAL = normal(2, 4, 9, seed=5)
VOLUME = normal(1, 2, 5, 6, 4, seed=6)
INDEX = torch.tensor([[0, 2, 1, 0], [2, 1, 0, 0]])
Q, K, V = (normal(2, 4, 5, 8, seed=s) for s in (7, 8, 9))
AFFINE = (POSITIVE[0], ROW)

FLOAT = (
    "acosh cos cosh digamma erf erfc exp exp2 expm1 lgamma reciprocal sigmoid sin sinc sinh tan "
    "tanh asinh atan"
)
SAMPLES = {getattr(A, name).default: [(X,), (INTS,)] for name in FLOAT.split()}
SAMPLES[A.acosh.default] = [(POSITIVE + 1,)]
SAMPLES[A.digamma.default] = SAMPLES[A.lgamma.default] = [(POSITIVE + 2,)]
SAMPLES[A.reciprocal.default] = [(POSITIVE,)]
for name in ["acos", "asin", "atanh", "erfinv"]:
    SAMPLES[getattr(A, name).default] = [(UNIT,)]
for name in ["log", "log10", "log1p", "log2", "rsqrt", "sqrt"]:
    SAMPLES[getattr(A, name).default] = [(POSITIVE,), (INTS.abs() + 1,)]
for name in [
    "abs", "neg", "sign", "sgn", "square", "alias", "detach", "lift_fresh_copy", "positive",
]:  # fmt: skip
    SAMPLES[getattr(A, name).default] = [(X,), (INTS,)]
for name in ["ceil", "floor", "trunc", "round"]:
    SAMPLES[getattr(A, name).default] = [(X * 3,), (INTS,), (torch.tensor([0.5, 1.5, 2.5, -0.5]),)]
for name in ["isinf", "isnan", "isfinite", "signbit"]:
    SAMPLES[getattr(A, name).default] = [(SPECIAL,)]
SAMPLES |= {
    A.logical_not.default: [(MASK,), (INTS,)],
    A.bitwise_not.default: [(MASK,), (INTS,)],
    A.frac.default: [(X * 3,)],
}
for name in ["eq", "ne", "lt", "le", "gt", "ge"]:
    SAMPLES[getattr(A, name).Tensor] = [(INTS, NONZERO), (X, ROW), (SPECIAL, SPECIAL)]
    SAMPLES[getattr(A, name).Scalar] = [(INTS, 2), (X, 0.5)]
for name in ["logical_and", "logical_or", "logical_xor"]:
    SAMPLES[getattr(A, name).default] = [(MASK, INTS > 0), (INTS, MASK)]
for name in ["and", "or", "xor"]:
    packet = getattr(A, f"bitwise_{name}")
    SAMPLES[packet.Tensor] = [(INTS, NONZERO), (MASK, INTS > 0)]
    SAMPLES[packet.Scalar] = [(INTS, 3)]
for name in ["left", "right"]:
    packet = getattr(A, f"bitwise_{name}_shift")
    SAMPLES[packet.Tensor] = [(INTS, BITS)]
    SAMPLES[packet.Tensor_Scalar] = [(INTS, 2)]
SAMPLES |= {
    A.add.Tensor: [(X, Y), (X, ROW), (X, INTS), (MASK, MASK), (X, Y, {"alpha": 0.3}), (INTS, 2.5)],
    A.add.Scalar: [(X, 0.1), (INTS, 2), (INTS, 0.5)],
    A.sub.Tensor: [(X, Y), (X, ROW, {"alpha": 2}), (INTS, NONZERO)],
    A.sub.Scalar: [(X, 0.1), (INTS, 2)],
    A.rsub.Tensor: [(X, Y, {"alpha": 2})],
    A.rsub.Scalar: [(X, 1.0), (INTS, 1)],
    A.mul.Tensor: [(X, Y), (X, torch.tensor(2.5)), (INTS, X), (MASK, MASK), (MASK, X)],
    A.mul.Scalar: [(X, 0.3), (INTS, 3)],
    A.div.Tensor: [(X, POSITIVE), (INTS, NONZERO), (X, torch.tensor(3))],
    A.div.Scalar: [(X, 3.0), (INTS, 2)],
    A.div.Tensor_mode: [(INTS, NONZERO, {"rounding_mode": m}) for m in ("floor", "trunc")]
    + [(X * 9, POSITIVE, {"rounding_mode": m}) for m in ("floor", "trunc", None)],
    A.div.Scalar_mode: [(INTS, -3, {"rounding_mode": m}) for m in ("floor", "trunc")],
    A.floor_divide.default: [(INTS, NONZERO)],
    A.remainder.Tensor: [(INTS, NONZERO), (X, POSITIVE)],
    A.remainder.Scalar: [(INTS, -3), (X, 0.75)],
    A.fmod.Tensor: [(INTS, NONZERO), (X, POSITIVE)],
    A.fmod.Scalar: [(INTS, -3), (X, 0.75)],
    A.minimum.default: [(X, Y), (SPECIAL, SPECIAL.flip(0)), (INTS, NONZERO)],
    A.maximum.default: [(X, Y), (SPECIAL, SPECIAL.flip(0))],
    A.atan2.default: [(X, Y)],
    A.hypot.default: [(X, Y)],
    A.copysign.Tensor: [(X, Y)],
    A.copysign.Scalar: [(X, -1.0)],
    A.pow.Tensor_Scalar: [(POSITIVE, p) for p in (2, 3, 0.5, -0.5, 1.7, -2)] + [(INTS, 2)],
    A.pow.Tensor_Tensor: [(POSITIVE, Y)],
    A.pow.Scalar: [(2.0, X), (10000.0, UNIT)],
    A.clone.default: [(X,)],
    A.contiguous.default: [(X,)],
    A.copy.default: [(X, INTS), (X, ROW)],
    A._to_copy.default: [(X, {"dtype": torch.float32}), (X, {"dtype": torch.float16}),
        (INTS, {"dtype": torch.bfloat16}), (X * 9, {"dtype": torch.int32}), (X,)],
    A.to.dtype: [(X, torch.float32), (INTS, torch.float16)],
    A.clamp.default: [(X, -0.5, 0.3), (X, None, 0.3), (INTS, 0), (SPECIAL, -1, 1)],
    A.clip.default: [(X, -0.5, 0.3)],
    A.clamp.Tensor: [(X, Y, None), (X, Y.abs() * -1, Y.abs())],
    A.clamp_min.default: [(X, 0.1)],
    A.clamp_max.default: [(X, 0.1)],
    A.where.self: [(MASK, X, Y), (MASK, X, torch.tensor(0.0)), (MASK, INTS, NONZERO)],
    A.where.ScalarOther: [(MASK, X, 0.5)],
    A.where.ScalarSelf: [(MASK, 0.5, X)],
    A.where.Scalar: [(MASK, 1.0, 0.5)],
    A.masked_fill.Scalar: [(X, MASK, -float("inf")), (X, MASK, -3e4)],
    A.masked_fill.Tensor: [(X, MASK, torch.tensor(0.5))],
    A.lerp.Scalar: [(X, Y, 0.3)],
    A.lerp.Tensor: [(X, Y, Z)],
    A.addcmul.default: [(X, Y, Z, {"value": 0.3})],
    A.addcdiv.default: [(X, Y, POSITIVE, {"value": 0.3})],
    A.xlogy.Tensor: [(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.0, 2.0, 3.0]))],
}  # fmt: skip
for name in [
    "relu", "gelu", "silu", "mish", "softplus", "log_sigmoid", "elu", "selu", "celu", "leaky_relu",
    "hardtanh", "relu6", "hardsigmoid", "hardswish", "hardshrink", "softshrink", "glu",
]:  # fmt: skip
    SAMPLES[getattr(A, name).default] = [(X * 4,)]
SAMPLES |= {
    A.gelu.default: [(X * 4,), (X * 4, {"approximate": "tanh"})],
    A.softplus.default: [(X * 9,), (X * 9, 2, 5)],
    A.elu.default: [(X,), (X, 0.5, 2.0, 3.0)],
    A.leaky_relu.default: [(X, 0.2)],
    A._prelu_kernel.default: [(X, ROW.reshape(1, 4))],
    A.threshold.default: [(X, 0.1, 20.0)],
    A._softmax.default: [(X * 5, 1, False), (X, 0, False)],
    A.softmax.int: [(X * 5, -1), (X, 0, torch.float32)],
    A._safe_softmax.default: [
        (torch.where(MASK, X, -float("inf")), -1),
        (torch.full((2, 3), -float("inf")), -1),
    ],
    A._log_softmax.default: [(X * 5, 1, False)],
    A.log_softmax.int: [(X * 5, -1), (X, 0, torch.float32)],
}
DIMS = [(X, [1]), (IMAGE, [-1, 1], True), (X, [0], False, {"dtype": torch.float32})]
SAMPLES |= {
    A.sum.dim_IntList: [*DIMS, (INTS, [1]), (MASK, [0]), (X, [])],
    A.sum.default: [(X,), (MASK,)],
    A.mean.dim: DIMS,
    A.mean.default: [(X,), (X, {"dtype": torch.float32})],
    A.prod.dim_int: [(X, 1), (INTS, 0, True)],
    A.prod.default: [(X,)],
    A.amax.default: [(X, [1]), (X, [0], True), (X,)],
    A.amin.default: [(X, [1]), (X, [0], True), (X,)],
    A.max.default: [(X,), (INTS,)],
    A.min.default: [(X,)],
    A.max.dim: [(X, 1), (X, 0, True)],
    A.min.dim: [(X, 1), (X, 0, True)],
    A.argmax.default: [(X,), (X, 1), (X, 0, True)],
    A.argmin.default: [(X,), (X, 1)],
    A.any.dim: [(MASK, 1), (INTS, 0, True)],
    A.any.dims: [(MASK, [0, 1]), (MASK, [1])],
    A.any.default: [(MASK,)],
    A.all.dim: [(MASK, 1)],
    A.all.dims: [(MASK, [0, 1])],
    A.all.default: [(MASK,)],
    A.var.correction: [(X, [1]), (X, [0], {"correction": 0, "keepdim": True}), (X,)],
    A.var.dim: [(X, [1]), (X, [1], False, True)],
    A.std.correction: [(X, [1])],
    A.var_mean.correction: [(X, [1], {"correction": 0})],
    A.logsumexp.default: [(X * 5, [1]), (X, [0], True)],
    A.linalg_vector_norm.default: [(X, p, [1]) for p in (2, 1, 3.0, float("inf"), -float("inf"), 0)]
    + [(X,)],
    A.cumsum.default: [(X, 1), (INTS, 0)],
    A.cumprod.default: [(X, -1)],
    A.histc.default: [(X, 7), (X, 4, -1, 1), (INTS % 4 * 1.0, 4, 0, 3)],
    A.sort.default: [(X, 1), (X, 0, True)],
    A.sort.stable: [(INTS % 3, {"stable": True, "dim": 1, "descending": True})],
    A.argsort.default: [(X, 1)],
    A.topk.default: [(X, 2), (X, 2, 0, False)],
    A.view.default: [(X, [2, -1]), (X, [12])],
    A.reshape.default: [(X, [4, 3])],
    A._unsafe_view.default: [(X, [2, 6])],
    A._reshape_copy.default: [(X, [2, 6])],
    A.flatten.using_ints: [(IMAGE, 1), (IMAGE, 1, 2)],
    A.unflatten.int: [(X, 1, [2, -1])],
    A.permute.default: [(IMAGE, [0, 2, -1, 1])],
    A.transpose.int: [(IMAGE, 1, -1)],
    A.t.default: [(X,), (ROW,)],
    A.movedim.intlist: [(IMAGE, [1], [-1])],
    A.unsqueeze.default: [(X, 0), (X, -1)],
    A.squeeze.dims: [(X.reshape(1, 3, 1, 4), [0, 1])],
    A.squeeze.dim: [(X.reshape(1, 3, 1, 4), 2), (X, 0)],
    A.squeeze.default: [(X.reshape(1, 3, 1, 4),)],
    A.expand.default: [(ROW, [3, -1]), (X.reshape(3, 1, 4), [-1, 2, -1])],
    A.expand_as.default: [(ROW, X)],
    A.broadcast_to.default: [(ROW, [3, 4])],
    A.cat.default: [([X, Y],), ([X, INTS], 1), ([torch.zeros(0), ROW],)],
    A.stack.default: [([X, Y], 1), ([X, Y],)],
    A.split_with_sizes.default: [(X, [1, 3], 1)],
    A.split.Tensor: [(X, 3, 1)],
    A.chunk.default: [(X, 2, -1), (X, 2)],
    A.unbind.int: [(X,), (X, 1)],
    A.select.int: [(X, 1, -1)],
    A.slice.Tensor: [(X, 1, 1, 4, 2), (X, 0, -2), (X, 1, 0, 10**12), (X, 0, 2, 1)],
    A.narrow.default: [(X, 1, 1, 2)],
    A.slice_scatter.default: [(X, Y[:, :2], 1, 1, 3)],
    A.select_scatter.default: [(X, ROW, 0, 1)],
    A.diagonal.default: [(X,), (IMAGE, 1, 2, 3)],
    A.flip.default: [(X, [0, -1])],
    A.roll.default: [(X, [1, 2], [0, 1]), (X, [2])],
    A.repeat.default: [(X, [2, 1]), (ROW, [2, 3])],
    A.repeat_interleave.self_int: [(X, 2, 1), (X, 2)],
    A.tril.default: [(X,), (X, -1)],
    A.triu.default: [(X, 1)],
    A.constant_pad_nd.default: [(X, [1, 2], 0.5), (X, [0, 1, -1, 2])],
    A.reflection_pad1d.default: [(SIGNAL, [2, 1])],
    A.reflection_pad2d.default: [(IMAGE, [1, 2, 0, 1])],
    A.reflection_pad3d.default: [(VOLUME, [1, 0, 1, 0, 1, 1])],
    A.replication_pad1d.default: [(SIGNAL, [2, 1])],
    A.replication_pad2d.default: [(IMAGE, [1, 2, 0, 1])],
    A.replication_pad3d.default: [(VOLUME, [1, 0, 1, 0, 1, 1])],
    A.index.Tensor: [(X, [INDEX[:, 0], INDEX[:, 1]]), (X, [None, INDEX])],
    A.index_put.default: [(X, [INDEX[:, 0]], Y[:2]), (X, [torch.tensor([1, 1])], Y[:2], True),
        (X, [MASK], torch.tensor(2.0))],
    A.index_select.default: [(X, 1, torch.tensor([3, 0, 0]))],
    A.index_add.default: [(X, 0, torch.tensor([1, 1]), Y[:2])],
    A.gather.default: [(X, 0, INDEX), (X, 1, INDEX)],
    A.scatter.src: [(X, 0, INDEX[:1], Y)],
    A.scatter.value: [(X, 0, INDEX, 0.5)],
    A.scatter_add.default: [(X, 0, INDEX, Y)],
    A.scatter_reduce.two: [(X, 1, INDEX, Y, "amax"),
        (X, 0, INDEX, Y, "sum", {"include_self": False}), (X, 0, INDEX, Y, "mean"),
        (X, 0, INDEX, Y, "prod")],
    A.embedding.default: [(X, INDEX), (X, INDEX, 0)],
    A.masked_scatter.default: [(X, MASK, Y.reshape(-1))],
    A.full.default: [([2, 3], 0.1), ([2], 3), ([2], 1.0, {"dtype": torch.float16})],
    A.scalar_tensor.default: [(0.1,), (2, {"dtype": torch.bfloat16})],
    A.fill.Scalar: [(X, 0.1)],
    A.full_like.default: [(X, 0.1), (X, 2, {"dtype": torch.int32})],
    A.zeros_like.default: [(X,)],
    A.ones_like.default: [(INTS,)],
    A.empty_like.default: [],
    A.empty.memory_format: [],
    A.new_zeros.default: [(X, [2])],
    A.new_empty.default: [],
    A.new_ones.default: [(X, [2], {"dtype": torch.bool})],
    A.new_full.default: [(X, [2], 0.1)],
    A.mm.default: [(X, Y.T)],
    A.mv.default: [(X, ROW)],
    A.dot.default: [(ROW, X[0])],
    A.bmm.default: [(Q[0], K[0].transpose(1, 2))],
    A.matmul.default: [(Q, K[0].transpose(1, 2)), (Q, V[0, 0].T), (X, ROW), (ROW, X.T),
        (X[None], Y.T)],
    A.linear.default: [(Q, K[0, 0]), (X, Y, ROW[:3])],
    A.addmm.default: [(ROW[:3], X, Y.T), (X[:, :3], X, Y.T, {"beta": 0.5, "alpha": 2})],
    A.baddbmm.default: [(Q[0] @ K[0].mT, Q[0], K[0].mT, {"beta": 0.5})],
    A.pad.default: [(X, [1, 2], "constant", 3.0), (IMAGE, [1, 2, 0, 1], "reflect"),
        (IMAGE, [2, 1, 1, 0], "circular")],
    A.conv1d.default: [(SIGNAL, normal(3, 4, 3)),
        (SIGNAL[0], normal(4, 2, 3), ROW, [2], [1], [1], 2)],
    A.conv2d.default: [(IMAGE, normal(6, 4, 3, 3), None, [1, 2], [1, 0])],
    A.conv3d.default: [(normal(1, 2, 4, 5, 6), normal(3, 2, 2, 2, 2), normal(3))],
    A.to.device: [(X, "cpu", torch.float32), (torch.arange(4), "cpu", torch.int32)],
    A.type_as.default: [(X, normal(2)), (torch.arange(4), X)],
    A.numpy_T.default: [(X[0],)],
    A.mT.default: [(X,)],
    A.adjoint.default: [(X,)],
    A.convolution.default: [
        (IMAGE, normal(6, 2, 3, 2, seed=10), normal(6), [2, 1], [1, 0], [1, 2], False, [0, 0], 2),
        (IMAGE, normal(4, 3, 3, 2, seed=11), normal(6), [2, 1], [1, 0], [1, 2], True, [1, 0], 2),
        (SIGNAL, normal(4, 4, 3, seed=12), None, [1], [1], [1], False, [0], 1),
    ],
    A.scaled_dot_product_attention.default: [(Q, K, V), (Q, K, V, {"is_causal": True}),
        (Q, K, V, {"attn_mask": torch.ones(5, 5).tril().bool(), "scale": 0.3}),
        (Q, K, V, {"attn_mask": normal(2, 1, 5, 5)}),
        (Q, K[:, :2], V[:, :2], {"enable_gqa": True})],
    A._grouped_mm.default: [],  # torch has it in bfloat16 only: test_grouped_mm
    A.native_layer_norm.default: [(X, [4], *AFFINE, 1e-5), (X, [3, 4], None, None, 1e-5)],
    A.layer_norm.default: [(X * 9 + 5, [4], *AFFINE)],
    A.rms_norm.default: [(X, [4], ROW, 1e-6), (X, [4])],
    A.native_group_norm.default: [(IMAGE, *AFFINE, 2, 4, 42, 2, 1e-5)],
    A.group_norm.default: [(IMAGE, 2, *AFFINE)],
    A._native_batch_norm_legit_no_training.default: [(IMAGE, *AFFINE, ROW, POSITIVE[1], 0.1, 1e-5)],
    A._native_batch_norm_legit.no_stats: [(IMAGE, *AFFINE, True, 0.1, 1e-5)],
    A._native_batch_norm_legit_functional.default: [
        (IMAGE, *AFFINE, ROW, POSITIVE[1], True, 0.1, 1e-5)
    ],
    A.max_pool1d.default: [(SIGNAL, [3]), (SIGNAL, [3], [2], [1], [2], True)],
    A.max_pool2d.default: [(IMAGE, [2, 3]), (IMAGE, [3], [2], [1], [1], True)],
    A.max_pool3d.default: [(VOLUME, [2])],
    A.max_pool2d_with_indices.default: [(IMAGE, [3, 2], [2, 2], [1, 1]),
        (IMAGE, [3], [2], [1], [1], True)],
    A.avg_pool1d.default: [(SIGNAL, [3], [2], [1])],
    A.avg_pool2d.default: [(IMAGE, [2]), (IMAGE, [3], [2], [1], False, False),
        (IMAGE, [3], [2], [1], True), (IMAGE, [2], [2], [0], True, True, 3)],
    A.avg_pool3d.default: [(VOLUME, [2])],
    A.adaptive_avg_pool1d.default: [(SIGNAL, [4])],
    A._adaptive_avg_pool2d.default: [(IMAGE, [1, 1]), (IMAGE, [3, 4])],
    A.adaptive_avg_pool2d.default: [(IMAGE, [7, 2])],
    A._adaptive_avg_pool3d.default: [(VOLUME, [2, 3, 2])],
    A.upsample_nearest2d.vec: [(IMAGE, None, [2.0, 1.5]), (IMAGE, [5, 9], None)],
    A.upsample_bilinear2d.vec: [(IMAGE, None, False, [2.0, 2.0]), (IMAGE, [5, 9], True, None)],
    A.native_dropout.default: [(X, 0.5, False)],
    A.dropout.default: [(X, 0.5, False)],
}  # fmt: skip
# Rules that draw, check or change modes, which have tests of their own.
OTHER = {
    A.empty_strided.default, A.randperm.default, A._local_scalar_dense.default,
    A.sym_is_contiguous.default, A.sym_size.int, A.sym_stride.int, A.sym_numel.default,
    A.sym_storage_offset.default, A._embedding_bag.default, A._embedding_bag_forward_only.default,
    A.rand.default, A.randn.default,
    A.rand_like.default, A.randn_like.default, A.bernoulli.p, A.normal.float_float,
    A.normal.Tensor_float, A.normal.float_Tensor, A.normal.Tensor_Tensor, A.uniform.default,
    A.normal_functional.default, A.randint.low, A.randint.default, A.randint_like.low_dtype,
    A.randint_like.default,
    A._assert_tensor_metadata.default, A._assert_async.msg, A._assert_scalar.default,
    A._linalg_check_errors.default,
    A.sym_constrain_range_for_size.default, A.view.dtype, operator.getitem,
    A.bernoulli.Tensor, A.multinomial.default, A.poisson.default, A._standard_gamma.default,
    A._sample_dirichlet.default, A.binomial.default, A.rrelu_with_noise_functional.default,
    # in test_programs.py
    A.linalg_lu_factor_ex.default, A.linalg_lu_solve.default, A.linalg_eig.default,
    torch.ops.scalewise.gradient.default, A.nextafter.default, A.mm.dtype, A.bmm.dtype,
    # in test_reference.py: their results have signs, orders or factors that libraries choose
    A.linalg_qr.default, A._linalg_svd.default, A._linalg_eigh.default, A._linalg_solve_ex.default,
    A._linalg_det.default, A._linalg_slogdet.default, A.linalg_matrix_exp.default,
    # in test_control.py: their arguments are graphs
    torch.ops.higher_order.cond, torch.ops.higher_order.while_loop, torch.ops.higher_order.scan,
    torch.ops.higher_order.flex_attention, A.linalg_pinv.atol_rtol_float,
    A.linalg_pinv.atol_rtol_tensor,
    torch.ops.scalewise.cotangent.default, torch.ops.scalewise.with_backward.default,
}  # fmt: skip
