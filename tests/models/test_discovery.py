"""How model packages are found: beside the registry, by entry point, in folders of the user."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modelopt_lite.models import ModelSpec, discovery, get_specs, register, registry

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start from an empty registry, restored afterwards."""
    monkeypatch.setattr(registry, "_SPECS", {})
    monkeypatch.setattr(registry, "_PLACES", {})
    monkeypatch.setattr(registry, "_OWN", {})


def python(
    code: str, cwd: Path = REPOSITORY, **environment: str
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**env, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def write_package(folder: Path, model_type: str, registered: str | None = None) -> Path:
    package = folder / model_type
    package.mkdir(parents=True)
    specs = package / "specs.py"
    specs.write_text(
        "from modelopt_lite.models import ModelSpec, register\n"
        f"register(ModelSpec(model_type={registered or model_type!r}))\n"
    )
    return specs


LIST = "from modelopt_lite.models import get_specs; print(*[s.model_type for s in get_specs()])"


def test_every_folder_is_registered_always_in_the_same_order() -> None:
    folders = sorted(file.parent.name for file in (REPOSITORY / "models").glob("*/specs.py"))
    assert len(folders) >= 16
    asked = "from modelopt_lite.models import get_spec; assert get_spec('zaya'); "
    for before in ("", asked):  # ours are imported when asked for
        result = python(before + LIST, MODELOPT_LITE_MODELS_PATH="")
        assert result.stdout.split() == folders, result.stderr
    for folder in folders:
        assert (REPOSITORY / "models" / folder / "__init__.py").is_file(), "else no wheel has it"


def test_importing_is_quick_and_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, time; start = time.process_time(); import modelopt_lite.models;"
        "print(time.process_time() - start, sorted({'torch', 'transformers', 'numpy'} & set("
        "sys.modules)))"
    )
    python(code)  # a first run warms the file cache
    results = []  # seconds of CPU time: the machine may be busy with other tests
    for _ in range(5):
        seconds, heavy = python(code, PYTHONDONTWRITEBYTECODE="").stdout.split(maxsplit=1)
        assert heavy.strip() == "[]"
        results.append(float(seconds))
    assert min(results) < 0.15


def test_asking_for_one_imports_no_other() -> None:
    code = (
        "import sys; from modelopt_lite.models import get_spec; spec = get_spec('llama');"
        "assert get_spec('llama') is spec and get_spec('nothing') is None;"
        "print(*[name for name in sys.modules if name.endswith('.specs')])"
    )
    assert python(code, MODELOPT_LITE_MODELS_PATH="").stdout.split() == [
        "modelopt_lite.models.specs",
        "modelopt_lite.models.llama.specs",
    ]


def test_registering_one_of_ours_again_names_both_places() -> None:
    """Before it was imported, and after."""
    code = "{}from modelopt_lite.models import *\nregister(ModelSpec(model_type='llama'))"
    for before in ("", "from modelopt_lite.models import get_spec; get_spec('llama')\n"):
        message = python(code.format(before), MODELOPT_LITE_MODELS_PATH="").stderr
        assert "model_type 'llama' is registered twice" in message
        assert str(Path("models", "llama", "specs.py")) in message
        assert "<string>:" in message


def test_the_bare_name_is_refused() -> None:
    result = python("import models")
    assert result.returncode
    assert "import modelopt_lite.models instead" in result.stderr


def test_folders_of_the_environment(tmp_path: Path) -> None:
    write_package(tmp_path / "one", "my_model")
    specs = write_package(tmp_path / "two", "your_model")
    (specs.parent / "helper.py").write_text("X = 1\n")
    specs.write_text(specs.read_text() + "from . import helper\n")  # imports like ours do
    path = os.pathsep.join([str(tmp_path / "one"), "", str(tmp_path / "two")])
    result = python(LIST, MODELOPT_LITE_MODELS_PATH=path)
    assert result.stdout.split()[-2:] == ["my_model", "your_model"], result.stderr


def test_a_collision_of_folders_names_both_files(tmp_path: Path) -> None:
    specs = write_package(tmp_path, "llama")
    result = python(LIST, MODELOPT_LITE_MODELS_PATH=str(tmp_path))
    assert result.returncode
    message = result.stderr.splitlines()[-1]
    assert str(specs) in message
    assert str(Path("models", "llama", "specs.py")) in message.replace(str(specs), "")


def test_a_folder_that_holds_no_model_is_an_error(tmp_path: Path) -> None:
    specs = write_package(tmp_path, "my_model")
    result = python(LIST, MODELOPT_LITE_MODELS_PATH=str(specs.parent))  # one level too deep
    assert "holds no <model_type>/specs.py" in result.stderr


