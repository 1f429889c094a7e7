"""The interactive page of formats: its catalogue, and in a browser its casts beside ours."""

import base64
import io
import math

import numpy as np
import pytest
from safetensors.numpy import save

from browsers import needs_a_browser, opened
from pages import page_script
from scalewise.formats import CATALOGUE, Format

PAGE = page_script("explore_page")
CUSTOM = [
    Format("e6m9", 6, 9),
    Format("e3m0", 3, 0, nan="none", infinities=False),
    Format("e5m3b", 5, 3, bias=20, subnormals=False, infinities=False, nan="negative_zero"),
]
FORMATS = [*(f for f in CATALOGUE.values() if f.bits <= PAGE.WIDEST), *CUSTOM]
MODES = (
    "nearest_even", "nearest_away", "toward_zero", "toward_positive", "toward_negative",
    "away_from_zero", "to_odd",
)  # fmt: skip
PROBE = """async asked => {
  const {Format, CATALOGUE, MODES, effect, load, parsed} = scalewise, found = {};
  const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));
  found.modes = Object.keys(MODES);
  found.codes = asked.formats.map(p => {
    const f = new Format(p);
    return asked.modes.map(mode => [false, true, "finite"].map(saturate =>
      asked.values.map(x => f.encode(x, mode, saturate))));
  });
  found.parsed = ["2^-9", "-2^3", "1e-3", "inf", "x", ""].map(parsed);
  found.tables = [];
  for (const [name, data] of asked.files) {
    await load(new File([bytes(data)], name));
    found.tables.push([document.getElementById("file-error").textContent,
      [...document.querySelectorAll("#tensors tbody tr")].map(r => [...r.cells].map(c => c.textContent))]);
  }
  const bits = document.getElementById("first-mantissa_bits");
  bits.value = 99;
  bits.dispatchEvent(new Event("input"));
  found.refused = document.getElementById("refused").textContent;
  return found;
}"""  # noqa: E501


def test_the_page_loads_nothing():
    assert "http" not in PAGE.FILE.read_text().replace("http://www.w3.org/2000/svg", "").replace(
        "http-equiv", ""
    )


def asked_numbers(f):
    """Numbers at and around those of a format, its limits and special values."""
    some = f.values() if f.bits <= 8 else f.decode(np.linspace(0, 2**f.bits - 1, 97).astype(int))
    some = some[np.isfinite(some)]
    edges = [float(x) for x in (f.max, f.smallest, f.smallest_normal)]
    edges += [x * y for x in edges for y in (0.25, 0.5, 0.75, 1.0625, 1.25, 2.0)]
    numbers = np.concatenate([some, (some[1:] + some[:-1]) / 2, some * 1.01, edges])
    return np.concatenate([numbers, -numbers, [0.0, -0.0, np.inf, -np.inf, np.nan]])


def file_of(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.slow
@needs_a_browser
def test_its_casts_and_files_in_a_browser():
    values = np.unique(np.concatenate([asked_numbers(f) for f in FORMATS if f.bits <= 8]))
    values = np.concatenate([values, asked_numbers(CATALOGUE["fp16"]), [-0.0]])
    weights = np.random.default_rng(0).normal(size=(40, 50)).astype(np.float32)
    weights[0, :3] = 1000, 1e-9, np.inf
    safe = base64.b64encode(save({"w": weights.astype(np.float16)})).decode()
    asked = {
        "formats": [_fields(f) for f in FORMATS],
        "modes": MODES,
        "values": values.tolist(),
        "files": [
            ["a.npy", file_of(weights)],
            ["b.safetensors", safe],
            ["c.npy", file_of(weights)[:400]],
            ["d.txt", base64.b64encode(b"no numbers").decode()],
        ],
    }
    with opened(PAGE.FILE.as_uri()) as page:
        found = page.evaluate(PROBE, asked)

    assert found["modes"] == list(MODES)
    assert found["parsed"] == [2**-9, -8, 1e-3, math.inf, None, None]
    for f, by_mode in zip(FORMATS, found["codes"], strict=True):
        for mode, by_saturation in zip(MODES, by_mode, strict=True):
            for saturate, codes in zip((False, True, "finite"), by_saturation, strict=True):
                expected = f.encode(values, rounding=mode, saturate=saturate)
                wrong = np.flatnonzero(np.array(codes) != expected)
                assert not wrong.size, (f.name, mode, saturate, values[wrong[:5]])
    assert found["refused"] == "No such format: mantissa bits are an integer from 0 to 23 here."

    (plain, halves, cut, foreign) = found["tables"]
    for (error, rows), array in ((plain, weights), (halves, weights.astype(np.float16))):
        assert error == ""
        ((_, name, count, _, scale, infinite, over, zero, _, sqnr),) = rows
        assert (name, int(count), int(infinite), scale) == ("e4m3fn", 2000, 1, "2^0")
        x = array[np.isfinite(array)].astype(np.float64)
        codes = CATALOGUE["e4m3fn"].encode(x)
        y = CATALOGUE["e4m3fn"].decode(codes)
        kept = np.isfinite(y)
        for shown, counted in ((over, ~kept), (zero, (y == 0) & (x != 0))):
            number, unit = shown.split()
            assert unit == "%"
            assert float(number) == pytest.approx(100 * np.mean(counted), rel=0.005)
        noise = np.sum((y - x)[kept] ** 2)
        assert float(sqnr) == pytest.approx(10 * math.log10(np.sum(x[kept] ** 2) / noise), abs=0.06)
    assert cut == ["c.npy can't be read: the file is shorter than its header says", []]
    assert foreign == ["d.txt can't be read: it is neither a .npy nor a .safetensors file", []]


def _fields(f):
    names = (
        "name exponent_bits mantissa_bits bias signed subnormals infinities nan negative_zero zero"
    )
    return {name: getattr(f, name) for name in names.split()}
