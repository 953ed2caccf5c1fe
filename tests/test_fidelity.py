"""Predictions of an export against its source's: by an independent reference, and side by side."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from modelopt_lite import perplexity, quantize_and_export
from modelopt_lite.checking import check_exports
from modelopt_lite.checkpoint.dequant import open_source
from modelopt_lite.errors import CalibrationError, CheckpointError, NonFiniteError
from modelopt_lite.fidelity import compare_predictions
from modelopt_lite.offload.store import WeightStore

Make = Callable[..., Path]
IDS = [torch.randint(3, 64, (2, n), generator=torch.Generator().manual_seed(n)) for n in (16, 9)]


def exported(source: Path, recipe: str = "w4a16_nvfp4") -> Path:
    out = source.parent / "out"
    quantize_and_export(source, export_dir=out, recipe=recipe, calib_data=IDS, progress=False)
    return out


def reference(source: Path, values: dict[str, Tensor] | None) -> tuple[list[Tensor], list[Tensor]]:
    """Logits and outputs of the first layer in transformers, with other weights where given."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    if values is not None:
        model.load_state_dict(values, strict=False)
    outputs: list[Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    model.model.layers[0].register_forward_hook(keep)
    with torch.inference_mode():
        return [model(input_ids=ids).logits.float() for ids in IDS], outputs


def test_it_is_what_two_loaded_models_give(checkpoint: Make) -> None:
    source = checkpoint("llama")
    out = exported(source)
    decoded = open_source(out)
    values = {name: decoded.read(name) for name in decoded.tensors}
    (ours, first), (theirs, second) = reference(source, None), reference(source, values)
    kl, agreed, tokens = [], 0, 0
    for p, q in zip(ours, theirs, strict=True):
        logp, logq = (functional.log_softmax(x[:, :-1].double(), -1) for x in (p, q))
        kl.append((logp.exp() * (logp - logq)).sum(-1).reshape(-1))
        agreed += int((logp.argmax(-1) == logq.argmax(-1)).sum())
        tokens += kl[-1].numel()
    both = torch.cat(kl)
    error = sum(
        float((b.double() - a.double()).square().sum()) for a, b in zip(first, second, strict=True)
    )
    whole = sum(float(a.double().square().sum()) for a in first)

    got = compare_predictions(out, source, text=IDS)
    assert got.tokens == tokens == 46
    assert got.kl == pytest.approx(float(both.mean()), rel=1e-3)
    assert got.kl_max == pytest.approx(float(both.max()), rel=1e-3)
    assert got.top1 == agreed / tokens < 1
    assert list(got.layers) == ["model.layers.0", "model.layers.1"]
    assert got.layers["model.layers.0"] == pytest.approx((error / whole) ** 0.5, rel=1e-3)
    assert 0 < got.layers["model.layers.0"] < 0.3


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_perplexities_are_those_of_each_alone(kind: str, checkpoint: Make) -> None:
    source = checkpoint(kind)
    out = exported(source, "nvfp4")
    got = compare_predictions(out, source, text=IDS)
    alone = [perplexity(folder, text=IDS).perplexity for folder in (source, out)]
    assert [got.source_perplexity, got.export_perplexity] == pytest.approx(alone, rel=1e-6)
    assert got.kl > 0


def test_a_checkpoint_predicts_as_itself(checkpoint: Make) -> None:
    source = checkpoint("llama")
    got = compare_predictions(source, source, text=IDS)
    assert (got.kl, got.kl_max, got.top1) == (0, 0, 1)
    assert set(got.layers.values()) == {0}


def test_layers_come_in_turn_so_that_memory_holds_one_of_each(
    checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint("llama")
    out = exported(source)
    inside: list[str] = []
    most = 0
    attach, detach = WeightStore.attach, WeightStore.detach

    def attached(store: WeightStore, loaded: Any) -> None:
        nonlocal most
        inside.append(loaded.unit.name)
        most = max(most, sum("layers" in name for name in inside))
        attach(store, loaded)

    def detached(store: WeightStore, unit: Any) -> None:
        inside.remove(unit.name)
        detach(store, unit)

    monkeypatch.setattr(WeightStore, "attach", attached)
    monkeypatch.setattr(WeightStore, "detach", detached)
    compare_predictions(out, source, text=IDS)
    assert most <= 2
    assert inside == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seq_len": 1}, "give at least 2 tokens"),
        ({"max_tokens": -5}, "give at least 2 tokens"),
        ({"max_tokens": 0}, "give at least 2 tokens"),
        ({"text": "nowhere.txt"}, "does not exist"),
    ],
)
def test_a_text_is_refused_before_anything_is_read(
    checkpoint: Make, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str
) -> None:
    def examined(*arguments: Any, **named: Any) -> None:
        raise AssertionError("hours were spent")

    monkeypatch.setattr("modelopt_lite.checking.examine", examined)
    source = checkpoint("llama")
    with pytest.raises(CalibrationError, match=words):
        check_exports(source, source=source, deep=True, **{"text": "cpython", **options})
    with pytest.raises(CalibrationError, match=words):
        compare_predictions("nowhere", "nowhere", **options)


def test_another_model_is_refused(checkpoint: Make) -> None:
    with pytest.raises(
        CheckpointError, match=r"'llama' with 64 tokens and 2 layers.*'qwen3_moe'.*the source"
    ):
        compare_predictions(checkpoint("llama"), checkpoint("qwen3_moe"), text=IDS)


def test_a_side_that_fails_ends_the_other(checkpoint: Make, tmp_path: Path) -> None:
    """The error is the failing side's own, and the source can be run again."""
    source = checkpoint("llama")
    broken = Path(shutil.copytree(source, tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    tensors["lm_head.weight"].fill_(float("nan"))
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"broken predicts NaN"):
        compare_predictions(broken, source, text=IDS)
    config = json.loads((broken / "config.json").read_text())
    config["num_hidden_layers"] = 1
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"1 layers.*2 layers"):
        compare_predictions(broken, source, text=IDS)
    assert not torch.is_inference_mode_enabled()
    assert compare_predictions(source, source, text=IDS).kl == 0
