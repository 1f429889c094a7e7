"""What benchmarks/hlo.py reads from HLO text, on short modules written for the purpose."""

import pytest

from benchmarks import hlo

DEVICE = hlo.Device(1e9, {8: 4e9, 16: 2e9, 32: 1e9})

STEP = """\
HloModule jit_step, is_scheduled=true

%fused_gelu (param_0: f32[4,8]) -> bf16[4,8] {
  %param_0 = f32[4,8]{1,0} parameter(0)
  ROOT %convert.1 = bf16[4,8]{1,0} convert(%param_0)
}

%fused_dot (param_1: bf16[4,8], param_2: bf16[8,16]) -> f32[4,16] {
  %param_1 = bf16[4,8]{1,0} parameter(0)
  %param_2 = bf16[8,16]{1,0} parameter(1)
  ROOT %dot.1 = f32[4,16]{1,0} dot(%param_1, %param_2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[4,8], w: bf16[8,16]) -> f32[4,16] {
  %x = f32[4,8]{1,0} parameter(0), metadata={op_name="x"}
  %w = bf16[8,16]{1,0} parameter(1)
  %gelu = bf16[4,8]{1,0} fusion(%x), kind=kLoop, calls=%fused_gelu, metadata={op_name="f/g(x)"}
  %same = bf16[4,8]{1,0} bitcast(%gelu)
  ROOT %product = f32[4,16]{1,0} fusion(%same, %w), kind=kCustom, calls=%fused_dot
}
"""  # noqa: E501


def module(body, *computations):
    entry = "ENTRY %main (x: f32[]) -> f32[] {\n  " + "\n  ".join(body) + "\n}\n"
    return hlo.parse("\n".join([*computations, entry]))


def test_kernels_and_the_product_in_a_fusion():
    gelu, product = hlo.kernels(hlo.parse(STEP))
    assert (gelu.bytes, gelu.product) == (4 * 8 * (4 + 2), None)
    assert product.product == hlo.Product(("bf16", "bf16"), "f32", "dot", 2 * 4 * 16 * 8)
    assert product.bytes == 2 * (4 * 8 + 8 * 16) + 4 * 4 * 16


def test_bound_is_the_larger_of_bytes_and_operations():
    s = hlo.summary(hlo.parse(STEP), DEVICE)
    assert s.seconds_outside == pytest.approx(192 / 1e9)  # bytes
    assert s.seconds_products == pytest.approx(576 / 1e9)  # bytes again: 1024 operations take 512
    assert s.seconds == s.seconds_products + s.seconds_outside
    assert (s.kernels, s.bytes_outside) == (2, 192)
    slow = hlo.Device(1e12, DEVICE.peaks)
    assert hlo.summary(hlo.parse(STEP), slow).seconds_products == pytest.approx(1024 / 2e9)


def test_an_operand_under_two_names_is_read_once():
    found = module(
        [
            "%x = f32[4,8]{1,0} parameter(0)",
            "%n = s32[] constant(0)",
            "%a = (f32[4,8]{1,0}, s32[]) tuple(%x, %n)",
            "%b = (s32[], f32[4,8]{1,0}) tuple(%n, %x)",
            "%c = f32[4,8]{1,0} get-tuple-element(%a), index=0",
            "%d = f32[4,8]{1,0} get-tuple-element(%b), index=1",
            "%y = f32[8,4]{1,0} parameter(1)",
            "%e = f32[4,8]{1,0} bitcast(%y)",
            "ROOT %r = f32[4,8]{1,0} fusion(%c, %d, %e), kind=kLoop, calls=%add",
        ],
        "%add (p: f32[4,8], q: f32[4,8], r: f32[4,8]) -> f32[4,8] {",
        "}",
    )
    (kernel,) = hlo.kernels(found)
    assert len(kernel.reads) == 2
    assert kernel.bytes == 3 * 4 * 8 * 4


GEMM = (
    '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
    '"rhs_contracting_dimensions":["1"]}}}'
)


