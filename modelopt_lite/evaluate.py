"""Perplexity of a checkpoint, original or quantized, with one unit of weights in memory at a time.

A quantized checkpoint is decoded to its model's dtype as it is read. What an engine does to inputs
and to keys and values is simulated (`modelopt_lite.rounding`).

Shape suffixes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from modelopt_lite.build import build_meta_model, eager_experts
from modelopt_lite.calibrate.data import (
    batch_by_length,
    load_calibration_data,
    load_tokenizer,
    text_blocks,
)
from modelopt_lite.calibrate.model_code import model_code
from modelopt_lite.calibrate.observe import InputWatch
from modelopt_lite.calibrate.text import evaluation_text
from modelopt_lite.checkpoint.dequant import DequantizedSource, Source, open_source
from modelopt_lite.checkpoint.names import map_names
from modelopt_lite.device import pick_device
from modelopt_lite.errors import CalibrationError, NonFiniteError
from modelopt_lite.job import Job, check_config
from modelopt_lite.models import get_spec
from modelopt_lite.models.specs import ptq_facts
from modelopt_lite.offload.memory import bound_caches
from modelopt_lite.offload.store import Loaded
from modelopt_lite.offload.stream import StreamedModel
from modelopt_lite.offload.units import Unit, find_units
from modelopt_lite.output import resolve_checkpoint
from modelopt_lite.plan import Plan
from modelopt_lite.predictions import Predictions
from modelopt_lite.progress import Progress, make_progress
from modelopt_lite.recipes import Recipe
from modelopt_lite.rounding import Rounding, rounding_of

Given = str | Path | Tensor | Iterable[Tensor] | Iterable[str] | None


@dataclass(frozen=True, slots=True)
class ReadText:
    """What was given as a text, read.

    Attributes:
        given: What was given: also what holds no one text, such as token ids.
        words: The text; None where it is no one text.
    """

    given: Given
    words: str | None


EvalText = Given | ReadText

Result = TypeVar("Result")

MOST_LOGITS = 1 << 26  # elements a batch; 128 MiB in 16 bits
_LOSS_CHUNK = 1 << 22  # elements that are float32 at a time: 16 MiB


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How well a checkpoint predicts a text.

    Attributes:
        perplexity: ``exp(nll)``.
        nll: Mean negative log-likelihood, nats a token.
        tokens: How many tokens were predicted: all but the first of each sequence.
        bits_per_byte: Bits to encode a UTF-8 byte of the predicted text, comparable between
            tokenizers; None for token ids, and for tokenizers that do not tell offsets.
        seconds: Wall-clock time, reading and building included.
        quantized: Whether the checkpoint was.
        kl: Mean divergence from the predictions that were given, ``KL(theirs || ours)``, nats a
            token; None where none were given.
    """

    perplexity: float
    nll: float
    tokens: int
    bits_per_byte: float | None
    seconds: float
    quantized: bool
    kl: float | None = None


