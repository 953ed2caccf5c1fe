"""The table of a checkpoint's tensors: the same as a dict of them, in a fraction of the memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelopt_lite.checkpoint.header import TensorInfo
from modelopt_lite.checkpoint.table import TensorTable

NAMES = st.lists(
    st.text(alphabet="ab.\u00e9", min_size=1, max_size=8), min_size=0, max_size=30, unique=True
)


def infos(names: list[str]) -> Iterator[TensorInfo]:
    """Tensors of several kinds, a few to a file, back to back."""
    start = 0
    for number, name in enumerate(names):
        dtype = (torch.bfloat16, torch.uint8)[number % 2]
        shape = ((), (3,), (2, 5))[number % 3]
        if number % 4 == 0:
            start = 8
        info = TensorInfo(name, dtype, shape, Path(f"{number // 4}"), start, start + 20)
        start += 20
        yield info


@given(NAMES)
def test_is_what_a_dict_is(names: list[str]) -> None:
    given = {info.name: info for info in infos(names)}
    table = TensorTable(given.values())
    assert list(table) == list(given)
    assert list(table.values()) == list(given.values())
    assert list(table.items()) == list(given.items())
    assert len(table) == len(given)
    assert all(table[name] == info for name, info in given.items())
    for other in ("", ".", "c", "a.c", "c.a", *(f"{name}." for name in names)):
        assert (other in table) == (other in given)
        assert table.get(other) == given.get(other)
    number: Any = 7
    assert number not in table


@given(NAMES)
def test_knows_tensors_by_number_and_by_file(names: list[str]) -> None:
    given = list(infos(names))
    table = TensorTable(given)
    assert [table.find(name) for name in names] == list(range(len(names)))
    assert [table.at(number) for number in range(len(names))] == given
    assert [table.name(number) for number in range(len(names))] == names
    for file, path in enumerate(table.files):
        assert [table.at(n) for n in table.of_file(file)] == [i for i in given if i.file == path]


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^a\.b$"):
        TensorTable(infos(["a.b", "b", "a.b"]))


def test_a_missing_name_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="c"):
        TensorTable(infos(["a"]))["c"]


def test_takes_less_than_a_hundred_bytes_for_each_tensor() -> None:
    """A dict of objects takes five times as much."""
    suffixes = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    count = 20 * 64 * 3 * len(suffixes)

    def many() -> Iterator[TensorInfo]:
        for number in range(20 * 64):
            for role in ("gate_proj", "up_proj", "down_proj"):
                for suffix in suffixes:
                    name = f"model.layers.{number // 64}.mlp.experts.{number % 64}.{role}.{suffix}"
                    yield TensorInfo(name, torch.uint8, (8, 8), Path("x"), number, number + 64)

    tracemalloc.start()
    table = TensorTable(many())
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(table) == count
    assert held < 100 * count
