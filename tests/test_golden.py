"""Byte for byte what NVIDIA Model Optimizer 0.47 wrote, with ``numerics="modelopt"``.

The peer's files were made on an Intel machine with AMX, one thread, transformers 5.14.1. Weights
and their scales do not depend on the machine. Activations do: ``scales_without_amx.json`` holds the
15 scales that came out otherwise when the peer itself was run on a machine with AVX-512 alone. On
both kinds of machine every scale must be the peer's; on others, and under other releases, they
agree to two steps of bfloat16. So do biases of caches, which are means of keys and values, wherever
there is no AMX: processors without it differ there among themselves. Searches choose by
activations, so they are compared on the kind of machine that the peer ran on alone; the choices by
local Hessians came out the same on both. Singular vectors do not, so SVDQuant's weights are
compared as what its tensors stand for. Cases that end in ``@tf457`` were made with transformers
4.57, whose experts are modules of their own; later releases add up experts of Mixtral otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file

from modelopt_lite import Recipe, quantize_and_export
from modelopt_lite.formats.linear import FORMATS
from modelopt_lite.verify.matchers import vllm_excluded

GOLDEN = Path(__file__).parent / "data" / "golden"
CASES = sorted(path.name for path in GOLDEN.iterdir() if (path / "export").is_dir())
RECIPES: dict[str, str | Recipe] = {
    "int4_wo": "int4_weight_only",
    "nvfp4_local_hessian": "nvfp4_w4a4_weight_local_hessian",
    "kv_fp8_only": Recipe(name="kv_fp8_only", weights="none", kv_cache="fp8"),
    # The peer's preset is not calibrated; with "algorithm: max" it is what ours is.
    "w4a8_mxfp4_fp8": Recipe(name="dynamic", weights="w4a8_mxfp4_fp8_dynamic"),
    "w4a8_mxfp4_fp8_max": "w4a8_mxfp4_fp8",
}
SEARCHED = ("awq", "gptq")
WITH_FACTORS = "llama-nvfp4_svdquant"
MADE_WITHOUT_AMX = {"llama-int4_gptq"}
HAS_AMX = torch.cpu._is_amx_tile_supported()
KNOWN_MACHINE = (
    transformers.__version__ == "5.14.1"
    and torch.__version__.startswith("2.13")
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
)
TWO_STEPS = 2**-6
NVFP4 = ("weight", "weight_scale", "weight_scale_2")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def source_of(case: str) -> Path:
    """The peer's checkpoint; releases before 5 read the name of an older key."""
    return GOLDEN / "inputs" / case.split("-", 1)[0]


def skip_where_it_cannot_be(case: str) -> None:
    release = Version(transformers.__version__)
    if case.startswith("qwen3_moe") and release < Version("5.1"):
        pytest.skip("transformers before 5.1 does not read num_local_experts of this config")
    if case.startswith("mixtral") and case.endswith("@tf457"):
        if release >= Version("5"):
            pytest.skip("made with transformers 4.57, which adds up experts in another order")
    elif any(part in case for part in SEARCHED) and not (
        KNOWN_MACHINE and (case not in MADE_WITHOUT_AMX) == HAS_AMX
    ):
        pytest.skip("what a search chooses depends on the processor's products")
    if "hessian" in case and not KNOWN_MACHINE:
        pytest.skip("what a search chooses depends on the processor's products")


def export(case: str, folder: Path) -> Path:
    name, _, kv = case.split("-", 1)[1].partition("@")[0].partition("+kv_")
    source = source_of(case)
    quantize_and_export(
        source,
        export_dir=folder,
        recipe=RECIPES.get(name, name),
        kv_cache=kv or None,
        calib_data=source / "calib_ids.safetensors",
        numerics="modelopt",
        device="cpu",
        progress=False,
    )
    return folder


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def test_every_promised_case_is_there() -> None:
    assert len(CASES) == 39


