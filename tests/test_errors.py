"""Errors have codes of their own, which docs/troubleshooting.md explains."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import modelopt_lite
from modelopt_lite.errors import ModelOptLiteError

PAGE = Path(__file__).parents[1] / "docs" / "troubleshooting.md"
SECTION = re.compile(r"^## (MOL\d{3}): (\w+)\n\n(.+?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def all_errors() -> list[type[ModelOptLiteError]]:
    """Every class of errors, in whichever module it stands."""
    for module in pkgutil.walk_packages(modelopt_lite.__path__, "modelopt_lite."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:  # what an extra brings, as lm_eval
                if (error.name or "modelopt_lite").startswith("modelopt_lite"):
                    raise
    found, left = [], [ModelOptLiteError]
    while left:
        kind = left.pop()
        found.append(kind)
        left += kind.__subclasses__()
    return [kind for kind in found if kind.__module__.startswith("modelopt_lite")]


def test_every_error_is_explained_under_its_code() -> None:
    explained = {(code, name) for code, name, _ in SECTION.findall(PAGE.read_text("utf-8"))}
    assert explained == {(kind.code, kind.__name__) for kind in all_errors()}


def test_no_two_errors_share_a_code() -> None:
    codes = [kind.code for kind in all_errors()]
    assert sorted(set(codes)) == sorted(codes)


def test_every_section_says_something_and_sections_are_sorted() -> None:
    sections = SECTION.findall(PAGE.read_text("utf-8"))
    assert [code for code, *_ in sections] == sorted(code for code, *_ in sections)
    assert all(len(text.split()) > 8 for *_, text in sections)