def perplexity(
    ckpt: str | Path,
    *,
    text: EvalText = None,
    seq_len: int = 512,
    max_tokens: int | None = None,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    activations: bool = True,
    keep: str | Path | None = None,
    against: str | Path | None = None,
    trust_remote_code: bool = False,
    progress: bool | Progress = False,
) -> Evaluation:
    """Measure how well a checkpoint predicts a text.

    All batches go through the model together, so every weight is read once, and memory holds one
    decoder layer, the hidden states of all tokens, and the logits of one batch.

    Args:
        ckpt: Folder or hub id; original, or quantized in any way that `open_source` reads.
        text: None for the evaluation share of the text that comes with CPython; a text; the path
            of a file (.txt, or another kind that calibration takes); or integer token ids [B, T],
            one batch or several, each row a sequence of its own.
        seq_len: Tokens that a text is cut to, the beginning-of-text token included. The rest of a
            long text that fills no block is dropped.
        max_tokens: The most tokens that the model reads; None for all.
        batch_size: Sequences a batch; None for 8, fewer where the logits would exceed 2**26
            elements. Changes the result only by the rounding of matrix products.
        device: Where the model runs; default the accelerator if there is one, else the CPU.
        activations: In a checkpoint of one of our dialects, round the inputs of each linear layer
            and expert whose format quantizes them: a simulation of what engines serve. Other
            sources' inputs stay as they are. Keys and values are rounded as the cache that the
            checkpoint states keeps them.
        keep: Folder to write all predictions into: a number of the model's dtype for each token
            and word of the vocabulary. They take the place of older ones when all are there.
        against: Folder of predictions that an earlier call kept, of the same text in the same
            batches: how far the checkpoint is from them.
        trust_remote_code: Allow code that the checkpoint brings.
        progress: True, or a function ``(phase, done, total)`` to follow it.

    Raises:
        CalibrationError: No text, no tokenizer for it, token ids outside of the vocabulary, or
            predictions of another text.
        CheckpointError: The checkpoint is damaged; a static input scale is missing.
        NonFiniteError: The model predicts NaN.
        ModelOptLiteError: As for `quantize_and_export`.
    """
    started = time.perf_counter()
    read = read_text(text, seq_len, max_tokens)
    folder = resolve_checkpoint(ckpt)
    with closing(open_source(folder)) as source:
        job = open_job(folder, source, trust_remote_code, device)
        batches, byte_count = load_batches(
            read, job, seq_len, max_tokens, batch_size, trust_remote_code
        )
        tokens = sum(ids_BT.numel() - len(ids_BT) for ids_BT in batches)
        if not tokens:
            raise CalibrationError("no sequence of the text has 2 tokens; give a longer text")
        if against is not None:
            Predictions(against).check(batches, job.vocab_size)
        batches = [ids_BT.to(job.device) for ids_BT in batches]

        def take(index: int, logits_BTV: Tensor) -> tuple[float, float | None]:
            if keep is not None:
                Predictions(keep).keep(index, batches[index], logits_BTV)
            divergence = None
            if against is not None:
                divergence = Predictions(against).divergence(index, logits_BTV)
            return _summed_loss(logits_BTV[:, :-1], batches[index][:, 1:]), divergence

        rounding = rounding_of(job, activations=activations)
        keeping = Predictions(keep).keeping() if keep is not None else nullcontext()
        with keeping, make_progress(progress) as tell:
            found = run_batches(job, batches, rounding, tell, take)
            total = math.fsum(loss for loss, _ in found)
            if math.isnan(total):
                raise NonFiniteError(
                    f"the model of {folder} predicts NaN on this text; its weights are damaged, or "
                    "its dtype is too narrow for its activations"
                )
    divergences = [divergence for _, divergence in found if divergence is not None]
    nll = total / tokens
    return Evaluation(
        perplexity=math.exp(nll) if nll < math.log(sys.float_info.max) else math.inf,
        nll=nll,
        tokens=tokens,
        bits_per_byte=total / math.log(2) / byte_count if byte_count else None,
        seconds=time.perf_counter() - started,
        quantized=isinstance(source, DequantizedSource),
        kl=math.fsum(divergences) / tokens if divergences else None,
    )


def open_job(folder: Path, source: Source, trust: bool, device: str | torch.device | None) -> Job:
    """A run whose plan quantizes nothing: the same units and weights as that of an export."""
    model_type = check_config(source, None, folder)
    model = build_meta_model(folder, source.config, trust_remote_code=trust)
    spec = get_spec(model_type)
    plan = Plan(
        recipe=Recipe(name="none", weights="none"),
        numerics="exact",
        names=map_names(model, {name: info.shape for name, info in source.tensors.items()}),
        spec=spec,
        matrices=[],
        copies=[],
        kv_cache=[],
        excluded={},
        unquantized=[],
        units=find_units(model, ptq_facts(spec).layer_names),
    )
    return Job(folder, source, model, model_type, plan, pick_device(device))


def read_text(text: EvalText, seq_len: int, max_tokens: int | None) -> ReadText:
    """Read a text, before hours are spent on anything else; one that was read stays as it is.

    Raises:
        CalibrationError: It cannot be read, or the numbers of tokens leave nothing to predict.
    """
    if seq_len < 2 or (max_tokens is not None and max_tokens < 2):
        raise CalibrationError(
            f"seq_len is {seq_len} and max_tokens {max_tokens}; give at least 2 tokens"
        )
    return text if isinstance(text, ReadText) else ReadText(text, _words(text))


