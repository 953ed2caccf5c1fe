"""Use an installed wheel from another folder; ``nox -s wheel`` runs it, pytest does not.

python check_wheel.py CHECKOUT
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import modelopt_lite


def main(checkout: Path) -> None:
    """Compare what is installed with the checkout, and quantize the bundled model."""
    installed = Path(modelopt_lite.__file__).parent
    if checkout in installed.parents and "site-packages" not in installed.parts:
        sys.exit(f"{installed} is the checkout, not the wheel; run from another folder")
    _same("specs", _command("specs", "list"), _folders(checkout / "models"))
    presets = sorted(path.stem for path in (checkout / "modelopt_lite" / "recipes").glob("*.yaml"))
    _same("recipes", _command("recipes", "list"), presets)
    for pattern in (
        "models/**/*.py",
        "offload/**/*.py",
        "modelopt_lite/data/**/*",
        "modelopt_lite/py.typed",
    ):
        _same(pattern, _files(installed.parent, pattern), _files(checkout, pattern))
    model = installed / "data" / "tiny_qwen3_moe"
    with tempfile.TemporaryDirectory() as folder:
        options = ("--recipe", "fp8_per_channel_per_token", "--export-dir", f"{folder}/export")
        subprocess.run(["modelopt-lite", "quantize", str(model), *options], check=True)
        subprocess.run(["modelopt-lite", "verify", f"{folder}/export"], check=True)


def _command(*arguments: str) -> list[str]:
    command = ["modelopt-lite", *arguments, "--json"]
    names = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return [str(name) for name in names]


def _folders(models: Path) -> list[str]:
    return sorted(path.parent.name for path in models.glob("*/specs.py"))


def _files(root: Path, pattern: str) -> list[str]:
    """List files by their path in the package; a checkout has models and offload beside it."""
    if not (root / "models").is_dir():
        pattern = pattern if pattern.startswith("modelopt_lite") else f"modelopt_lite/{pattern}"
    found = [path for path in root.glob(pattern) if path.is_file()]
    names = (str(path.relative_to(root)).removeprefix("modelopt_lite/") for path in found)
    return sorted(name for name in names if "__pycache__" not in name)


def _same(what: str, got: list[str], wanted: list[str]) -> None:
    if got != wanted or not wanted:
        sys.exit(f"{what}: the wheel has {got}, the checkout {wanted}")
    sys.stdout.write(f"{what}: {len(got)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
