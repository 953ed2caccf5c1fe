"""What a model predicts for a text, kept in a folder, so that other models can be held against it.

Shape suffixes: B sequences, T tokens, V vocabulary, N tokens of several sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from modelopt_lite.errors import CalibrationError, OutputError
from modelopt_lite.paths import asked_path

_BATCH, _SUFFIX = "batch-", ".safetensors"
_PART = ".part"  # ends the name of a batch until all are there
_CHUNK = 1 << 22  # elements that are float32 at a time: 16 MiB for each of two


class Predictions:
    """Logits of every batch of a text, one file a batch.

    Args:
        folder: Where they lie.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = asked_path(folder, CalibrationError)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Have the batches that the block keeps take the place of older ones when it ends well.

        The folder is made, and written into, before hours are spent on what it is for. A block
        that ends otherwise leaves what was there, and a process that is killed a folder in which
        predictions are missing, or all older ones: never some of two models.

        Raises:
            OutputError: It cannot be made, or written into.
        """
        made = not self._folder.exists()
        with self._writing():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._discard()  # what a killed process left
            (self._folder / _PART).touch()
        try:
            yield
            with self._writing():
                (self._folder / _PART).unlink()
                for old in self._folder.glob(f"{_BATCH}*{_SUFFIX}"):
                    old.unlink()
                for new in sorted(self._folder.glob(f"{_BATCH}*{_SUFFIX}{_PART}")):
                    new.rename(new.with_suffix(""))
        except BaseException:
            self._discard()
            if made:
                with suppress(OSError):
                    self._folder.rmdir()
            raise

    def _discard(self) -> None:
        """Remove the batches of a block of `keeping` that did not end well."""
        for path in (self._folder / _PART, *self._folder.glob(f"{_BATCH}*{_PART}")):
            path.unlink(missing_ok=True)

    def keep(self, index: int, ids_BT: Tensor, logits_BTV: Tensor) -> None:
        """Write a batch, with the token ids that it belongs to; in a block of `keeping`.

        Raises:
            OutputError: It cannot be written.
        """
        from safetensors.torch import save_file

        tensors = {"ids": ids_BT.cpu().contiguous(), "logits": logits_BTV.cpu().contiguous()}
        with self._writing():
            save_file(tensors, self._path(index).with_suffix(f"{_SUFFIX}{_PART}"))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        from safetensors import SafetensorError

        try:
            yield
        except (OSError, SafetensorError) as error:
            raise OutputError(
                f"predictions cannot be kept in {self._folder} ({error}); check the disk, or "
                "choose another folder (--keep)"
            ) from error

    def check(self, batches: Sequence[Tensor], vocab_size: int) -> None:
        """Check that these are predictions of a text by a model of the same vocabulary.

        Raises:
            CalibrationError: There are none, or damaged ones, or those of other tokens or words.
        """
        from safetensors import SafetensorError, safe_open

        for index, ids_BT in enumerate(batches):
            path = self._path(index)
            if not path.is_file():
                raise CalibrationError(
                    f"{path} does not exist: {self._folder} holds no predictions of this text; "
                    "make them of the original with keep (--keep), and the same text and sizes"
                )
            try:
                with safe_open(path, "pt") as file:
                    kept_BT, shape = file.get_tensor("ids"), file.get_slice("logits").get_shape()
            except (OSError, SafetensorError) as error:
                raise CalibrationError(
                    f"{path} holds no predictions ({error}); make them again with keep (--keep)"
                ) from error
            if not torch.equal(kept_BT, ids_BT.cpu()) or [*shape] != [*ids_BT.shape, vocab_size]:
                raise CalibrationError(
                    f"{path} holds predictions of other tokens, or of other words than the "
                    f"{vocab_size} that the model knows: shape {[*shape]}; make them again with "
                    "keep (--keep), and the same text and sizes"
                )

    def divergence(self, index: int, logits_BTV: Tensor) -> float:
        """Return the sum over tokens of KL(kept || given), in nats; not of the last of a sequence.

        Each token's is computed in float32, and they are added up in float64.
        """
        from safetensors import safe_open

        with safe_open(self._path(index), "pt") as file:
            kept_BTV = file.get_tensor("logits")
        total = torch.zeros((), dtype=torch.float64, device=logits_BTV.device)
        step = max(1, _CHUNK // logits_BTV.shape[-1])
        for kept_TV, given_TV in zip(kept_BTV[:, :-1], logits_BTV[:, :-1], strict=True):
            for start in range(0, len(given_TV), step):
                kept_NV = kept_TV[start : start + step].to(given_TV.device)
                log_p_NV = functional.log_softmax(kept_NV.float(), -1)
                log_q_NV = functional.log_softmax(given_TV[start : start + step].float(), -1)
                total += token_divergences(log_p_NV, log_q_NV).double().sum()
        return float(total)

    def _path(self, index: int) -> Path:
        return self._folder / f"{_BATCH}{index:05d}{_SUFFIX}"


def token_divergences(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    """Return KL(p || q) of each token [N], in nats, from log-probabilities and in their dtype."""
    return (log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(-1)