def test_a_librarys_product_without_its_workspace():
    text = (
        "%y = (bf16[4,16]{1,0}, /*index=1*/s8[1024]{0}) custom-call(%a, %b, %s), "
        f'custom_call_target="__cublas$lt$matmul$f8", backend_config={GEMM}'
    )
    [kernel] = hlo.kernels(
        module([
            "%a = f8e4m3fn[4,8]{1,0} parameter(0)", "%b = f8e5m2[16,8]{1,0} parameter(1)",
            "%s = f32[] constant(1)", text,
        ])
    )  # fmt: skip
    assert kernel.bytes == 4 * 8 + 16 * 8 + 4 + 2 * 4 * 16
    assert kernel.product.flops == 2 * 4 * 16 * 8
    assert str(kernel.product) == "f8e4m3fn x f8e5m2 -> bf16, cublas f8"
    assert kernel.product.bits == 8


def test_block_scaled_product():
    [kernel] = hlo.kernels(
        module([
            "%a = f8e4m3fn[1,64,128]{2,1,0} parameter(0)",
            "%b = f8e4m3fn[1,32,128]{2,1,0} parameter(1)",
            "%y = (bf16[1,64,32]{2,1,0}, s8[0]{0}) custom-call(%a, %b), "
            'custom_call_target="__cudnn$blockScaledDot"',
        ])
    )  # fmt: skip
    assert kernel.product.flops == 2 * 64 * 32 * 128


@pytest.mark.parametrize(("scales", "bits"), [("", 8), (", %t, %t", 16)])
def test_a_grouped_product_of_scalewises_kernel_expands_no_group(scales, bits):
    text = (
        f"%y = bf16[16,32]{{1,0}} custom-call(%f, %n, %a, %b{scales}), "
        'custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "grouped_rows"}'
    )
    [kernel] = hlo.kernels(
        module([
            "%f = f32[2]{0} parameter(0)", "%n = s32[5]{0} parameter(1)",
            "%a = f8e4m3fn[16,64]{1,0} parameter(2)", "%b = f8e4m3fn[4,32,64]{2,1,0} parameter(3)",
            "%t = bf16[16,2]{1,0} parameter(4)", text,
        ])
    )  # fmt: skip
    assert (kernel.product.flops, kernel.product.bits) == (2 * 16 * 64 * 32, bits)


def test_convolution_and_cycles_of_a_tpu():
    body = (
        "%a = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)",
        "%b = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(1)",
        "%y = bf16[4,16]{1,0:T(8,128)(2,1)} convolution(%a, %b), dim_labels=bf_io->bf, "
        'backend_config={"window_config":{"estimated_cycles":"700"}}',
    )
    s = hlo.summary(module(body), DEVICE)
    [product] = s.products
    assert (product.flops, s.cycles) == (2 * 4 * 16 * 8, 700)


def test_loops_count_by_their_trips_and_branches_by_the_costliest():
    small = "%small (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n" \
            "  ROOT %copy.1 = f32[8]{0} copy(%p)\n}"  # fmt: skip
    large = small.replace("%small", "%large").replace("[8]", "[64]").replace(".1", ".2")
    large = large.replace("%p", "%q").replace("(p:", "(q:")
    body = (
        "%x = f32[64]{0} parameter(0)",
        "%w = f32[8]{0} while(%x), condition=%no, body=%small, "
        'backend_config={"known_trip_count":{"n":"5"}}',
        "%c = f32[64]{0} conditional(%x, %x), branch_computations={%small, %large}",
        "%d = f32[8]{0} call(%x), to_apply=%small",
    )
    found = [(k.name, k.count) for k in hlo.kernels(module(body, small, large))]
    assert found == [("copy.1", 5), ("copy.2", 1), ("copy.1", 1)]


def test_a_loop_of_a_tpu_counts_by_its_condition():
    own = "%own (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n" \
          "  ROOT %copy.1 = f32[8]{0} copy(%p)\n}"  # fmt: skip
    condition = (
        "%until (q: s32[]) -> pred[] {\n  %q = s32[] parameter(0)\n  %n = s32[] constant(7)\n"
        "  ROOT %lt = pred[] compare(%q, %n), direction=LT\n}"
    )
    body = (
        "%x = f32[8]{0} parameter(0)",
        "%w = f32[8]{0} while(%x), condition=%until, body=%own",
    )
    (kernel,) = hlo.kernels(module(body, own, condition))
    assert (kernel.name, kernel.count) == ("copy.1", 7)
    other = condition.replace("LT", "NE")
    assert [k.count for k in hlo.kernels(module(body, own, other))] == [1]


