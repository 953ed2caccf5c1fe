"""Perplexity against plain transformers, and against inputs rounded by code of the test's own.

Shape suffixes: B sequences, T tokens, K columns, N rows.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

import modelopt_lite.evaluate as module
from modelopt_lite.api import quantize_and_export
from modelopt_lite.build import eager_experts
from modelopt_lite.calibrate.products import fast_products
from modelopt_lite.calibrate.text import evaluation_text
from modelopt_lite.checkpoint.dequant import open_source
from modelopt_lite.errors import CalibrationError, NonFiniteError, OutputError
from modelopt_lite.evaluate import perplexity

GOLDEN = Path(__file__).parent / "data" / "golden"
INPUTS = GOLDEN / "inputs"
TINY = Path(module.__file__).parent / "data" / "tiny_qwen3_moe"
FORMATS = (
    "fp8",
    "fp8_per_channel_per_token",
    "int8_per_channel_per_token",
    "nvfp4",
    "w4a16_nvfp4",
)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
Round = Callable[[Tensor, float | None], Tensor]


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A golden input whose config names the number of experts as both 4.57 and 5 spell it."""
    folder = tmp_path_factory.mktemp("moe") / "qwen3_moe"
    shutil.copytree(INPUTS / "qwen3_moe", folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_experts"] = config["num_local_experts"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def input_of(name: str, moe: Path) -> Path:
    return moe if name == "qwen3_moe" else INPUTS / name


def ids_of(folder: Path) -> list[Tensor]:
    """Return the [B, T] batches that lie beside a golden input."""
    return list(load_file(folder / "calib_ids.safetensors").values())


def plain_nll(folder: Path, batches: Iterable[Tensor]) -> float:
    """Mean loss of the model that transformers loads whole."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with eager_experts(model):
        return loop_nll(model, batches)


def loop_nll(model: Any, batches: Iterable[Tensor]) -> float:
    total, count = 0.0, 0
    for ids_BT in batches:
        with torch.no_grad(), fast_products(torch.device("cpu")):
            logits = model(input_ids=ids_BT, use_cache=False).logits.float()
        targets_N = ids_BT[:, 1:].flatten()
        loss_N = functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets_N, reduction="none")
        total += float(loss_N.double().sum())
        count += len(targets_N)
    return total / count


def round_fp8(x: Tensor, scale: float | Tensor | None) -> Tensor:
    assert scale is not None
    codes = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(x.dtype)


def round_per_token(x: Tensor, scale: float | None) -> Tensor:
    return round_fp8(x, x.float().abs().amax(-1, keepdim=True) / 448)


def round_integers_per_token(x: Tensor, scale: float | None) -> Tensor:
    step = x.float().abs().amax(-1, keepdim=True) / 127
    return ((x.float() / step).round() * step).nan_to_num().to(x.dtype)


def round_nvfp4(x: Tensor, scale: float | None) -> Tensor:
    """Blocks of 16: a step in E4M3 under the global scale, then the nearest of the 8 magnitudes."""
    assert scale is not None
    x_N16 = x.float().reshape(-1, 16)
    ratio_N1 = x_N16.abs().amax(-1, keepdim=True) / (scale * 6)
    step_N1 = ratio_N1.clamp(max=448).to(torch.float8_e4m3fn).float() * scale
    size = torch.where(step_N1 > 0, x_N16.abs() / step_N1, 0.0)
    distance = (size[..., None] - E2M1).abs()
    # Ties go to the even code: with even codes a hair nearer, argmin decides so.
    odd = torch.arange(8) % 2 == 1
    nearest = (distance + odd * 1e-7).argmin(-1)
    return (E2M1[nearest] * step_N1).copysign(x_N16).view(x.shape).to(x.dtype)


def leave(x: Tensor, scale: float | None) -> Tensor:
    return x


ROUND: dict[str, Round] = {
    "fp8": round_fp8,
    "fp8_per_channel_per_token": round_per_token,
    "int8_per_channel_per_token": round_integers_per_token,
    "nvfp4": round_nvfp4,
    "w4a16_nvfp4": leave,
}


def decode(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Decode one exported weight, by the definition of its format."""
    codes, scale = tensors[name], tensors[f"{name}_scale"].float()
    if codes.dtype in (torch.float8_e4m3fn, torch.int8):
        return (codes.float() * (scale[:, None] if scale.ndim else scale)).bfloat16()
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    values = E2M1[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
    step = (scale * tensors[f"{name}_scale_2"]).repeat_interleave(16, -1)
    return (values * step).bfloat16()


def decoded_copy(source: Path, export: Path, target: Path) -> dict[str, float | None]:
    """Write a plain checkpoint with an export's decoded weights; return quantized module -> scale.

    The scale is None where the export has no static one.
    """
    tensors = load_file(export / "model.safetensors")
    quantized = {n.removesuffix(".weight") for n in tensors if f"{n}_scale" in tensors}
    plain = {
        name: decode(tensors, name) if name.removesuffix(".weight") in quantized else value
        for name, value in tensors.items()
        if not name.endswith("_scale") and not name.endswith("_scale_2")
    }
    target.mkdir()
    save_file(plain, target / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(source / "config.json", target)
    scales = {name: tensors.get(f"{name}.input_scale") for name in quantized}
    return {name: None if s is None else float(s) for name, s in scales.items()}


@contextmanager
def rounded_inputs(
    monkeypatch: pytest.MonkeyPatch,
    model: Any,
    scales: dict[str, float | None],
    rounding: Round,
) -> Iterator[set[int]]:
    """Round what enters ``functional.linear``; yields the addresses of weights that were met."""
    at: dict[int, float | None] = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3:  # experts of a layer in one parameter
            container, _, leaf = name.rpartition(".")
            part = {"gate_up_proj": "gate_proj"}.get(leaf, leaf)
            for expert, weight in enumerate(parameter):
                at[weight.data_ptr()] = scales[f"{container}.{expert}.{part}"]
        elif name.removesuffix(".weight") in scales:
            at[parameter.data_ptr()] = scales[name.removesuffix(".weight")]
    met: set[int] = set()
    before = functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        address = weight.data_ptr()
        if address in at:
            met.add(address)
            x = rounding(x, at[address])
        return before(x, weight, bias)

    with monkeypatch.context() as patch:
        patch.setattr(functional, "linear", linear)
        yield met
    assert met, "no product went through functional.linear"


def export(source: Path, target: Path, recipe: str) -> Path:
    """Quantize, calibrated on the golden batches or, where there are none, on a few words."""
    golden = (source / "calib_ids.safetensors").is_file()
    data: Any = ids_of(source) if golden else ["the quick brown fox " * 40]
    options: dict[str, Any] = {"recipe": recipe, "calib_data": data}
    quantize_and_export(source, export_dir=target, verify=False, progress=False, **options)
    return target


@pytest.mark.parametrize(
    "name", ["llama", "llama_tied", "llama_f32", "phi3", "mixtral", "qwen3_moe", "gpt_oss"]
)
def test_original_checkpoint_equals_plain_transformers(name: str, moe: Path) -> None:
    folder = input_of(name, moe)
    batches = ids_of(folder)
    found = perplexity(folder, text=batches)
    assert found.nll == pytest.approx(plain_nll(folder, batches), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(found.nll))
    assert found.tokens == sum(ids_BT[:, 1:].numel() for ids_BT in batches)
    assert not found.quantized
    assert found.bits_per_byte is None


def test_bundled_checkpoint_on_the_default_text_equals_plain_transformers() -> None:
    found = perplexity(TINY, seq_len=128, max_tokens=16 * 128, batch_size=4)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    ids = tokenizer(evaluation_text(), verbose=False)["input_ids"][: 16 * 128]
    batches = torch.tensor(ids).view(4, 4, 128)
    assert found.nll == pytest.approx(plain_nll(TINY, batches), rel=1e-6)
    assert found.tokens == 16 * 127
    assert 1 < found.perplexity < 8  # trained, on bytes

    # Its tokens are bytes.
    assert found.bits_per_byte == pytest.approx(found.nll / math.log(2), rel=1e-6)


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_export_equals_decoded_weights_with_rounded_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moe: Path, name: str, recipe: str
) -> None:
    source = input_of(name, moe)
    batches = ids_of(source)
    folder = export(source, tmp_path / "export", recipe)
    scales = decoded_copy(source, folder, tmp_path / "plain")

    weights_only = perplexity(folder, text=batches, activations=False)
    assert weights_only.quantized
    assert weights_only.nll == pytest.approx(plain_nll(tmp_path / "plain", batches), rel=1e-6)

    served = perplexity(folder, text=batches)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype="auto").eval()
    with eager_experts(model), rounded_inputs(monkeypatch, model, scales, ROUND[recipe]):
        expected = loop_nll(model, batches)
    assert served.nll == pytest.approx(expected, rel=1e-6)
    assert (served.nll == weights_only.nll) == (recipe == "w4a16_nvfp4")


@pytest.mark.parametrize("recipe", FORMATS)
def test_export_of_a_trained_model_stays_close(tmp_path: Path, recipe: str) -> None:
    folder = export(TINY, tmp_path / "export", recipe)
    options: dict[str, Any] = {"seq_len": 128, "max_tokens": 1024}
    source, quantized = perplexity(TINY, **options), perplexity(folder, **options)
    allowed = 0.05 if recipe.startswith("fp8") else 0.25
    assert quantized.nll == pytest.approx(source.nll, rel=allowed)
    assert quantized.nll != source.nll
    assert quantized.bits_per_byte is not None  # the tokenizer came along


@pytest.mark.parametrize(
    "case",
    [
        "gpt_oss-fp8",
        "deepseek_v3-fp8",
        "glm4_moe-nvfp4",
        "phi3-fp8",
        "mixtral-fp8",
        "llama_tied-fp8",
    ],
)
def test_exports_of_model_optimizer_are_read(case: str) -> None:
    source = INPUTS / json.loads((GOLDEN / case / "case.json").read_text())["input"].split("/")[-1]
    batches = ids_of(source)[:2]
    original = perplexity(source, text=batches)
    weights_only = perplexity(GOLDEN / case / "export", text=batches, activations=False)
    served = perplexity(GOLDEN / case / "export", text=batches)
    assert len({original.nll, weights_only.nll, served.nll}) == 3
    assert served.nll == pytest.approx(original.nll, rel=0.05)


def test_inputs_of_other_dialects_are_left_alone(tmp_path: Path) -> None:
    folder = shutil.copytree(INPUTS / "llama", tmp_path / "block")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    rows, columns = tensors[name].shape
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.ones(-(-rows // 16), -(-columns // 16))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps(config))

    batches = ids_of(INPUTS / "llama")[:1]
    found = perplexity(folder, text=batches)
    assert found.quantized
    assert found.nll == perplexity(folder, text=batches, activations=False).nll
    assert found.nll == pytest.approx(perplexity(INPUTS / "llama", text=batches).nll, rel=0.05)


def test_every_weight_is_read_once(monkeypatch: pytest.MonkeyPatch, moe: Path) -> None:
    source = open_source(moe)
    monkeypatch.setattr(module, "open_source", lambda path: source)
    told: list[tuple[str, int, int]] = []
    perplexity(
        moe,
        text=torch.cat(ids_of(moe)),
        batch_size=1,
        progress=lambda *event: told.append(event),
    )
    assert set(source.reads.values()) == {1}
    assert set(source.reads) == set(source.tensors)
    assert told[-1][1:] == (len(told), len(told))


def test_batches_and_loss_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, batches = INPUTS / "llama_f32", ids_of(INPUTS / "llama_f32")
    once = perplexity(folder, text=batches)
    monkeypatch.setattr(module, "_LOSS_CHUNK", 7)
    assert perplexity(folder, text=batches).nll == pytest.approx(once.nll, rel=1e-12)
    assert perplexity(folder, text=batches, batch_size=1).nll == pytest.approx(once.nll, rel=1e-6)
    monkeypatch.setattr(module, "MOST_LOGITS", 1)
    assert perplexity(folder, text=batches).nll == pytest.approx(once.nll, rel=1e-6)


def test_text_forms_are_equal(tmp_path: Path) -> None:
    text = "Grüße aus dem Süden. " * 8
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    ids = torch.tensor([list(text.encode())[:160]]).view(5, 32)
    given = perplexity(TINY, text=text, seq_len=32)
    for other in (tmp_path / "a.txt", str(tmp_path / "a.txt")):
        assert perplexity(TINY, text=other, seq_len=32).nll == given.nll
    assert perplexity(TINY, text=ids).tokens == 5 * 31
    assert perplexity(TINY, text=ids, max_tokens=70).tokens == 31 + 31 + 5
    assert perplexity(TINY, text=ids, max_tokens=65).tokens == 31 + 31  # one token predicts none
    assert perplexity(TINY, text="one short line").tokens == 13


def test_bytes_are_those_of_the_predicted_tokens() -> None:
    text = "Grüße. " * 30  # 9 bytes, 7 characters
    found = perplexity(TINY, text=text, seq_len=27)
    assert found.tokens == 10 * 26
    assert found.bits_per_byte == pytest.approx(found.nll / math.log(2), rel=1e-9)


def test_a_token_that_begins_each_block_predicts_its_first_byte(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY, tmp_path / "bos")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (name, number) = next((t["content"], t["id"]) for t in tokenizer["added_tokens"])
    begin = {"SpecialToken": {"id": name, "type_id": 0}}
    rest = {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, rest],
        "pair": [begin, rest, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))

    text = "Grüße. " * 30
    found = perplexity(folder, text=text, seq_len=28, max_tokens=9 * 28 + 10)
    assert found.tokens == 9 * 27 + 9
    assert found.bits_per_byte == pytest.approx(found.nll / math.log(2), rel=1e-9)
    ids = torch.tensor(list(text.encode())[: 9 * 27]).view(9, 27)
    ids = torch.cat([torch.full((9, 1), number), ids], 1)
    whole = perplexity(folder, text=text, seq_len=28, max_tokens=9 * 28)
    assert whole.nll == perplexity(folder, text=ids).nll


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 1}, "max_tokens 1"),
        ({"text": "no/such.txt"}, "no/such.txt' does not exist"),
        ({"text": Path("no/such")}, "no/such' does not exist"),
        ({"text": ""}, "holds no tokens"),
        ({"text": "a"}, "no sequence of the text has 2"),
        ({"text": torch.tensor([[1, 99999]])}, "token id 99999"),
        ({"text": torch.tensor([1.0])}, "give integer token ids"),
        ({"seq_len": 1}, "seq_len is 1"),
        ({"batch_size": 0}, "must be at"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        perplexity(TINY, **options)


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(CalibrationError, match="no tokenizer"):
        perplexity(INPUTS / "llama")


def test_nan_is_an_error(tmp_path: Path) -> None:
    folder = shutil.copytree(INPUTS / "llama", tmp_path / "nan")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(math.nan)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match="predicts NaN"):
        perplexity(folder, text=ids_of(INPUTS / "llama")[:1])


