"""Headers of strangers: everything wrong is a CheckpointError with the file and a remedy."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from modelopt_lite.checkpoint.header import DTYPE_NAMES, DTYPES, TensorInfo, itemsize, read_header
from modelopt_lite.errors import CheckpointError


def raw_file(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, shape: list[Any], dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_agrees_with_the_reference_writer(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(save(tensors, {"format": "pt"}))
    header = read_header(path)
    assert set(header) == set(tensors)
    content = path.read_bytes()
    for name, info in header.items():
        expected = tensors[name]
        assert (info.name, info.file) == (name, path)
        assert (info.dtype, info.shape) == (expected.dtype, tuple(expected.shape))
        assert info.nbytes == info.end - info.start == expected.numel() * itemsize(info.dtype)
        stored = content[info.start : info.end]
        assert stored == bytes(expected.reshape(-1).view(torch.uint8).tolist())


def test_dtypes_are_a_bijection() -> None:
    assert {DTYPE_NAMES[dtype] for dtype in DTYPES.values()} == set(DTYPES)
    assert {"F8_E8M0", "U16", "U32", "U64", "F8_E5M2"} <= set(DTYPES)


def test_scalar_has_one_element() -> None:
    info = TensorInfo("x", torch.float32, (), Path("f"), 0, 4)
    assert (info.numel, info.nbytes) == (1, 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes"),
        (b"\x01\x02", "has 2 bytes"),
        ((200).to_bytes(8, "little") + b"{}", "needs 208 bytes for its header but has 10"),
        ((2**63).to_bytes(8, "little") + b"{}", "the limit is 100000000"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
)
def test_broken_start(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "not valid JSON"),
        (b"\xff\xfe", b"", "not valid JSON"),
        (b"[" * 100_000, b"", "not valid JSON"),
        (b'{"x": ' + b"9" * 5000 + b"}", b"", "not valid JSON"),
        (b'{"x": 1, "x": 2}', b"", "twice"),
        ([], b"", "a JSON list"),
        ({"__metadata__": 3}, b"", "__metadata__"),
        ({"x": 3}, b"", "'x' is not an object"),
        ({"": entry(0, 1, [1])}, b"0", "unprintable name"),
        ({"a\nb": entry(0, 1, [1])}, b"0", "unprintable name"),
        ({"\ud800": entry(0, 1, [1])}, b"0", "unprintable name"),
        ({"x": {}}, b"", "unknown dtype"),
        ({"x": entry(0, 1, [1], "F4")}, b"0", "unknown dtype 'F4'"),
        ({"x": entry(0, 1, [1], ["U8"])}, b"0", "unknown dtype"),
        ({"x": entry(0, 1, [-1])}, b"0", "impossible shape"),
        ({"x": entry(0, 1, [True])}, b"0", "impossible shape"),
        ({"x": entry(0, 1, [1.0])}, b"0", "impossible shape"),
        ({"x": entry(0, 1, [1] * 65)}, b"0", "impossible shape"),
        ({"x": entry(0, 0, [2**70, 0])}, b"0", "impossible shape"),
        (b'{"x": {"dtype": "U8", "shape": ' + b"[" * 800 + b"]" * 800 + b"}}", b"", "impossible"),
        ({"x": {"dtype": "U8", "shape": 3, "data_offsets": [0, 3]}}, b"000", "impossible shape"),
        ({"x": {"dtype": "U8", "shape": [1]}}, b"0", "data_offsets None"),
        ({"x": {"dtype": "U8", "shape": [1], "data_offsets": [1]}}, b"0", "data_offsets"),
        ({"x": entry(2, 1, [1])}, b"00", "hold -1"),
        ({"x": entry(0, 3, [1])}, b"000", "needs 1 bytes"),
        ({"x": entry(0, 2**62, [2**62])}, b"000", "truncated"),
        ({"x": entry(0, 2, [2]), "y": entry(1, 3, [2])}, b"000", "overlaps"),
        ({"x": entry(0, 1, [1]), "y": entry(2, 3, [1])}, b"000", "hole"),
        ({"x": entry(1, 2, [1])}, b"00", "hole"),
        ({"x": entry(0, 2, [2])}, b"000", "describes only"),
    ],
)  # fmt: skip
def test_broken_header(tmp_path: Path, header: object, data: bytes, message: str) -> None:
    path = raw_file(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_truncation_states_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    content = save({"w": torch.ones(10, 10)})
    path.write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match=f"describes {len(content)} .* {len(content) - 100};"):
        read_header(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "none.safetensors")


_GOOD = save({"a.weight": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.uint8)})


@settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, len(_GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=6
    ),
    cut=st.integers(0, len(_GOOD)),
    tail=st.binary(max_size=20),
)
def test_mutated_bytes_never_surprise(
    tmp_path: Path, changes: list[tuple[int, int]], cut: int, tail: bytes
) -> None:
    content = bytearray(_GOOD)
    for position, value in changes:
        content[position] = value
    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes(content[:cut] if cut % 2 else content) + tail)
    check_bounded(path)


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.sampled_from(["U8", "F32", "BF16"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__"])
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(header=_JSON, data=st.binary(max_size=16))
def test_any_json_never_surprises(tmp_path: Path, header: object, data: bytes) -> None:
    check_bounded(raw_file(tmp_path / "x.safetensors", header, data))


def check_bounded(path: Path) -> None:
    """Either a header whose tensors lie in the file, or CheckpointError; and little memory."""
    size = path.stat().st_size
    tracemalloc.start()
    try:
        for info in read_header(path).values():
            assert 8 <= info.start <= info.end <= size
            assert info.nbytes == info.end - info.start
    except CheckpointError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 500_000
