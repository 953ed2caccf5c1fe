"""The shape of the code: which way imports run, no ladders of model types, sizes, entry points."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelopt_lite.models import get_specs

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "modelopt_lite"

# A module imports from later lines, or from its own package; nothing else of ours.
LAYERS = (
    ("__main__",),
    ("cli",),
    ("cli_audit", "cli_eval", "cli_hub", "cli_specs"),
    ("cli_show",),
    ("cli_options", "plan_view"),
    ("report_view", "harness"),
    ("harness_model",),
    ("api",),
    ("in_memory", "preview", "checking", "hub"),
    ("record",),
    ("auto",),
    ("request", "fidelity"),
    ("run", "evaluate"),
    ("pipeline", "data_free"),
    ("ranks",),
    ("budgets", "finishing", "offloading", "resume", "rounding"),
    ("predict",),
    ("rereads", "searching"),
    ("sharding",),
    ("job",),
    ("export", "verify"),
    ("tensor_units",),
    ("pages",),
    ("plan",),
    ("doctor",),
    ("apply", "cache_scales", "parts", "readers"),
    ("select", "build"),
    ("naming",),
    ("structure", "sanity"),
    ("calibrate",),
    ("recipes",),
    ("parallel",),
    ("offload",),
    ("dense_experts", "output", "predictions"),
    ("checkpoint",),
    ("dialects",),
    ("formats",),
    ("models",),
    ("device", "timeline"),
    ("progress", "report"),
    ("locks", "paths"),
    ("errors", "jsons", "process", "words", "yamls"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
PARTS = {name for names in LAYERS for name in names}


def source_files() -> list[Path]:
    """Every file of the package; its links to ``models`` and ``offload`` are followed."""
    folders = [PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir())]
    folders += [ROOT / "models", *(p for p in (ROOT / "models").rglob("*") if p.is_dir())]
    folders += [ROOT / "offload"]
    files = {path.resolve() for folder in folders for path in folder.glob("*.py")}
    return sorted(path for path in files if "__pycache__" not in path.parts)


FILES = source_files()
IDS = [str(path.relative_to(ROOT)) for path in FILES]
every_file = pytest.mark.parametrize("path", FILES, ids=IDS)


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def dotted(path: Path) -> str:
    """Name of a file's module below ``modelopt_lite``."""
    base = PACKAGE if path.is_relative_to(PACKAGE) else ROOT
    parts = list(path.relative_to(base).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield every imported module, also those imported inside of functions, and its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: write imports out, without dots"
            assert node.module is not None
            yield node.module, node.lineno
            if node.module == "modelopt_lite":
                yield from ((f"modelopt_lite.{a.name}", node.lineno) for a in node.names)


def test_every_module_has_its_layer() -> None:
    present = {dotted(path).partition(".")[0] for path in FILES} - {""}
    assert present == PARTS


@every_file
def test_imports_run_one_way(path: Path) -> None:
    name = dotted(path)
    part = name.partition(".")[0]
    wrong = []
    for module, line in imports_of(tree_of(path)):
        if not module.startswith("modelopt_lite.") or not part:
            continue  # the root offers the public names, each when it is asked for
        target = module.split(".")[1]
        if target == "__version__" or target == part:
            continue
        if LEVEL[target] <= LEVEL[part]:
            wrong.append(f"line {line}: {name} imports {module}")
    assert not wrong


@every_file
def test_only_the_links_names_are_used(path: Path) -> None:
    tops = {module.partition(".")[0] for module, _ in imports_of(tree_of(path))}
    assert not tops & {"models", "offload"}


@pytest.mark.parametrize("path", [p for p in FILES if dotted(p).startswith("models")], ids=dotted)
def test_models_import_the_standard_library_and_themselves_alone(path: Path) -> None:
    for module, line in imports_of(tree_of(path)):
        own = module == "modelopt_lite.models" or module.startswith("modelopt_lite.models.")
        top = module.partition(".")[0]
        assert own or top in sys.stdlib_module_names, f"line {line}: {module}"


def test_torch_distributed_stays_in_its_place() -> None:
    for path in FILES:
        for module, _ in imports_of(tree_of(path)):
            if module.startswith("torch.distributed"):
                assert dotted(path).startswith("parallel")


# --- data, not ladders


def mentions_model_type(node: ast.AST) -> bool:
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id == "model_type":
            return True
        if isinstance(part, ast.Attribute) and part.attr == "model_type":
            return True
        if isinstance(part, ast.Constant) and part.value == "model_type":
            return True
    return False


def text_in(node: ast.AST) -> bool:
    return any(
        isinstance(part, ast.Constant)
        and isinstance(part.value, str)
        and part.value != "model_type"
        for part in ast.walk(node)
    )


def ladders(tree: ast.Module) -> Iterator[int]:
    """Yield the lines that compare a model type with a text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(map(mentions_model_type, sides)) and any(map(text_in, sides)):
                yield node.lineno
        elif isinstance(node, ast.Match) and mentions_model_type(node.subject):
            yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            prefix = node.func.attr in ("startswith", "endswith", "removeprefix")
            if prefix and mentions_model_type(node.func.value):
                yield node.lineno


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("if model_type == 'llama': pass", 1),
        ("if config.model_type in ('a', 'b'): pass", 1),
        ("if config['model_type'] != 'a': pass", 1),
        ("if 'a' in config.get('model_type'): pass", 1),
        ("match model_type:\n    case 'a': pass", 1),
        ("if model_type.startswith('qwen'): pass", 1),
        ("if model_type in KNOWN or model_type == other: pass", 0),
        ("if config.get('model_type') is None: pass", 0),
    ],
)
def test_what_a_ladder_is(code: str, found: int) -> None:
    assert len(list(ladders(ast.parse(code)))) == found


@every_file
def test_facts_of_architectures_are_in_models(path: Path) -> None:
    if dotted(path).startswith("models"):
        return
    tree = tree_of(path)
    assert not list(ladders(tree))
    types = {spec.model_type for spec in get_specs()}
    named = [
        f"line {node.lineno}: {node.value!r}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in types
    ]
    assert not named


# --- sizes


@every_file
def test_files_have_at_most_400_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body behind its docstring: contracts may be long, code may not."""
    first = function.body[0]
    text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    start = (first.end_lineno or 0) + 1 if text else first.lineno
    return (function.end_lineno or 0) - start + 1


@every_file
def test_functions_have_at_most_60_lines(path: Path) -> None:
    long = {
        node.name: body_lines(node)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and body_lines(node) > 60
    }
    assert not long


# --- from a checkout


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", ["models", "offload"])
def test_the_folders_own_names_are_refused(name: str) -> None:
    made = python(f"import {name}")
    assert made.returncode
    assert "ImportError: " in made.stderr
    assert f"import modelopt_lite.{name}" in made.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["models", "offload"])
def test_links_are_links(name: str) -> None:
    assert (PACKAGE / name).resolve() == ROOT / name
    assert (PACKAGE / name).readlink() == Path("..") / name


def test_models_need_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, modelopt_lite.models as m; assert len(m.get_specs()) > 10; "
        "print({'torch', 'transformers', 'numpy', 'accelerate'} & set(sys.modules))"
    )
    made = python(code)
    assert made.stdout == "set()\n", made.stderr