def plain_logits(folder: Path, batches: Iterable[Tensor]) -> list[Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return [model(ids_BT).logits for ids_BT in batches]


def test_divergence_equals_that_of_plain_transformers(tmp_path: Path) -> None:
    """KL of two models in float32, of the tokens that predict another; in either direction."""
    folders = [shutil.copytree(INPUTS / "llama_f32", tmp_path / name) for name in ("one", "two")]
    tensors = load_file(folders[1] / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    changed = {n: t + torch.randn(t.shape, generator=generator) * 0.05 for n, t in tensors.items()}
    save_file(changed, folders[1] / "model.safetensors", metadata={"format": "pt"})
    batches = ids_of(INPUTS / "llama_f32")
    logits = [plain_logits(folder, batches) for folder in folders]
    for kept, given in ((0, 1), (1, 0)):
        kept_in = tmp_path / f"kept-{kept}"
        alone = perplexity(folders[kept], text=batches, keep=kept_in, device="cpu")
        assert alone.kl is None
        found = perplexity(folders[given], text=batches, against=kept_in, device="cpu").kl
        pairs = zip(logits[kept], logits[given], strict=True)
        sums = [
            functional.kl_div(
                q[:, :-1].double().log_softmax(-1),
                p[:, :-1].double().log_softmax(-1),
                reduction="sum",
                log_target=True,
            )
            for p, q in pairs
        ]
        tokens = sum(ids.numel() - len(ids) for ids in batches)
        assert found == pytest.approx(float(sum(sums)) / tokens, rel=1e-4)
    same = perplexity(folders[0], text=batches, against=tmp_path / "kept-0", device="cpu").kl
    assert same == pytest.approx(0, abs=1e-9)


def test_divergence_from_other_predictions_is_refused(tmp_path: Path) -> None:
    folder, batches = INPUTS / "llama", ids_of(INPUTS / "llama")
    with pytest.raises(CalibrationError, match="holds no predictions of this text"):
        perplexity(folder, text=batches, against=tmp_path, device="cpu")
    perplexity(folder, text=batches, keep=tmp_path, device="cpu")
    with pytest.raises(CalibrationError, match="holds predictions of other tokens"):
        perplexity(folder, text=[ids.flip(1) for ids in batches], against=tmp_path, device="cpu")
    file = tmp_path / "batch-00000.safetensors"
    whole = file.read_bytes()
    for damaged in (b"", whole[:100], whole[:-4], b"\xff" * 64):
        file.write_bytes(damaged)
        with pytest.raises(CalibrationError, match="holds no predictions"):
            perplexity(folder, text=batches, against=tmp_path, device="cpu")
    save_file({"ids": batches[0].contiguous()}, file)
    with pytest.raises(CalibrationError, match="holds no predictions"):
        perplexity(folder, text=batches, against=tmp_path, device="cpu")


def test_predictions_that_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(module, "run_batches", lambda *given: pytest.fail("hours were spent"))
    batches = ids_of(INPUTS / "llama")
    for place in (tmp_path / "file", Path("/proc/modelopt-lite")):
        with pytest.raises(OutputError, match="predictions cannot be kept"):
            perplexity(INPUTS / "llama", text=batches, keep=place, device="cpu")