def fitting_rows(job: Job, length: int) -> int:
    """Return how many rows of so many tokens a batch may have, for its logits to stay small."""
    return max(1, MOST_LOGITS // (job.vocab_size * length))


def load_batches(
    text: ReadText,
    job: Job,
    seq_len: int,
    max_tokens: int | None,
    batch_size: int | None,
    trust: bool,
) -> tuple[list[Tensor], int | None]:
    """Return [B, T] batches and, where it is known, how many bytes their predicted tokens are."""
    if batch_size is not None and batch_size < 1:
        raise CalibrationError(f"batch_size is {batch_size} and must be at least 1")
    words, tokenizer = text.words, None
    data: Any = [text.given] if isinstance(text.given, Tensor) else text.given
    if words is not None:
        tokenizer = load_tokenizer(job.folder, trust)
        data = [block[None] for block in text_blocks(tokenizer, words, seq_len, sys.maxsize)]
    loaded = load_calibration_data(
        data,
        job.folder,
        size=sys.maxsize,
        seq_len=seq_len,
        batch_size=batch_size,
        vocab_size=job.vocab_size,
        trust_remote_code=trust,
    )
    if loaded.others:
        raise CalibrationError(
            f"the text {loaded.origin} has samples with pictures, and only text is predicted; "
            "leave them out"
        )
    rows, left = [], max_tokens or loaded.tokens
    for row in (row for batch in loaded.batches for row in batch):
        rows.append(row[:left])
        left = max(0, left - len(row))
    rows = [row for row in rows if len(row) > 1]
    fitting = fitting_rows(job, max(map(len, rows), default=1))
    batches = list(batch_by_length(rows, batch_size or min(8, fitting)))
    if words is None or not getattr(tokenizer, "is_fast", False) or not rows:
        return batches, None
    return batches, _predicted_bytes(tokenizer, words, rows)


def _words(text: Given) -> str | None:
    """Return the text that was given, itself or as a file's path; None where it is something else.

    Raises:
        CalibrationError: A path where no text can be read.
    """
    if text is None:
        return evaluation_text()
    if not isinstance(text, str | Path):
        return None
    path = Path(text)
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8") if path.suffix == ".txt" else None
    except UnicodeDecodeError as error:
        raise CalibrationError(
            f"the text file {path} is not UTF-8 ({error}); convert it"
        ) from error
    except OSError:
        pass  # a text may be longer than the system allows a path to be
    if isinstance(text, Path) or (path.suffix == ".txt" and "\n" not in text):
        raise CalibrationError(
            f"the text file {str(text)!r} does not exist or cannot be read; check the path"
        )
    return text


def _predicted_bytes(tokenizer: Any, text: str, rows: list[Tensor]) -> int:
    """Count the UTF-8 bytes of a text that the rows of its blocks predict.

    Rows follow one another in the text, each after the tokens that begin a text.
    """
    plain = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, spans, first = plain["input_ids"], plain["offset_mapping"], rows[0].tolist()
    lead = next(n for n in range(len(first) + 1) if first[n:] == ids[: len(first) - n])
    count = position = 0
    for row in rows:
        end = position + len(row) - lead
        begin = position + (0 if lead else 1)
        count += len(text[spans[begin][0] : spans[end - 1][1]].encode())
        position = end
    return count


def run_batches(
    job: Job,
    batches: list[Tensor],
    rounding: Rounding | None,
    tell: Progress,
    take: Callable[[int, Tensor], Result],
    left: Callable[[Unit], None] = lambda unit: None,
) -> list[Result]:
    """Run all batches in lockstep.

    Args:
        job: The checkpoint.
        batches: Token ids [B, T] on the job's device.
        rounding: Rounds as engines do, where not None.
        tell: Hears of progress.
        take: Called with a batch's position and its logits [B, T, V].
        left: Called with each unit that all batches have run through.

    Returns:
        What ``take`` returned for each batch.
    """
    bound_caches()
    model, store = job.model, job.store()
    watch = InputWatch(lambda site, x, batched: None)
    if rounding is not None:
        watch = InputWatch(rounding.inputs.visit, rounding.inputs.amend)
    watched = rounding.inputs.entries if rounding else set()
    units = job.plan.units
    done: set[str] = set()

    def entered(loaded: Loaded) -> None:
        entries = model.state_dict(keep_vars=True)
        watch.watch({entry: entries[entry] for entry in loaded.unit.entries if entry in watched})

    def leaving(loaded: Loaded, give_back: Callable[[], None]) -> None:
        give_back()
        if rounding is not None:
            rounding.inputs.forget(loaded.unit.entries)
        left(loaded.unit)
        done.add(loaded.unit.name)
        tell(f"unit {loaded.unit.name}", len(done), len(units))

    def forward(index: int) -> Result:
        with streamed.rows, job.products(), watch, model_code(model):
            logits_BTV = model(input_ids=batches[index], use_cache=False).logits
        return take(index, logits_BTV)

    _, budget = job.unit_bytes()
    streamed = StreamedModel(model, store, units, budget=budget, entered=entered, leaving=leaving)
    seen = rounding.cache.watching() if rounding and rounding.cache else nullcontext()
    with eager_experts(model), torch.inference_mode(), seen, streamed:
        return streamed.run_together([partial(forward, index) for index in range(len(batches))])


def _summed_loss(logits_BTV: Tensor, targets_BT: Tensor) -> float:
    """Return the sum of ``-log_softmax(logits)[target]``, each float32, added up in float64."""
    total = torch.zeros((), dtype=torch.float64, device=logits_BTV.device)
    step = max(1, _LOSS_CHUNK // logits_BTV.shape[-1])
    for logits_TV, targets_T in zip(logits_BTV, targets_BT, strict=True):
        for start in range(0, len(targets_T), step):
            part_NV = logits_TV[start : start + step].float()
            part_N = targets_T[start : start + step]
            losses_N = functional.cross_entropy(part_NV, part_N, reduction="none")
            total += losses_N.double().sum()
    return float(total)
