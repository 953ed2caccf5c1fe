"""Byte for byte what NVIDIA Model Optimizer 0.47 wrote, with ``numerics="modelopt"``.

The peer's files were made on an Intel machine with AMX, one thread, transformers 5.14.1. Weights
and their scales do not depend on the machine. Activations do: ``scales_without_amx.json`` holds the
15 scales that came out otherwise when the peer itself was run on a machine with AVX-512 alone. On
both kinds of machine every scale must be the peer's; on others, and under other releases, they
agree to two steps of bfloat16. So do biases of caches, which are means of keys and values, wherever
there is no AMX: processors without it differ there among themselves. Searches choose by
activations, so they are compared on the kind of machine that the peer ran on alone. Cases that end
in ``@tf457`` were made with transformers 4.57, whose experts are modules of their own; later
releases add up experts of Mixtral otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file

from modelopt_lite import Recipe, quantize_and_export
from modelopt_lite.verify.matchers import vllm_excluded

GOLDEN = Path(__file__).parent / "data" / "golden"
CASES = sorted(path.name for path in GOLDEN.iterdir() if (path / "export").is_dir())
RECIPES: dict[str, str | Recipe] = {
    "int4_wo": "int4_weight_only",
    "kv_fp8_only": Recipe(name="kv_fp8_only", weights="none", kv_cache="fp8"),
    # The peer's preset is not calibrated; with "algorithm: max" it is what ours is.
    "w4a8_mxfp4_fp8": Recipe(name="dynamic", weights="w4a8_mxfp4_fp8_dynamic"),
    "w4a8_mxfp4_fp8_max": "w4a8_mxfp4_fp8",
}
SEARCHED = ("awq", "gptq", "svdquant", "hessian")
MADE_WITHOUT_AMX = {"llama-int4_gptq"}
HAS_AMX = torch.cpu._is_amx_tile_supported()
KNOWN_MACHINE = (
    transformers.__version__ == "5.14.1"
    and torch.__version__.startswith("2.13")
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
)
TWO_STEPS = 2**-6


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
    assert len(CASES) == 35


@pytest.mark.parametrize("case", CASES)
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
        # The peer forgets the embedding of Gemma 3, which it does not quantize either.
        if not (case.startswith("gemma3") and "embed_tokens" in name)
    ]
    mine, other = (json.loads((f / "hf_quant_config.json").read_text()) for f in (ours, theirs))
    for key in ("quant_algo", "kv_cache_quant_algo", "group_size"):
        assert mine["quantization"].get(key) == other["quantization"].get(key)
    key = "exclude_modules"
    assert excluded(mine["quantization"], names, key) == excluded(other["quantization"], names, key)
    assert mine["quantization"].keys() == other["quantization"].keys()
    flat, other_flat = (
        json.loads((f / "config.json").read_text())["quantization_config"] for f in (ours, theirs)
    )
    for key in ("quant_algo", "quant_method", "kv_cache_scheme", "config_groups"):
        assert flat.get(key) == other_flat.get(key)
    assert excluded(flat, names, "ignore") == excluded(other_flat, names, "ignore")
