"""Export a small model of every registered type in several formats, audit included.

Each type's smallest model is saved with seeded weights in bfloat16 and exported, in a process of
its own. What transformers cannot build here, what a dialect has no form for, and what fails, is
named with the reason. Results are kept by release of transformers in docs/models.json and make the
table docs/models.md, so that runs in several environments, or of a few types at a time, make one
table. With ``--checkpoints``, small checkpoints are kept in that folder and those that are there
are taken: a release exports what an older one wrote, and docs/versions.md tells whether the bytes
are the same. Exits with 1 where an export failed. Run by ``nox -s tests_transformers``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import versions
from export_tables import EXPORTS, LATE, Result, keep, line, summary

HERE = Path(__file__).resolve().parent


def main() -> int:
    """Export the types asked for, keep the results, write the tables."""
    args = parser().parse_args()
    exports = [
        (d, r) for d in args.dialects for r in EXPORTS[d] if not args.recipes or r in args.recipes
    ]
    types = chosen([*args.types, *args.more_types])
    args.start = time.perf_counter()
    print(f"{len(types)} types, {args.jobs} at once")
    results: dict[str, Result] = {}
    prepare()
    with tempfile.TemporaryDirectory() as logs, ThreadPoolExecutor(args.jobs) as pool:
        waiting = {pool.submit(one, t, exports, args, Path(logs)): t for t in types}
        for done in as_completed(waiting):
            results[waiting[done]] = done.result()
            print(line(waiting[done], done.result()), flush=True)
    print(summary(results))
    print(f"{time.perf_counter() - args.start:.0f} s")
    if not args.no_docs:
        keep(results)
        if args.checkpoints:
            versions.record(results)
    return int(any(result.failed for result in results.values()))


def parser() -> argparse.ArgumentParser:
    """Return the reader of arguments."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("more_types", nargs="*", metavar="TYPE", help="model types; default all")
    made.add_argument("--types", nargs="+", default=[], metavar="TYPE", help="the same")
    made.add_argument("--dialects", nargs="+", default=list(EXPORTS), choices=list(EXPORTS))
    made.add_argument("--recipes", nargs="+", help="default: all of the table")
    made.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="types at once")
    made.add_argument("--timeout", type=float, default=600, help="seconds for a type")
    made.add_argument("--memory", type=float, default=4, help="GiB that a type may take")
    made.add_argument("--checkpoints", type=Path, help="folder of small checkpoints to share")
    made.add_argument("--minutes", type=float, default=1e9, help="begin no type after so many")
    made.add_argument("--no-docs", action="store_true", help="leave docs/ as it is")
    return made


def chosen(asked: Sequence[str]) -> list[str]:
    """Return the types to run, those with experts first; exit where one is not registered."""
    from modelopt_lite.models import get_specs

    specs = sorted(get_specs(), key=lambda spec: (spec.moe_spec is None, spec.model_type))
    known = [spec.model_type for spec in specs]
    if unknown := sorted(set(asked) - set(known)):
        sys.exit(f"not registered: {', '.join(unknown)}; 'modelopt-lite specs list' lists what is")
    return [name for name in known if not asked or name in asked]


# What an export imports, sooner or later: three of the four seconds that a type took.
PRELOADED = ("exporting", "scipy.optimize", "transformers.modeling_layers")


def prepare() -> None:
    """Let a server import what every type needs, once; each one's process is forked from it."""
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    multiprocessing.set_forkserver_preload(list(PRELOADED))


def one(
    model_type: str, exports: Sequence[tuple[str, str]], args: argparse.Namespace, logs: Path
) -> Result:
    """Run a type in a process of its own; a crash, or one that takes too long, is its result."""
    if time.perf_counter() - args.start > 60 * args.minutes:
        return Result(LATE, expected=True)
    context = multiprocessing.get_context("forkserver")
    receive, send = context.Pipe(duplex=False)
    log = logs / f"{model_type}.log"
    given = (model_type, exports, args.checkpoints, int(args.memory * (1 << 30)), log, send)
    process = context.Process(target=run_type, args=given)
    process.start()
    send.close()
    try:
        if not receive.poll(args.timeout):
            return _broken(f"took longer than {args.timeout:.0f} s")
        result = receive.recv()
        assert isinstance(result, Result)
        return result
    except EOFError:
        process.join()
        said = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        last = said[-1] if said else "it said nothing"
        return _broken(f"its process ended with {process.exitcode}: {last}")
    finally:
        process.terminate()
        process.join()


def _broken(why: str) -> Result:
    return Result(why, release=importlib.metadata.version("transformers"))


def run_type(*given: Any) -> None:
    """Call `exporting.work`; imported there, and not here, so that this process stays small."""
    from exporting import work

    work(*given)


if __name__ == "__main__":
    sys.exit(main())