@pytest.mark.parametrize("case", [case for case in CASES if case != WITH_FACTORS])
def test_tensors_are_the_peers(case: str, tmp_path: Path) -> None:
    skip_where_it_cannot_be(case)
    ours = load_file(export(case, tmp_path / "out") / "model.safetensors")
    theirs = load_file(GOLDEN / case / "export" / "model.safetensors")
    if not HAS_AMX:
        elsewhere = json.loads((GOLDEN / "scales_without_amx.json").read_text())
        theirs |= {name: torch.tensor(v) for name, v in elsewhere.get(case, {}).items()}
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert ours[name].shape == tensor.shape, name
        is_seen = name.endswith(("input_scale", "k_scale", "v_scale")) and not KNOWN_MACHINE
        if is_seen or (name.endswith(("k_bias", "v_bias")) and not (KNOWN_MACHINE and HAS_AMX)):
            torch.testing.assert_close(ours[name], tensor, rtol=TWO_STEPS, atol=0)
        else:
            assert torch.equal(raw(ours[name]), raw(tensor)), name


def test_svdquant_stands_for_the_same_weights(tmp_path: Path) -> None:
    """Scales of channels but for their last bit, and weights but for what four bits round."""
    ours = load_file(export(WITH_FACTORS, tmp_path / "out") / "model.safetensors")
    theirs = load_file(GOLDEN / WITH_FACTORS / "export" / "model.safetensors")
    assert {n: (t.dtype, t.shape) for n, t in ours.items()} == {
        n: (t.dtype, t.shape) for n, t in theirs.items()
    }
    smoothed = [n.removesuffix(".pre_quant_scale") for n in theirs if "pre_quant_scale" in n]
    assert len(smoothed) == 14
    for name in smoothed:
        scales = [side[f"{name}.pre_quant_scale"].float() for side in (ours, theirs)]
        torch.testing.assert_close(*scales, rtol=TWO_STEPS, atol=0)
        one, other = (stands_for(side, name) for side in (ours, theirs))
        # Rounding to four bits leaves 0.09 of a matrix; most codes are the same.
        assert float((one - other).norm() / other.norm()) < 0.05, name
        without = stands_for(theirs, name, factors=False)
        assert float((without - other).norm() / other.norm()) > 0.1


def stands_for(
    tensors: dict[str, torch.Tensor], name: str, *, factors: bool = True
) -> torch.Tensor:
    """The weight that an engine multiplies smoothed inputs by."""
    parts = {suffix: tensors[f"{name}.{suffix}"] for suffix in NVFP4}
    a, b = (tensors[f"{name}.weight_quantizer._svdquant_lora_{x}"].float() for x in "ab")
    residual = FORMATS["nvfp4"].dequantize(parts, torch.float32)
    return residual + b @ a if factors else residual


def readable(path: Path) -> dict[str, Any]:
    """A config; the peer leaves marks of its own in Nemotron-H's names, which no engine reads."""
    found: dict[str, Any] = json.loads(re.sub(r"\.\\u0000[^\"]*", "", path.read_text()))
    return found


def excluded(config: dict[str, Any], names: list[str], key: str) -> set[str]:
    return {name for name in names if vllm_excluded(name, config.get(key, []))}


@pytest.mark.parametrize("case", CASES)
def test_configs_say_the_same_to_an_engine(case: str, tmp_path: Path) -> None:
    skip_where_it_cannot_be(case)
    ours, theirs = export(case, tmp_path / "out"), GOLDEN / case / "export"
    names = [
        name.removesuffix(".weight")
        for name, tensor in load_file(theirs / "model.safetensors").items()
        if name.endswith(".weight") and tensor.ndim > 1
        # The peer forgets the embedding of Gemma 3, which it does not quantize either, and calls
        # that of Nemotron-H by a name that the file does not have.
        if not (case.startswith(("gemma3", "nemotron_h")) and "embed" in name)
    ]
    mine, other = (readable(f / "hf_quant_config.json") for f in (ours, theirs))
    for key in ("quant_algo", "kv_cache_quant_algo", "group_size"):
        assert mine["quantization"].get(key) == other["quantization"].get(key)
    key = "exclude_modules"
    assert excluded(mine["quantization"], names, key) == excluded(other["quantization"], names, key)
    assert mine["quantization"].keys() == other["quantization"].keys()
    flat, other_flat = (readable(f / "config.json")["quantization_config"] for f in (ours, theirs))
    # Groups of SVDQuant have keys of the peer's own, and no engine that reads them.
    groups = () if "svdquant" in case else ("config_groups",)
    for key in ("quant_algo", "quant_method", "kv_cache_scheme", *groups):
        assert flat.get(key) == other_flat.get(key)
    assert excluded(flat, names, "ignore") == excluded(other_flat, names, "ignore")