def test_cycles_that_xla_does_not_know_are_none():
    line = '%y = f32[4]{0} copy(%x), backend_config={"window_config":{"estimated_cycles":"N"}}'
    for cycles, counted in ((hlo.UNKNOWN * 2 - 1, 0), (12, 12)):
        body = "%x = f32[4]{0} parameter(0)", line.replace("N", str(cycles))
        assert hlo.summary(module(body), DEVICE).cycles == counted


@pytest.mark.parametrize(
    ("line", "sent"),
    [
        ("all-gather-start(%x), replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}", 3 * 128),
        ("reduce-scatter(%x), replica_groups=[1,8]<=[8], dimensions={0}", 7 / 8 * 128),
        ("all-reduce-start(%x), replica_groups={{0,1,2,3}}, to_apply=%add", 2 * 3 / 4 * 128),
        ("all-reduce(%x), replica_groups={{0},{1}}, to_apply=%add", 0),
        ("collective-permute(%x), source_target_pairs={{0,1},{1,0}}", 128),
    ],
)
def test_bytes_that_a_device_sends(line, sent):
    body = ["%x = bf16[64]{0} parameter(0)", f"%y = bf16[64]{{0}} {line}"]
    s = hlo.summary(module(body), DEVICE)
    assert s.sent.total() == sent
    assert s.kernels == 0
    assert set(s.collectives.values()) == {128}


def test_sending_takes_the_rate_of_the_node_or_of_the_network():
    body = (
        "%x = bf16[64]{0} parameter(0)",
        "%y = bf16[64]{0} all-gather(%x), replica_groups=[1,8]<=[8], dimensions={0}",
        "%z = (bf16[64]{0}, bf16[64]{0}) all-reduce(%x, %x), replica_groups=[1,16]<=[16]",
    )
    device = hlo.Device(1e9, DEVICE.peaks, link=7.0, network=2.0)
    s = hlo.summary(module(body), device)
    assert s.seconds_sending == 7 * 128 / 7 + 2 * 2 * 15 / 16 * 128 / 2
    assert s.seconds_overlapped == s.seconds_sending > s.seconds == 0
    assert s.launches == {"all-gather": 1, "all-reduce": 1}
    assert hlo.summary(module(body), DEVICE).seconds_sending == 0


@pytest.mark.parametrize(
    "start", ["async-start(%x), calls=%async", "call-start(%x), to_apply=%async"]
)
def test_asynchronous_calls_count_once(start):
    wrapped = "%async (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n" \
              "  ROOT %rs = f32[2]{0} reduce-scatter(%p), replica_groups=[1,4]<=[4]\n}"  # fmt: skip
    body = (
        "%x = f32[8]{0} parameter(0)",
        f"%s = ((f32[8]{{0}}), f32[2]{{0}}) {start}",
        "%d = f32[2]{0} async-done(%s)",
    )
    [collective] = hlo.collectives(module(body, wrapped))
    assert (collective.opcode, collective.bytes, collective.sent) == ("reduce-scatter", 32, 24)
    assert hlo.kernels(module(body, wrapped)) == []


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("pred", 8), ("s4", 4), ("f4e2m1fn", 4), ("f8e8m0fnu", 8), ("bf16", 16), ("c64", 64),
     ("token", 0)],
)  # fmt: skip
def test_bits(dtype, bits):
    assert hlo.bits_of(dtype) == bits


def test_unusable_input():
    with pytest.raises(ValueError, match="unknown HLO dtype 'x9'"):
        hlo.bits_of("x9")
    with pytest.raises(ValueError, match="ENTRY computation"):
        hlo.parse("HloModule empty")


