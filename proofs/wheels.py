"""Builds scalewise, installs it into clean environments, and uses it as a stranger would.

    python -m proofs.wheels [--pythons 3.11 3.12 3.13] [--torch]

Builds the source distribution and from it the wheel, with ``build``, and asks ``twine`` whether an
index accepts them and shows their description, whose links must all be absolute. Then, for each
Python: a new environment gets the wheel from outside the checkout, the README's Python runs, the
command lists the formats and trains an example for two steps. In the last environment ``pyright
--strict`` reads ``proofs/typed_program.py``. ``--torch`` installs the extra ``torch`` too and
audits a layer. Needs a package index.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
# jnp.ones and other functions of JAX have arguments of unknown type
STRICT = '{"typeCheckingMode": "strict", "reportUnknownMemberType": "none"}'
AUDIT_A_LAYER = """
import scalewise.torch as st, torch
report = st.audit(torch.nn.Linear(8, 8), (torch.ones(2, 8),), low="fp16")
assert report.error < 1e-2
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Returns a command's output; raises with what it printed if it fails."""
    done = subprocess.run([str(x) for x in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def environment(python: str, folder: Path, *packages: str | Path) -> Path:
    """Returns the scripts' folder of a new virtual environment with these packages."""
    run(python, "-m", "venv", folder, cwd=folder.parent)
    run(folder / "bin/python", "-m", "pip", "install", "--quiet", *packages, cwd=folder.parent)
    return folder / "bin"


def interpreter(version: str) -> str | None:
    """Returns a Python of a version that starts: the path's, or pyenv's."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"))
    found = [shutil.which(f"python{version}"), *map(str, pyenv)]
    runs = [
        p for p in found if p and not subprocess.run([p, "-c", ""], capture_output=True).returncode
    ]
    return runs[0] if runs else None


def relative_links(wheel: Path) -> list[str]:
    """Returns the links of a wheel's description that an index couldn't follow."""
    with ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    return re.findall(r"\]\((?!https?://|#)([^)]*)\)", text)


def built(folder: Path) -> Path:
    """Returns the wheel, built from the source distribution, after ``twine check``."""
    tools = environment(sys.executable, folder / "tools", "build", "twine")
    run(tools / "python", "-m", "build", "--outdir", folder / "dist", ROOT, cwd=folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    (source,) = (folder / "dist").glob("*.tar.gz")
    run(tools / "twine", "check", "--strict", wheel, source, cwd=folder)
    if links := relative_links(wheel):
        raise SystemExit(f"relative links in the description: {links}")
    return wheel


def use(scripts: Path, folder: Path) -> None:
    """Runs the README's Python and two commands outside the checkout."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    program = folder / "readme.py"
    program.write_text("\n".join(blocks[:4]))
    run(scripts / "python", program, cwd=folder)
    run(scripts / "scalewise", "formats", cwd=folder)
    run(
        scripts / "scalewise",
        "compare",
        "gpt",
        "--method",
        "float32",
        "--steps",
        "2",
        "--out",
        scripts / "runs",
        cwd=folder,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pythons", nargs="+", default=PYTHONS)
    parser.add_argument("--torch", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = built(folder)
        print(f"built {wheel.name}, {wheel.stat().st_size / 2**20:.1f} MiB")
        scripts = None
        for version in given.pythons:
            python = interpreter(version)
            if python is None:
                print(f"Python {version}: not at hand, skipped")
                continue
            scripts = environment(python, folder / version, f"{wheel}[train]")
            use(scripts, folder)
            print(f"Python {version}: installs, runs the README's code and trains an example")
        if scripts is None:
            raise SystemExit("no Python of these versions is at hand")
        run(scripts / "python", "-m", "pip", "install", "-q", "pyright[nodejs]", cwd=folder)
        shutil.copy(ROOT / "proofs/typed_program.py", folder)
        (folder / "pyrightconfig.json").write_text(STRICT)
        run(scripts / "pyright", "--pythonpath", scripts / "python", "typed_program.py", cwd=folder)
        print("pyright --strict accepts proofs/typed_program.py")
        if given.torch:
            run(scripts / "python", "-m", "pip", "install", "-q", f"{wheel}[torch]", cwd=folder)
            run(scripts / "python", "-c", AUDIT_A_LAYER, cwd=folder)
            print("the extra torch installs, and a layer is audited")


if __name__ == "__main__":
    main()
