"""How far an export's predictions are from its source's: both run side by side, layer by layer.

Each checkpoint has a fiber of its own. One runs all batches through a layer and waits, the other
runs them through the same layer, their outputs are compared, and both go on. Logits are compared
batch by batch. Memory holds a layer and the hidden states of both, and the logits of one batch.

Shape suffixes: B sequences, T tokens, N tokens of one chunk, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor
from torch.nn import functional

from modelopt_lite.checkpoint.dequant import open_source
from modelopt_lite.errors import CalibrationError, CheckpointError, InternalError, NonFiniteError
from modelopt_lite.evaluate import (
    EvalText,
    load_batches,
    open_job,
    read_text,
    run_batches,
)
from modelopt_lite.job import Job
from modelopt_lite.offload.units import Unit
from modelopt_lite.output import resolve_checkpoint
from modelopt_lite.predictions import token_divergences
from modelopt_lite.progress import Progress, make_progress
from modelopt_lite.rounding import rounding_of

_CHUNK = 1 << 20  # logits of each side that are float64 at a time: 8 MiB


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How an export predicts a text, against its source.

    Attributes:
        kl: Mean over tokens of KL(source || export), in nats.
        kl_max: The largest of a token.
        top1: Share of tokens for which both find the same token likeliest.
        source_perplexity: ``exp`` of the source's mean negative log-likelihood.
        export_perplexity: The same of the export.
        layers: Decoder layer -> root of the summed squared differences of its outputs over the root
            of the summed squares of the source's; in the order of the model.
        tokens: How many tokens were predicted.
        seconds: Wall-clock time.
    """

    kl: float
    kl_max: float
    top1: float
    source_perplexity: float
    export_perplexity: float
    layers: dict[str, float]
    tokens: int
    seconds: float


def compare_predictions(
    export: str | Path,
    source: str | Path,
    *,
    text: EvalText = None,
    seq_len: int = 512,
    max_tokens: int | None = None,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    activations: bool = True,
    trust_remote_code: bool = False,
    progress: bool | Progress = False,
) -> Fidelity:
    """Run an export and its source on a text, and compare logits and the outputs of layers.

    Args:
        export: Folder or hub id of the export.
        source: What it was made from; its tokenizer is used.
        text: As for `modelopt_lite.perplexity`.
        seq_len: Tokens that a text is cut to.
        max_tokens: The most tokens; None for all.
        batch_size: Sequences a batch; None as for `modelopt_lite.perplexity`.
        device: Where both run.
        activations: Round inputs of quantized layers, keys and values as engines do.
        trust_remote_code: Allow code that the checkpoints bring.
        progress: True, or a function ``(phase, done, total)`` to follow it.

    Raises:
        CheckpointError: A folder is damaged, or the two are of different models.
        NonFiniteError: One of them predicts NaN.
        ModelOptLiteError: As for `modelopt_lite.perplexity`.
    """
    started = time.perf_counter()
    read = read_text(text, seq_len, max_tokens)
    with ExitStack() as stack:
        jobs = []
        for ckpt in (source, export):
            folder = resolve_checkpoint(ckpt)
            opened = stack.enter_context(closing(open_source(folder)))
            jobs.append(open_job(folder, opened, trust_remote_code, device))
        _check_alike(*jobs)
        batches, _ = load_batches(read, jobs[0], seq_len, max_tokens, batch_size, trust_remote_code)
        batches = [ids_BT.to(jobs[0].device) for ids_BT in batches]
        if not sum(ids_BT.numel() - len(ids_BT) for ids_BT in batches):
            raise CalibrationError("no sequence of the text has 2 tokens; give a longer text")
        tell = stack.enter_context(make_progress(progress))
        stack.enter_context(torch.inference_mode())
        sums = _side_by_side(jobs, batches, activations, tell)
    return _result(sums, jobs, time.perf_counter() - started)


@dataclass(slots=True)
class _Sums:
    """What is added up over batches."""

    tokens: int = 0
    kl: float = 0.0
    kl_max: float = 0.0
    agreed: int = 0
    losses: list[float] = field(default_factory=lambda: [0.0, 0.0])
    layers: dict[str, tuple[float, float]] = field(default_factory=dict)


def _check_alike(source: Job, export: Job) -> None:
    def kind(job: Job) -> tuple[str, int, int]:
        layers = sum(unit.is_layer for unit in job.plan.units)
        return job.model_type, job.vocab_size, layers

    if kind(source) != kind(export):
        first, second = (
            f"{job.folder} is a {job.model_type!r} with {job.vocab_size} tokens and "
            f"{kind(job)[2]} layers"
            for job in (export, source)
        )
        raise CheckpointError(
            f"{first}, and {second}; give the source that the export was made from"
        )