SLICED = """HloModule m
%fused (param_0.1: f32[], param_1.2: bf16[16,8], param_2.3: s32[], param_3.4: bf16[16,8]) -> bf16[16,8] {
  %param_1.2 = bf16[16,8]{1,0} parameter(1)
  %param_0.1 = f32[] parameter(0)
  %param_2.3 = s32[] parameter(2)
  %param_3.4 = bf16[16,8]{1,0} parameter(3)
  %bitcast.1 = bf16[16,8]{1,0} bitcast(%param_1.2)
  %cut = bf16[1,8]{1,0} dynamic-slice(%bitcast.1, %param_2.3, %param_2.3), dynamic_slice_sizes={1,8}
  ROOT %put = bf16[16,8]{1,0} dynamic-update-slice(%param_3.4, %cut, %param_2.3, %param_2.3)
}
ENTRY %main (a: bf16[16,8], b: bf16[16,8], i: s32[], c: f32[]) -> bf16[16,8] {
  %a = bf16[16,8]{1,0} parameter(0)
  %b = bf16[16,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %c = f32[] parameter(3)
  ROOT %out = bf16[16,8]{1,0} fusion(%c, %a, %i, %b), kind=kLoop, calls=%fused
}
"""  # noqa: E501


def test_of_an_array_that_is_sliced_or_updated_in_place_only_the_slice_moves():
    (kernel,) = hlo.kernels(hlo.parse(SLICED))
    assert kernel.bytes == 4 + 16 + 4 + 16  # a scalar, a slice, an index; the slice written

    other = SLICED.replace(
        "ROOT %put = bf16", "%neg = bf16[16,8]{1,0} negate(%put)\n  ROOT %put = bf16"
    )
    (kernel,) = hlo.kernels(hlo.parse(other))
    assert kernel.bytes == 4 + 16 + 4 + 256 + 256


CUDNN = """HloModule m
ENTRY %main (a: bf16[4,8,8,16], w: bf16[3,3,16,32], g: bf16[4,8,8,32]) -> bf16[4,8,8,32] {
  %a = bf16[4,8,8,16]{3,2,1,0} parameter(0)
  %w = bf16[3,3,16,32]{3,2,1,0} parameter(1)
  %g = bf16[4,8,8,32]{3,2,1,0} parameter(2)
  ROOT %conv = (RESULT{3,2,1,0}, u8[0]{0}) custom-call(OPERANDS), window={size=3x3}, dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$KIND"
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("kind", "operands", "result"),
    [
        ("convForward", "%a, %w", "bf16[4,8,8,32]"),
        ("convBackwardInput", "%g, %w", "bf16[4,8,8,16]"),
        ("convBackwardFilter", "%a, %g", "bf16[3,3,16,32]"),
    ],
)
def test_the_three_products_of_a_convolution_have_as_many_operations(kind, operands, result):
    text = CUDNN.replace("KIND", kind).replace("OPERANDS", operands).replace("RESULT", result)
    (kernel,) = hlo.kernels(hlo.parse(text))
    assert kernel.product is not None
    assert kernel.product.flops == 2 * (4 * 8 * 8 * 32) * (3 * 3 * 16)


@pytest.mark.parametrize(("backward", "products"), [("", 2), ("Backward", 5)])
def test_attention_of_cudnn_multiplies_scores_of_all_pairs_of_tokens(backward, products):
    text = f"""HloModule m
ENTRY %main (q: bf16[2,2048,8,128], k: bf16[2,2048,2,128]) -> bf16[2,8,2048,128] {{
  %q = bf16[2,2048,8,128]{{3,2,1,0}} parameter(0)
  %k = bf16[2,2048,2,128]{{3,2,1,0}} parameter(1)
  ROOT %fmha = (bf16[2,8,2048,128]{{3,1,2,0}}, u8[0]{{0}}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmax{backward}", backend_config={{"cudnn_fmha_backend_config": {{"intermediate_tensor_shape": {{"dimensions": ["2", "8", "2048", "2048"]}}}}}}
}}
"""  # noqa: E501
    (kernel,) = hlo.kernels(hlo.parse(text))
    assert kernel.product is not None
    assert kernel.product.flops == products * 2 * (2 * 8 * 2048 * 2048) * 128
