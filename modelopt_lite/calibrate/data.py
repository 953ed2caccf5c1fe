"""Calibration data: from text, files or token ids to batches of equal length, never padded.

Texts become blocks of ``seq_len`` tokens. Samples of a list are kept apart, cut to ``seq_len``, and
batched with others of the same length: no pad token ever reaches a statistic. Samples with pictures
(`modelopt_lite.calibrate.chat`) are batches of their own, behind the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelopt_lite.calibrate.chat import RecordReader, Sample, encode_text
from modelopt_lite.errors import CalibrationError
from modelopt_lite.paths import asked_path
from modelopt_lite.words import counted

_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})

CalibData = str | Path | Sequence[str] | Iterable[Tensor] | None


@dataclass(frozen=True, slots=True)
class CalibrationData:
    """What a model is calibrated with.

    Attributes:
        batches: Token ids, [B, T] int64 each.
        origin: Where they came from.
        others: What else the model is given with a batch, by the batch's number.
    """

    batches: tuple[Tensor, ...]
    origin: str
    others: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return sum(batch.numel() for batch in self.batches)

    @property
    def samples(self) -> int:
        """How many sequences there are."""
        return sum(len(batch) for batch in self.batches)

    def inputs(self, device: torch.device, dtype: torch.dtype) -> list[dict[str, Tensor]]:
        """Return the model's arguments for each batch; what is no integer is cast to ``dtype``."""
        return [
            {
                "input_ids": ids_BT.to(device),
                **{
                    name: value.to(device, dtype if value.is_floating_point() else None)
                    for name, value in self.others.get(number, {}).items()
                },
            }
            for number, ids_BT in enumerate(self.batches)
        ]

    def fingerprint(self) -> str:
        """SHA-256 over shapes, ids and what comes with them, in order."""
        digest = hashlib.sha256()
        for number, batch in enumerate(self.batches):
            digest.update(repr(tuple(batch.shape)).encode())
            digest.update(batch.contiguous().numpy().tobytes())
            for name, value in sorted(self.others.get(number, {}).items()):
                digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                digest.update(value.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def check_sizes(size: int, seq_len: int, batch_size: int | None) -> None:
    """Raise `CalibrationError` where these leave nothing to run a model on."""
    if size < 1 or seq_len < 2 or (batch_size is not None and batch_size < 1):
        raise CalibrationError(
            f"calib_size {size}, calib_seq_len {seq_len} and batch_size {batch_size} must be at "
            "least 1, 2 and 1"
        )


def load_calibration_data(
    data: CalibData,
    source: Path,
    *,
    size: int,
    seq_len: int,
    batch_size: int | None,
    vocab_size: int | None,
    trust_remote_code: bool = False,
) -> CalibrationData:
    """Turn what a user gave into batches.

    Args:
        data: None for the text that comes with CPython; a path (.txt, .jsonl, .json, .parquet, or
            .safetensors of token ids); texts; or batches of ids, which are used as they are.
            Records of .jsonl, .json and .parquet: see `modelopt_lite.calibrate.chat`.
        source: The checkpoint, for its tokenizer.
        size: The most sequences that are taken.
        seq_len: Length that texts are cut to, in tokens.
        batch_size: Sequences a batch; None: 8.
        vocab_size: Ids must lie below it, where given.
        trust_remote_code: Whether a tokenizer may run code of the checkpoint.

    Raises:
        CalibrationError: Nothing to read, nothing in it, or ids outside of the vocabulary.
    """
    check_sizes(size, seq_len, batch_size)
    origin, found = _sequences(data, source, size, seq_len, trust_remote_code)
    samples = [one if isinstance(one, Sample) else Sample(one) for one in found]
    plain = [sample.ids for sample in samples if not sample.others]
    batched = bool(plain) and plain[0].ndim == 2
    made = plain if batched else batch_by_length(plain[:size], batch_size or 8)
    batches = [batch for batch in made if batch.numel()]
    # A processor's own tokens for pictures may lie behind the vocabulary of its model's text.
    _check_ids(batches, vocab_size, origin)
    others = {}
    for sample in samples:
        if sample.others:
            others[len(batches)] = sample.others
            batches.append(sample.ids[None])
    if not batches:
        raise CalibrationError(
            f"the calibration data ({origin}) holds no tokens; give text, or token ids [B, T]"
        )
    return CalibrationData(tuple(batches), origin, others)


def _sequences(
    data: CalibData, source: Path, size: int, seq_len: int, trust: bool
) -> tuple[str, Sequence[Tensor | Sample]]:
    """Return (origin, 1-D sequences), or 2-D batches where the caller made batches."""
    if data is None:
        from modelopt_lite.calibrate.text import calibration_text

        tokenizer = load_tokenizer(source, trust)
        return "pydoc_data.topics", text_blocks(tokenizer, calibration_text(), seq_len, size)
    if isinstance(data, str | Path):
        # One spelling: a resumed run compares it.
        path = asked_path(data, CalibrationError).resolve()
        try:
            return str(path), _from_file(path, source, size, seq_len, trust)
        except OSError as error:
            raise CalibrationError(
                f"the calibration file {path} cannot be read: {error.strerror or error}"
            ) from error
    if not isinstance(data, Iterable) or isinstance(data, Mapping):
        raise CalibrationError(
            f"calib_data is {type(data)}; give a path, texts, or batches of token ids [B, T]"
        )
    items = list(data)
    if items and all(isinstance(item, str) for item in items):
        tokenizer = load_tokenizer(source, trust)
        texts = [str(item) for item in items[:size]]
        return "a list of texts", [encode_text(tokenizer, text)[:seq_len] for text in texts]
    return "batches of token ids", [_as_batch(item, index) for index, item in enumerate(items)]


def _as_batch(item: Any, index: int) -> Tensor:
    if not isinstance(item, Tensor) or item.ndim != 2 or item.dtype not in _INTEGERS:
        what = f"{item.dtype} {list(item.shape)}" if isinstance(item, Tensor) else type(item)
        raise CalibrationError(
            f"calibration batch {index} is {what}; give integer token ids of shape [B, T]"
        )
    return item.to(torch.int64)


def _from_file(
    path: Path, source: Path, size: int, seq_len: int, trust: bool
) -> Sequence[Tensor | Sample]:
    if not path.is_file():
        what = "is no file" if path.exists() else "does not exist"
        raise CalibrationError(f"the calibration file {path} {what}; check the path")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        from modelopt_lite.checkpoint.names import natural_key

        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise CalibrationError(f"the calibration file {path} is damaged: {error}") from error
        ids = [tensors[name] for name in sorted(tensors, key=natural_key)]
        return [_as_batch(t if t.ndim != 1 else t[None], i) for i, t in enumerate(ids)]
    tokenizer = load_tokenizer(source, trust)
    if path.suffix == ".txt":
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CalibrationError(f"the calibration file {path} is no UTF-8: {error}") from error
        return text_blocks(tokenizer, text, seq_len, size)
    reader = RecordReader(path, source, tokenizer, trust)
    return [reader.sample(record, seq_len) for record in _take(_records(path), size)]


def _take(records: Iterator[Any], size: int) -> Iterator[Any]:
    for _, record in zip(range(size), records, strict=False):
        yield record


def _records(path: Path) -> Iterator[Any]:
    try:
        if path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as lines:
                yield from (json.loads(line) for line in lines if line.strip())
        elif path.suffix == ".json":
            yield from _list_of(json.loads(path.read_text(encoding="utf-8")), path)
        elif path.suffix == ".parquet":
            yield from _parquet(path)
        else:
            raise CalibrationError(
                f"the calibration file {path} has an unknown ending; use .txt, .jsonl, .json, "
                ".parquet or .safetensors"
            )
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CalibrationError(f"the calibration file {path} is no valid JSON: {error}") from error


def _list_of(records: Any, path: Path) -> list[Any]:
    if not isinstance(records, list):
        raise CalibrationError(
            f"the calibration file {path} holds a {type(records).__name__}; give a list of samples"
        )
    return records


def _parquet(path: Path) -> Iterator[Any]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise CalibrationError(
            f"reading {path} needs pyarrow: pip install 'modelopt-lite[parquet]'"
        ) from error
    for batch in parquet.ParquetFile(path).iter_batches():
        yield from batch.to_pylist()


def load_tokenizer(source: Path, trust_remote_code: bool) -> Any:
    """Return the checkpoint's tokenizer.

    Raises:
        CalibrationError: There is none, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        if not any(next(source.glob(p), None) for p in ("*token*", "*vocab*", "*.model")):
            raise FileNotFoundError("it has no tokenizer files")  # some classes start empty
        return AutoTokenizer.from_pretrained(
            source, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # transformers and tokenizers raise many kinds here
        raise CalibrationError(
            f"the checkpoint {source} has no tokenizer that loads ({error}); give calib_data as "
            "token ids, or use a recipe that needs no calibration data"
        ) from error


def text_blocks(tokenizer: Any, text: str, seq_len: int, size: int) -> list[Tensor]:
    """Cut a long text to blocks; each begins as the tokenizer begins a text (BOS, if it has one).

    A text shorter than a block is one sequence as it is; otherwise the rest is dropped.

    Args:
        tokenizer: A tokenizer of transformers.
        text: What to cut; nothing gives no block.
        seq_len: Tokens of a block, those that begin it included.
        size: The most blocks that are cut.

    Returns:
        int64 [seq_len] each; one shorter than that only alone.

    Raises:
        CalibrationError: The tokens that begin a text fill the block.
    """
    whole = encode_text(tokenizer, text)
    plain = encode_text(tokenizer, text, special=False)
    start = whole[: _first_at(whole, plain)]
    width = seq_len - len(start)
    if width < 1:
        raise CalibrationError(
            f"calib_seq_len {seq_len} leaves no room for text behind the "
            f"{counted(len(start), 'token')} that the tokenizer begins with; give more"
        )
    if len(plain) <= width:
        return [torch.cat([start, plain])] if len(plain) else []
    count = min(size, len(plain) // width)
    return [torch.cat([start, plain[i * width : (i + 1) * width]]) for i in range(count)]


def _first_at(whole: Tensor, plain: Tensor) -> int:
    """Return where the text begins among the special tokens around it; 0 where it is not there."""
    for start in range(1, len(whole) - len(plain) + 1):
        if torch.equal(whole[start : start + len(plain)], plain):
            return start
    return 0


def batch_by_length(sequences: Iterable[Tensor], batch_size: int) -> Iterator[Tensor]:
    """Yield [B, T] batches of [T] sequences, lengths in the order in which they first occur.

    Only sequences of equal length share a batch; empty ones are left out.
    """
    by_length: dict[int, list[Tensor]] = {}
    for sequence in sequences:
        if len(sequence):
            by_length.setdefault(len(sequence), []).append(sequence)
    for group in by_length.values():
        for start in range(0, len(group), batch_size):
            yield torch.stack(group[start : start + batch_size])


def _check_ids(batches: Iterable[Tensor], vocab_size: int | None, origin: str) -> None:
    for index, batch in enumerate(batches):
        if not batch.numel():
            continue
        low, high = int(batch.min()), int(batch.max())
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            bad = low if low < 0 else high
            raise CalibrationError(
                f"calibration batch {index} ({origin}) holds the token id {bad}, outside of the "
                f"model's vocabulary 0..{(vocab_size or 0) - 1}; tokenize with this checkpoint's "
                "own tokenizer"
            )
