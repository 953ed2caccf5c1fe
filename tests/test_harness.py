"""Tasks of lm-evaluation-harness, run in lockstep; ``nox -s eval`` installs the harness."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import log_softmax

import modelopt_lite
from modelopt_lite import quantize_and_export
from modelopt_lite.checkpoint.dequant import open_source
from modelopt_lite.errors import CalibrationError, RecipeError
from modelopt_lite.evaluate import open_job
from modelopt_lite.harness import run_tasks

TINY = Path(modelopt_lite.__file__).parent / "data" / "tiny_qwen3_moe"
MakeCheckpoint = Callable[..., Path]
TASK = """task: tiny_words
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
QUESTIONS = [
    {"question": "The value is", "choices": [" returned", " zqxjv"], "answer": 0},
    {"question": "This method", "choices": [" qqzzxx", " is called"], "answer": 1},
    {"question": "If the", "choices": [" object", " zzzzzz", " wxqjk"], "answer": 0},
]


@pytest.mark.parametrize(
    "options", [{"tasks": []}, {"limit": 0}, {"limit": -1}, {"num_fewshot": -1}]
)
def test_numbers_that_mean_nothing(options: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="name at least one task"):
        run_tasks(TINY, **{"tasks": ["arc_easy"], **options})


def test_without_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(RecipeError, match=r"pip install 'modelopt-lite\[eval\]'"):
        run_tasks(TINY, ["arc_easy"])


@pytest.fixture
def lockstep() -> Any:
    pytest.importorskip("lm_eval", reason="tasks need lm-eval (nox -s eval)")
    from modelopt_lite.harness_model import LockstepModel

    return LockstepModel


def model_of(lockstep: Any, folder: Path, **options: Any) -> Any:
    from modelopt_lite.calibrate.data import load_tokenizer

    job = open_job(folder, open_source(folder), False, "cpu")
    tokenizer = load_tokenizer(folder, False)
    return lockstep(job, tokenizer, lambda phase, done, total: None, **options)


def asked(*arguments: Any) -> Any:
    return SimpleNamespace(args=arguments)


@pytest.fixture
def reference() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16).eval()


def test_log_likelihoods_are_those_of_the_model(lockstep: Any, reference: Any) -> None:
    model = model_of(lockstep, TINY, batch_size=2)
    requests = [asked("The value is", " returned"), asked("a", "b"), asked("The value", " of x")]
    requests.append(asked("", "some text"))
    found = model.loglikelihood(requests, disable_tqdm=True)
    for request, (score, greedy) in zip(requests, found, strict=True):
        context, continuation = request.args
        whole = model.tok_encode(context + continuation)
        count = len(model.tok_encode(continuation, add_special_tokens=False))
        if not context:
            whole = [model.prefix_token_id, *whole[-count:]]
        with torch.no_grad():
            logits = reference(torch.tensor([whole[:-1]])).logits[0, -count:].float()
        target = torch.tensor(whole[-count:])
        wanted = log_softmax(logits, -1).gather(1, target[:, None]).sum().item()
        assert score == pytest.approx(wanted, rel=2e-2)
        assert greedy == bool((logits.argmax(-1) == target).all())


def test_whole_texts_are_summed_over_windows(lockstep: Any) -> None:
    model = model_of(lockstep, TINY)
    text = "the quick brown fox jumps over the lazy dog"
    tokens = model.tok_encode(text, add_special_tokens=False)
    model.max_length = 16
    [found] = model.loglikelihood_rolling([asked(text)], disable_tqdm=True)
    pieces, start = 0.0, 0
    while start < len(tokens):
        part = tokens[start : start + 16]
        before = [model.prefix_token_id] if start == 0 else [tokens[start - 1]]
        pieces += model._loglikelihood_tokens([(None, before, part)])[0][0]
        start += 16
    assert len(tokens) % 16  # the last window is a shorter one, with context before it
    assert found == pytest.approx(pieces, rel=0.2)
    assert found < 0


def test_continues_with_the_likeliest(lockstep: Any, reference: Any) -> None:
    model = model_of(lockstep, TINY)
    contexts = ["The value is", "If"]
    options = {"until": [], "max_gen_toks": 5, "do_sample": False}
    found = model.generate_until([asked(c, options) for c in contexts], disable_tqdm=True)
    for context, text in zip(contexts, found, strict=True):
        ids = torch.tensor([model.tok_encode(context)])
        start = ids.shape[1]
        for _ in range(5):
            with torch.no_grad():
                best = reference(ids).logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, best], 1)
            if best.item() == model.eot_token_id:
                break
        assert text == model.tokenizer.decode(ids[0, start:], skip_special_tokens=True)
    letter = found[0][2]
    [cut] = model.generate_until([asked(contexts[0], {**options, "until": letter})])
    assert cut == found[0][: found[0].index(letter)]
    with pytest.raises(CalibrationError, match="do_sample"):
        model.generate_until([asked("x", {"do_sample": True})])


def test_a_task_on_an_original_and_on_an_export(lockstep: Any, tmp_path: Path) -> None:
    questions = tmp_path / "questions.json"
    questions.write_text("\n".join(map(json.dumps, QUESTIONS)), encoding="utf-8")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "tiny_words.yaml").write_text(TASK.format(file=questions), encoding="utf-8")
    out = tmp_path / "out"
    quantize_and_export(TINY, export_dir=out, recipe="w4a16_nvfp4", progress=False)
    for folder in (TINY, out):
        [row] = run_tasks(folder, ["tiny_words"], include_path=tasks)
        assert row["on"] == "tiny_words: acc"
        assert row["value"] == 1.0  # it was trained on this kind of text
        assert 0 <= row["stderr"] < 1
    with pytest.raises(RecipeError, match="no task 'tiny_wrods'"):
        run_tasks(TINY, ["tiny_wrods"], include_path=tasks)
