"""A checkpoint as lm-evaluation-harness asks a model; imported where that is installed.

Shape suffixes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from modelopt_lite.errors import CalibrationError
from modelopt_lite.evaluate import fitting_rows, run_batches
from modelopt_lite.job import Job
from modelopt_lite.progress import Progress
from modelopt_lite.rounding import rounding_of

_LENGTH = 2048  # tokens, where the config states none
_GENERATED = 256  # tokens, where a task states none


class LockstepModel(TemplateLM):  # type: ignore[misc]
    """Answers all requests of a kind in one pass of all batches through the layers.

    Args:
        job: The checkpoint, with a plan that quantizes nothing.
        tokenizer: Its tokenizer.
        tell: Told how far a pass is.
        batch_size: Sequences a batch.
        activations: Round inputs of quantized layers, keys and values as engines do.
    """

    def __init__(
        self,
        job: Job,
        tokenizer: Any,
        tell: Progress,
        *,
        batch_size: int | None = None,
        activations: bool = True,
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self._job = job
        self._tell = tell
        self._batch_size = batch_size
        self._activations = activations
        text = job.model.config.get_text_config()
        self.max_length = int(getattr(text, "max_position_embeddings", None) or _LENGTH)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text, and stands before one."""
        for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
            if (token := getattr(self.tokenizer, name, None)) is not None:
                return int(token)
        raise CalibrationError(
            f"the tokenizer of {self._job.folder} names no token that ends a text; state eos_token "
            "in tokenizer_config.json"
        )

    @property
    def prefix_token_id(self) -> int:
        """The token that begins a text, where there is one."""
        token = getattr(self.tokenizer, "bos_token_id", None)
        return self.eot_token_id if token is None else int(token)

    @property
    def tokenizer_name(self) -> str:
        """Names the chat template in the harness's results."""
        return str(self._job.folder.name)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as the text that the model was trained on."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **ignored: Any
    ) -> list[int]:
        """Return the tokens of a text."""
        special = True if add_special_tokens is None else add_special_tokens
        begin = self.tokenizer.bos_token
        if add_special_tokens is None and begin and string.startswith(begin):
            special = False
        return list(self.tokenizer.encode(string, add_special_tokens=special))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **ignored: Any
    ) -> list[tuple[float, bool]]:
        """Return, of each continuation, its log-probability and whether it is the likeliest."""
        rows, counts = [], []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise CalibrationError(
                    f"a continuation has {len(continuation)} tokens, and the model takes "
                    f"{self.max_length}; leave out the task"
                )
            rows.append([*context, *continuation][-self.max_length - 1 :])
            counts.append(len(continuation))
        found: list[tuple[float, bool]] = [(0.0, True)] * len(rows)

        def take(indices: list[int], logits_BTV: Tensor) -> None:
            for index, logits_TV in zip(indices, logits_BTV, strict=True):
                if count := counts[index]:
                    target_T = torch.tensor(rows[index][-count:], device=logits_TV.device)
                    found[index] = _score(logits_TV[-count:], target_T)

        self._run([row[:-1] for row in rows], take)
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each whole text, in windows that do not overlap."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            for window in get_rolling_token_windows(
                tokens, self.prefix_token_id, self.max_length, 1
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(owner)
        sums = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[owner] += score
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each text with its likeliest tokens until it says one of the words to stop at.

        Raises:
            CalibrationError: A task wants tokens drawn at random.
        """
        rows, starts, stops, left = [], [], [], []
        for request in requests:
            context, options = request.args
            if options.get("do_sample"):
                raise CalibrationError(
                    "the task draws tokens at random (do_sample), which is not supported; give one "
                    "that takes the likeliest"
                )
            until = options.get("until") or []
            most = int(options.get("max_gen_toks", _GENERATED))
            row = self.tok_encode(context)[-max(1, self.max_length - most) :]
            rows.append(row)
            starts.append(len(row))
            stops.append([until] if isinstance(until, str) else list(until))
            left.append(most)
        said = [""] * len(rows)
        while going := [n for n in range(len(rows)) if left[n] > 0]:
            self._append(rows, going)
            for n in going:
                left[n] -= 1
                ended = rows[n][-1] == self.eot_token_id
                said[n] = self.tokenizer.decode(
                    rows[n][starts[n] : -1 if ended else None], skip_special_tokens=True
                )
                cut = min((at for s in stops[n] if s and (at := said[n].find(s)) >= 0), default=-1)
                if cut >= 0:
                    said[n] = said[n][:cut]
                if ended or cut >= 0 or len(rows[n]) >= self.max_length:
                    left[n] = 0
        return said

    def _append(self, rows: list[list[int]], going: list[int]) -> None:
        """Append to some rows the token that is the likeliest next."""

        def take(indices: list[int], logits_BTV: Tensor) -> None:
            for index, token in zip(indices, logits_BTV[:, -1].argmax(-1).tolist(), strict=True):
                rows[going[index]].append(int(token))

        self._run([rows[n] for n in going], take)

    def _run(self, rows: list[list[int]], take: Any) -> None:
        """Run rows through the model; those of one length share a batch, so none is padded."""
        job = self._job
        by_length: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            if row:
                by_length.setdefault(len(row), []).append(index)
        batches, members = [], []
        for length, indices in by_length.items():
            size = min(self._batch_size or 8, fitting_rows(job, length))
            for start in range(0, len(indices), size):
                members.append(indices[start : start + size])
                ids_BT = torch.tensor([rows[n] for n in members[-1]])
                batches.append(ids_BT.to(job.device))
        if batches:
            rounding = rounding_of(job, activations=self._activations)
            run_batches(
                job, batches, rounding, self._tell, lambda n, logits: take(members[n], logits)
            )


def _score(logits_TV: Tensor, target_T: Tensor) -> tuple[float, bool]:
    """Return the summed log-probability of tokens, and whether each is the likeliest."""
    losses_T = torch.nn.functional.cross_entropy(logits_TV.float(), target_T, reduction="none")
    greedy = bool((logits_TV.argmax(-1) == target_T).all())
    return -float(losses_T.double().sum()), greedy