def test_a_package_must_register_its_own_name(tmp_path: Path) -> None:
    specs = write_package(tmp_path, "my_model", registered="other")
    result = python(LIST, MODELOPT_LITE_MODELS_PATH=str(tmp_path))
    assert f"{specs} registers no spec for 'my_model'" in result.stderr


SPEC = "from modelopt_lite.models import *\nregister(ModelSpec(model_type='my_model', {}))\n"
MOE = "moe_spec=MoESpec(block_names=('A',), {})"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (SPEC.format("moe_specs=None"), "line 2: TypeError: ModelSpec.__init__() got an"),
        (SPEC.format("moe_spec=PTQSpec()"), "line 2: TypeError: ModelSpec.moe_spec must be "),
        (SPEC.format("modeling_source='hub'"), "ModelSpec.modeling_source must be "),
        (SPEC.format(MOE.format("gate_up_pair=('a', 'b', 'c')")), "MoESpec.gate_up_pair must be "),
        (SPEC.format(MOE.format("expert_linear_names=(1,)")), "expert_linear_names must be tuple["),
        (SPEC.format(MOE.format("fused_expert_names='no'")), "must be bool, got 'no'"),
        ("import nowhere_to_be_found", "line 1: ModuleNotFoundError: No module named"),
        ("\n\nraise RuntimeError('two\\nlines')", "line 3: RuntimeError: two lines"),
        ("def broken(:", "line 1: SyntaxError: "),
    ],
)
def test_what_a_users_specs_raise_is_an_error_of_ours(tmp_path: Path, code: str, says: str) -> None:
    """In one line, with the file, from every command and every public name."""
    specs = write_package(tmp_path, "my_model")
    specs.write_text(code)
    refused_in_one_line(tmp_path, f"{specs} cannot be loaded: ", says, "; correct it")


def test_a_path_that_is_no_folder_is_an_error_of_ours(tmp_path: Path) -> None:
    refused_in_one_line(tmp_path / "absent", "MODELOPT_LITE_MODELS_PATH names", "is no folder")


def refused_in_one_line(path: Path, *says: str) -> None:
    run = "import sys; sys.argv[1:] = ['specs', 'list']; from modelopt_lite.cli import main; main()"
    result = python(run, MODELOPT_LITE_MODELS_PATH=str(path))
    assert result.returncode == 1
    assert result.stderr.startswith("error [MOL200]: ")
    assert result.stderr.count("\n") == 1
    for text in says:
        assert text in result.stderr


def test_public_names_raise_it_too(tmp_path: Path) -> None:
    code = (
        "import modelopt_lite\n"
        "from modelopt_lite.errors import SpecError\n"
        "try: modelopt_lite.audit\n"
        "except SpecError as error: print(error)\n"
    )
    result = python(code, MODELOPT_LITE_MODELS_PATH=str(tmp_path / "absent"))
    assert "is no folder" in result.stdout, result.stderr


class FakeEntry:
    """An entry point whose module does ``load``."""

    value = "their_package.specs"

    def __init__(self, name: str, load: Any) -> None:
        self.name = name
        self.load = load


def entry_points(monkeypatch: pytest.MonkeyPatch, *entries: FakeEntry) -> None:
    def fake(*, group: str) -> tuple[FakeEntry, ...]:
        assert group == "modelopt_lite.models"
        return entries

    monkeypatch.setattr(importlib.metadata, "entry_points", fake)


@pytest.mark.usefixtures("empty")
def test_entry_points(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MODELOPT_LITE_MODELS_PATH", raising=False)
    entries = [
        FakeEntry(name, lambda name=name: register(ModelSpec(model_type=name))) for name in "zy"
    ]
    entry_points(monkeypatch, *entries)
    discovery.import_all("nothing_here", [str(tmp_path)])
    assert [spec.model_type for spec in get_specs()] == ["y", "z"]


@pytest.mark.usefixtures("empty")
def test_an_entry_point_that_collides_names_both_places(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    register(ModelSpec(model_type="y"))
    entry_points(monkeypatch, FakeEntry("y", lambda: register(ModelSpec(model_type="y"))))
    with pytest.raises(ImportError, match="registered twice") as caught:
        discovery.import_all("nothing_here", [str(tmp_path)])
    assert str(caught.value).count(f"{__file__}:") == 2
    assert "entry point 'y' = 'their_package.specs'" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.usefixtures("empty")
def test_an_entry_point_that_registers_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entry_points(monkeypatch, FakeEntry("y", lambda: None))
    with pytest.raises(ImportError, match="registers no spec for 'y'"):
        discovery.import_all("nothing_here", [str(tmp_path)])