def _side_by_side(
    jobs: list[Job], batches: list[Tensor], activations: bool, tell: Progress
) -> _Sums:
    sums = _Sums()
    with ExitStack() as stack:
        # Progress is told by the second side: it is the one that comes behind.
        tells = (lambda phase, done, total: None, tell)
        sides = [
            stack.enter_context(_Side.running(job, batches, activations, told))
            for job, told in zip(jobs, tells, strict=True)
        ]
        while True:
            one, other = (side.next() for side in sides)
            if (one and one[0]) != (other and other[0]):
                raise InternalError(
                    f"the two sides are at {one and one[0]} and {other and other[0]}"
                )
            if one is None or other is None:
                return sums
            (kind, key), ours, theirs = one[0], one[1], other[1]
            if kind == "logits":
                _add_logits(sums, ours, theirs, batches[key])
            else:
                _add_layer(sums, key, ours, theirs)


class _Side:
    """A fiber that runs one checkpoint, and stops at the end of each layer and each batch."""

    def __init__(self, body: Callable[[_Side], Any]) -> None:
        self._at = greenlet(lambda: body(self))
        self._main: greenlet | None = None
        self._outputs: list[Tensor] = []

    @classmethod
    @contextmanager
    def running(
        cls, job: Job, batches: list[Tensor], activations: bool, tell: Progress
    ) -> Iterator[_Side]:
        """Give a side; end it where it is left before its end."""

        def body(side: _Side) -> None:
            rounding = rounding_of(job, activations=activations)
            run_batches(job, batches, rounding, tell, side.give_logits, side.give_layer)

        side = cls(body)
        hooks = [
            job.model.get_submodule(unit.name).register_forward_hook(side.keep)
            for unit in job.plan.units
            if unit.is_layer
        ]
        try:
            yield side
        finally:
            for hook in hooks:
                hook.remove()
            side.end()

    def next(self) -> tuple[tuple[str, Any], Any] | None:
        """Run on to the next stop; None at the end."""
        self._main = getcurrent()
        stop: tuple[tuple[str, Any], Any] | None = self._at.switch()
        return stop

    def keep(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Keep what a layer returned for a batch."""
        self._outputs.append(output[0] if isinstance(output, tuple) else output)

    def give_layer(self, unit: Unit) -> None:
        """Stop behind a layer, with its outputs for all batches."""
        if unit.is_layer:
            outputs, self._outputs = self._outputs, []
            self._stop(("layer", unit.name), outputs)

    def give_logits(self, index: int, logits_BTV: Tensor) -> None:
        """Stop behind a batch."""
        self._stop(("logits", index), logits_BTV)

    def _stop(self, key: tuple[str, Any], value: Any) -> None:
        self._at = getcurrent()
        assert self._main is not None
        self._main.switch((key, value))

    def end(self) -> None:
        """Unwind what still runs, so that its threads and patches are undone."""
        if self._main is not None and not self._at.dead:
            with suppress(_EndedError):
                self._at.throw(_EndedError)


class _EndedError(Exception):
    """Unwinds a side that is not needed any more."""


def _add_logits(sums: _Sums, source_BTV: Tensor, export_BTV: Tensor, ids_BT: Tensor) -> None:
    step = max(1, _CHUNK // source_BTV.shape[-1])
    for p_TV, q_TV, ids_T in zip(source_BTV, export_BTV, ids_BT, strict=True):
        for start in range(0, len(ids_T) - 1, step):
            part = slice(start, min(start + step, len(ids_T) - 1))
            targets_N = ids_T[part.start + 1 : part.stop + 1]
            logp_NV = functional.log_softmax(p_TV[part].double(), dim=-1)
            logq_NV = functional.log_softmax(q_TV[part].double(), dim=-1)
            kl_N = token_divergences(logp_NV, logq_NV)
            sums.tokens += len(targets_N)
            sums.kl += float(kl_N.sum())
            sums.kl_max = max(sums.kl_max, float(kl_N.max()))
            sums.agreed += int((logp_NV.argmax(-1) == logq_NV.argmax(-1)).sum())
            for side, log_NV in enumerate((logp_NV, logq_NV)):
                sums.losses[side] -= float(log_NV.gather(-1, targets_N[:, None]).sum())


def _add_layer(sums: _Sums, name: str, source: list[Tensor], export: list[Tensor]) -> None:
    error, whole = sums.layers.get(name, (0.0, 0.0))
    for one, other in zip(source, export, strict=True):
        error += float(torch.linalg.vector_norm(other.float() - one.float())) ** 2
        whole += float(torch.linalg.vector_norm(one.float())) ** 2
    sums.layers[name] = (error, whole)


def _result(sums: _Sums, jobs: list[Job], seconds: float) -> Fidelity:
    for job, loss in zip(jobs, sums.losses, strict=True):
        if math.isnan(loss):
            raise NonFiniteError(
                f"the model of {job.folder} predicts NaN on this text; its weights are damaged, or "
                "its dtype is too narrow for its activations"
            )
    source, export = (loss / sums.tokens for loss in sums.losses)
    return Fidelity(
        kl=max(0.0, sums.kl / sums.tokens),
        kl_max=sums.kl_max,
        top1=sums.agreed / sums.tokens,
        source_perplexity=math.exp(min(source, 700.0)),
        export_perplexity=math.exp(min(export, 700.0)),
        layers={n: (e / w) ** 0.5 if w else e**0.5 for n, (e, w) in sums.layers.items()},
        tokens=sums.tokens,
        seconds=seconds,
    )
