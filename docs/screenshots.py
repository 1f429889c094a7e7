"""Makes the pages that scalewise writes, and takes pictures of them for docs/screenshots.md.

    make screenshots  # the home page and a notebook are those of the site that it builds

Each page is opened in Chromium at 1280 and at 390 pixels, light and dark. The script exits with 1
if a page is wider than its window or if the browser reports an error, such as a refused script.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from markdown_it import MarkdownIt
from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from rich.console import Console

import scalewise as sw
from scalewise.cli._compare import compare
from scalewise.cli._methods import DEMO, METHODS
from scalewise.cli._program import load_program

HERE = Path(__file__).parent
PICTURES = HERE / "screenshots"
SITE = HERE.parent / "site"
WIDTHS = {1280: 800, 390: 800}  # of the window, and its height
# A README as GitHub shows it, in the colours of the window.
README_STYLE = """<meta charset="utf-8"><style>
:root { color-scheme: light dark; font: 16px/1.5 "Noto Sans", Helvetica, Arial, sans-serif }
body { max-width: 830px; margin: auto; padding: 32px; overflow-wrap: anywhere }
img { max-width: 100% }
pre { background: #8882; padding: 16px; overflow: auto; font-size: 85%; border-radius: 6px }
table { border-collapse: collapse; display: block; overflow: auto }
td, th { border: 1px solid #8884; padding: 6px 13px }
</style>"""
KEPT = {(1280, "light"), (390, "dark")}  # in the repository; the others are looked at alone


def layer_norm(x: jax.Array) -> jax.Array:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(x * x, axis=-1, keepdims=True) - mean * mean
    return (x - mean) / jnp.sqrt(variance + 1e-6)


def loss_of(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    hidden = jax.nn.gelu(layer_norm(x @ params["up"]) @ params["down"])
    return jnp.mean(jnp.square(hidden - x))


def train_step(params: dict[str, jax.Array], x: jax.Array):
    loss, gradients = jax.value_and_grad(loss_of)(params, x)
    return jax.tree.map(lambda p, g: p - 1e-2 * g, params, gradients), loss


def arguments() -> tuple[dict[str, jax.Array], jax.Array]:
    a, b, c = jax.random.split(jax.random.key(0), 3)
    params = {"up": jax.random.normal(a, (64, 256)), "down": jax.random.normal(b, (256, 64)) / 16}
    return params, 32 * jax.random.normal(c, (128, 64))


def pages(folder: Path) -> Iterator[Path]:
    """Writes the pages, one by one."""
    names = ("report", "comparison", "recordings", "checkpoints", "plan")
    report, comparison, recordings, checkpoints, plan = (folder / f"{n}.html" for n in names)
    sw.audit(train_step, "fp16")(*arguments()).save(report)
    yield report
    quiet = Console(file=io.StringIO())
    methods = [METHODS[name] for name in DEMO]
    compare(load_program("mlp"), methods, b"", 100, console=quiet).save(comparison)
    yield comparison
    recorded = sw.auditing.record(loss_of)
    params, x = arguments()
    sw.auditing.compare(recorded(params, x), recorded(params, 1.001 * x)).save(recordings)
    yield recordings
    wide, narrow = folder / "wide.safetensors", folder / "narrow.safetensors"
    sw.scaled.save_safetensors(wide, {f"{name}.weight": p for name, p in params.items()})
    sw.checkpoints.cast(wide, "nvfp4", out=narrow, layout="modelopt").save(checkpoints)
    yield checkpoints
    sw.plan(loss_of, 6.5)(params, x).save(plan)
    yield plan
    readme = folder / "readme.html"
    text = MarkdownIt().enable("table").render((HERE.parent / "README.md").read_text())
    readme.write_text(f'<base href="{HERE.parent.as_uri()}/">{README_STYLE}{text}')
    yield readme
    yield HERE / "explore.html"
    yield SITE / "index.html"
    yield SITE / "notebooks" / "train_nnx.html"


def problems(
    browser: Browser, path: Path, width: int, scheme: Literal["light", "dark"]
) -> list[str]:
    """Opens a page and saves its picture, if it is kept; returns what is wrong with the page."""
    page = browser.new_page(viewport={"width": width, "height": WIDTHS[width]}, color_scheme=scheme)
    found: list[str] = []
    page.on("console", lambda m: found.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: found.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_timeout(300)  # scripts draw after the page is there
    if (width, scheme) in KEPT:
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        small = picture.quantize(64, dither=Image.Dither.NONE)
        small.save(PICTURES / f"{path.stem}-{width}-{scheme}.png", optimize=True)
    wide = page.evaluate("document.documentElement.scrollWidth")
    page.close()
    if wide > width:
        found.append(f"it is {wide} pixels wide")
    return [f"{path.name} at {width} pixels, {scheme}: {what}" for what in found]


def main() -> int:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        # Playwright's own Chromium if the system has none: playwright install chromium
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("google-chrome"),
            args=["--no-sandbox"],
        )
        wrong = [
            problem
            for path in pages(Path(folder))
            for width in WIDTHS
            for scheme in ("light", "dark")
            for problem in problems(browser, path, width, scheme)
        ]
        browser.close()
    print("\n".join(wrong) or f"wrote {len(list(PICTURES.glob('*.png')))} pictures to {PICTURES}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
