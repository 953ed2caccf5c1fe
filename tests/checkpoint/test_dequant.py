"""Quantized sources as plain tensors, against slow decoders written here."""

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

from modelopt_lite.checkpoint.dequant import DequantizedSource, model_dtype, open_source
from modelopt_lite.checkpoint.reader import Checkpoint
from modelopt_lite.errors import (
    CheckpointError,
    InternalError,
    NonFiniteError,
    UnsupportedSourceError,
)
from modelopt_lite.formats.linear import FORMATS

MakeCheckpoint = Callable[..., Path]

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP8_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    },
}


def config(quantization: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    return {"model_type": "llama", "torch_dtype": "float32", **more} | (
        {"quantization_config": quantization} if quantization else {}
    )


def opened(folder: Path) -> DequantizedSource:
    source = open_source(folder)
    assert isinstance(source, DequantizedSource)
    return source


def randn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator)


def fp8_codes(*shape: int) -> Tensor:
    return (randn(*shape) * 100).to(torch.float8_e4m3fn)


def accounts_for_everything(source: DequantizedSource) -> None:
    """Each tensor on disk is presented as it is, or made into one, or dropped; once."""
    plain = [name for name in source.tensors if name not in source.consumed]
    made = [name for names in source.consumed.values() for name in names]
    assert sorted([*plain, *made, *source.dropped]) == sorted(source.base.tensors)


# Block FP8


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_block_fp8_with_edge_blocks(
    make_checkpoint: MakeCheckpoint, scale_dtype: torch.dtype
) -> None:
    codes = fp8_codes(200, 300)
    scale = torch.tensor([[0.5, 2.0, 0.25], [8.0, 1.0, 4.0]]).to(scale_dtype)
    norm = randn(8).bfloat16()
    folder = make_checkpoint(
        {"a.weight": codes, "a.weight_scale_inv": scale, "norm.weight": norm},
        config=config(FP8_BLOCK),
    )
    source = opened(folder)
    assert set(source.tensors) == {"a.weight", "norm.weight"}
    assert source.consumed == {"a.weight": ("a.weight", "a.weight_scale_inv")}
    assert source.encoded["a.weight"].format == "fp8_block"
    info = source.tensors["a.weight"]
    assert (info.shape, info.dtype, info.nbytes) == ((200, 300), torch.float32, 240_000)
    expected = codes.double()
    for r in range(2):
        for k in range(3):
            rows, columns = slice(r * 128, r * 128 + 128), slice(k * 128, k * 128 + 128)
            expected[rows, columns] *= scale[r, k].double()
    assert torch.equal(source.read("a.weight").double(), expected)
    assert torch.equal(source.read("norm.weight"), norm)
    accounts_for_everything(source)


def test_shards_may_part_codes_and_scales(make_checkpoint: MakeCheckpoint) -> None:
    codes = fp8_codes(4, 4)
    folder = make_checkpoint(
        {"a.weight_scale_inv": torch.full((1, 1), 2.0)},
        {"a.weight": codes},
        config=config(FP8_BLOCK),
    )
    assert torch.equal(opened(folder).read("a.weight"), codes.float() * 2)


# FP8 with a scale per tensor or row


@pytest.mark.parametrize("shape", [(), (1,), (4,), (4, 1)])
@pytest.mark.parametrize("quantization", [FP8, COMPRESSED, MODELOPT | {"quant_algo": "FP8"}])
def test_fp8_scales(
    make_checkpoint: MakeCheckpoint, shape: tuple[int, ...], quantization: dict[str, Any]
) -> None:
    codes, scale = fp8_codes(4, 6), randn(*shape).abs()
    folder = make_checkpoint(
        {
            "m.q_proj.weight": codes,
            "m.q_proj.weight_scale": scale,
            "m.q_proj.input_scale": torch.tensor([0.125]),
            "m.k_proj.k_scale": torch.tensor(0.5),
            "m.attn.v_scale": torch.tensor(0.5),
        },
        config=config(quantization),
    )
    source = opened(folder)
    rows = scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(())
    assert torch.equal(source.read("m.q_proj.weight"), codes.float() * rows)
    assert source.input_scales == {"m.q_proj": 0.125}
    assert set(source.tensors) == {"m.q_proj.weight"}
    assert set(source.dropped) == {"m.q_proj.input_scale", "m.k_proj.k_scale", "m.attn.v_scale"}
    accounts_for_everything(source)


def test_transformers_static_names(make_checkpoint: MakeCheckpoint) -> None:
    codes = fp8_codes(4, 6)
    folder = make_checkpoint(
        {
            "q.weight": codes,
            "q.weight_scale_inv": torch.tensor(0.5),
            "q.activation_scale": torch.tensor(3.0),
        },
        config=config(FP8),
    )
    source = opened(folder)
    assert torch.equal(source.read("q.weight"), codes.float() / 2)
    assert source.input_scales == {"q": 3.0}


def test_compressed_tensors_blocks(make_checkpoint: MakeCheckpoint) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [2, 4]}
    codes, scale = fp8_codes(3, 6), randn(2, 2).abs()
    folder = make_checkpoint(
        {"q.weight": codes, "q.weight_scale": scale},
        config=config(COMPRESSED | {"config_groups": {"group_0": {"weights": weights}}}),
    )
    grid = scale.repeat_interleave(2, 0)[:3].repeat_interleave(4, 1)[:, :6]
    assert torch.equal(opened(folder).read("q.weight"), codes.float() * grid)


# MXFP4 of gpt-oss


def mxfp4_reference(blocks: Tensor, scales: Tensor) -> Tensor:
    experts, out, groups, _ = blocks.shape
    value = torch.zeros(experts, groups * 32, out, dtype=torch.float64)
    for e in range(experts):
        for o in range(out):
            for g in range(groups):
                for j in range(32):
                    byte = int(blocks[e, o, g, j // 2])
                    code = byte >> 4 if j % 2 else byte & 15
                    sign = -1 if code & 8 else 1
                    power = int(scales[e, o, g]) - 127
                    value[e, g * 32 + j, o] = sign * E2M1[code & 7] * 2.0**power
    return value


def test_mxfp4(make_checkpoint: MakeCheckpoint) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(115, 135, (2, 6, 3), dtype=torch.uint8, generator=generator)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    bias = randn(2, 6).bfloat16()
    folder = make_checkpoint(
        {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": bias},
        config=config(MXFP4, torch_dtype="bfloat16"),
    )
    source = opened(folder)
    assert set(source.tensors) == {name, f"{name}_bias"}
    assert source.tensors[name].shape == (2, 96, 6)
    value = source.read(name)
    assert value.dtype == torch.bfloat16
    assert value.is_contiguous()
    assert torch.equal(value.double(), mxfp4_reference(blocks, scales))
    assert torch.equal(source.read(f"{name}_bias"), bias)
    before = source.bytes_read
    assert torch.equal(source.read_rows(name, range(1, 2)), value[1:])
    assert source.by_rows(name)
    assert source.bytes_read - before == (blocks.numel() + scales.numel()) / 2
    accounts_for_everything(source)


def test_mxfp4_nan_scale(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(
        {
            "x_blocks": torch.zeros(1, 1, 1, 16, dtype=torch.uint8),
            "x_scales": torch.full((1, 1, 1), 255, dtype=torch.uint8),
        },
        config=config(MXFP4),
    )
    with pytest.raises(NonFiniteError, match="'x_scales'"):
        opened(folder).read("x")


# The modelopt dialect


def nvfp4_reference(packed: Tensor, scale: Tensor, scale_2: float) -> Tensor:
    value = torch.zeros(packed.shape[0], packed.shape[1] * 2, dtype=torch.float64)
    for r in range(value.shape[0]):
        for k in range(value.shape[1]):
            byte = int(packed[r, k // 2])
            code = byte >> 4 if k % 2 else byte & 15
            sign = -1 if code & 8 else 1
            value[r, k] = sign * E2M1[code & 7] * float(scale[r, k // 16]) * scale_2
    return value


@pytest.mark.parametrize("algo", ["NVFP4", "W4A16_NVFP4"])
def test_nvfp4(make_checkpoint: MakeCheckpoint, algo: str) -> None:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (3, 16), dtype=torch.uint8, generator=generator)
    scale = (randn(3, 2).abs() * 50).to(torch.float8_e4m3fn)
    folder = make_checkpoint(
        {"a.weight": packed, "a.weight_scale": scale, "a.weight_scale_2": torch.tensor(0.0625)},
        config=config(MODELOPT | {"quant_algo": algo}),
    )
    source = opened(folder)
    assert source.encoded["a.weight"].format == algo.lower()
    assert source.tensors["a.weight"].shape == (3, 32)
    expected = nvfp4_reference(packed, scale, 0.0625)
    torch.testing.assert_close(source.read("a.weight").double(), expected, rtol=1e-6, atol=0)
    accounts_for_everything(source)


@pytest.mark.parametrize("name", ["fp8", "fp8_per_channel_per_token", "nvfp4", "w4a16_nvfp4"])
def test_stacked_experts(make_checkpoint: MakeCheckpoint, name: str) -> None:
    weight, kind = randn(2, 32, 48), FORMATS[name]
    stored = kind.quantize(weight, weight.abs().amax(), numerics="exact", input_major=True)
    base = "m.experts.gate_up_proj"
    tensors = {base if k == "weight" else f"{base}_{k}": t.clone() for k, t in stored.items()}
    tensors |= {f"{base}_input_scale": torch.tensor(0.25), f"{base}_bias": randn(2, 48)}
    folder = make_checkpoint(tensors, config=config(MODELOPT | {"quant_algo": kind.quant_algo}))
    source = opened(folder)
    assert set(source.tensors) == {base, f"{base}_bias"}
    assert source.encoded[base].format == name
    assert source.input_scales == {base: 0.25}
    value = source.read(base)
    assert value.shape == weight.shape
    assert float((value - weight).norm() / weight.norm()) < 0.12
    assert torch.equal(source.read_rows(base, range(1, 2)), value[1:])
    assert source.by_rows(base) == (
        name == "fp8_per_channel_per_token"
    )  # others: one scale for all
    accounts_for_everything(source)


def test_only_the_kv_cache_is_quantized(make_checkpoint: MakeCheckpoint) -> None:
    weight = randn(4, 4)
    folder = make_checkpoint(
        {"k_proj.weight": weight, "k_proj.k_scale": torch.tensor(0.5)},
        config=config({"quant_method": "modelopt", "quant_algo": None}),
    )
    source = opened(folder)
    assert torch.equal(source.read("k_proj.weight"), weight)
    assert "KV-cache" in source.dropped["k_proj.k_scale"]


def test_section_in_hf_quant_config_only(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(
        {"a.weight": fp8_codes(2, 2), "a.weight_scale": torch.tensor(2.0)}, config=config(None)
    )
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert opened(folder).quantization["quant_algo"] == "FP8"


# Exports of AWQ hold weights times scales of inputs: they are no nearer to the original.
PEERS = sorted(p.name for p in GOLDEN.glob("*-*") if "awq" not in p.name)


@pytest.mark.parametrize("case", PEERS)
def test_exports_of_a_peer(case: str) -> None:
    """Names and shapes are those of the model that was exported; values are near it."""
    name = json.loads((GOLDEN / case / "case.json").read_text())["input"]
    original = {
        key: tensor
        for path in sorted((GOLDEN / "inputs" / Path(name).name).glob("model*.safetensors"))
        for key, tensor in load_file(path).items()
    }
    with opened(GOLDEN / case / "export") as source:
        accounts_for_everything(source)
        assert source.encoded or case.endswith("-kv_fp8_only")
        assert set(source.tensors) == set(original)
        for key, tensor in original.items():
            value = source.read(key).double()
            assert value.shape == tensor.shape
            share = 0.3 if "gptq" in case else 0.15  # GPTQ moves weights to spare products
            bound = share * tensor.double().norm() if key in source.encoded else 0
            assert float((value - tensor).norm()) <= bound, key


# The interface


def test_reads_into_buffers(make_checkpoint: MakeCheckpoint) -> None:
    codes = fp8_codes(4, 6)
    folder = make_checkpoint(
        {"a.weight": codes, "a.weight_scale": torch.tensor(2.0)}, config=config(FP8)
    )
    source = opened(folder)
    fused = torch.nn.Parameter(torch.zeros(3, 4, 6, dtype=torch.bfloat16))
    out = fused.data[1]
    assert source.read("a.weight", out) is out
    assert torch.equal(fused[1], (codes.float() * 2).bfloat16())
    transposed = torch.zeros(6, 4).T
    assert torch.equal(source.read("a.weight", transposed), codes.float() * 2)
    with pytest.raises(InternalError):
        source.read("a.weight", torch.zeros(5))
    with pytest.raises(CheckpointError, match="no tensor"):
        source.read("a.weight_scale_2")
    assert source.bytes_read == 3 * 28 - 28
    assert source.reads == {"a.weight": 2, "a.weight_scale": 2}


def test_config_is_plain_at_every_level(make_checkpoint: MakeCheckpoint) -> None:
    nested = {"text_config": {"dtype": "float16", "quantization_config": FP8, "hidden": 3}}
    folder = make_checkpoint(
        {"a.weight": fp8_codes(2, 2), "a.weight_scale": torch.tensor(2.0)},
        config={"model_type": "x", **nested},
    )
    source = opened(folder)
    assert source.config == {"model_type": "x", "text_config": {"dtype": "float16", "hidden": 3}}
    assert source.base.config["text_config"]["quantization_config"] == FP8
    assert source.quantization == FP8
    assert source.tensors["a.weight"].dtype == torch.float16


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": "torch.float32"}, torch.float32),
        ({"dtype": "float32", "torch_dtype": "float16"}, torch.float32),
        ({"torch_dtype": None, "text_config": {"torch_dtype": "float32"}}, torch.float32),
        ({"dtype": "auto", "torch_dtype": "float64", "text_config": 3}, torch.float64),
    ],
)
def test_model_dtype(config: dict[str, Any], dtype: torch.dtype) -> None:
    assert model_dtype(config) == dtype


@pytest.mark.parametrize("stated", ["float8_e4m3fn", "int8", "bf16", "", 16, ["float16"], {}])
@pytest.mark.parametrize("nested", [False, True])
def test_a_dtype_that_no_model_runs_in(stated: Any, nested: bool) -> None:
    config = {"text_config": {"torch_dtype": stated}} if nested else {"torch_dtype": stated}
    with pytest.raises(CheckpointError) as caught:
        model_dtype(config)
    assert f"states torch_dtype {stated!r}" in str(caught.value)
    assert "bfloat16" in str(caught.value)


def test_plain_source_stays_a_checkpoint(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(
        {"a.weight": randn(2, 2), "conv.scales": randn(2), "attn.k_scale": randn(1)}
    )
    source = open_source(folder)
    assert isinstance(source, Checkpoint)
    assert len(source.tensors) == 3


# Refusals, all before any weight is read


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"bits": 4}, "quantized with None"),
        (MODELOPT | {"quant_algo": "W4A8_OTHER"}, "modelopt W4A8_OTHER"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
    ],
)
def test_unknown_methods(
    make_checkpoint: MakeCheckpoint,
    quantization: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(Checkpoint, "read")
    folder = make_checkpoint({"a.weight": randn(2, 2)}, config=config(quantization))
    with pytest.raises(UnsupportedSourceError, match=message) as caught:
        open_source(folder)
    assert "give the original checkpoint" in str(caught.value)


@pytest.mark.parametrize("quantization", [None, FP8, MODELOPT, MXFP4])
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("a.qweight", torch.zeros(2, 2, dtype=torch.int32)),
        ("a.weight_packed", torch.zeros(2, 2, dtype=torch.int32)),
        ("a.pre_quant_scale", torch.zeros(2)),
        ("a.weight_scale", torch.zeros(2)),
        ("a.weight.absmax", torch.zeros(2)),
        ("experts.gate_up_proj_weight_scale_2", torch.zeros(2)),
        ("experts.gate_up_proj_scales", torch.zeros(2, dtype=torch.uint8)),
    ],
)
def test_left_over_tensors(
    make_checkpoint: MakeCheckpoint,
    quantization: dict[str, Any] | None,
    name: str,
    tensor: Tensor,
) -> None:
    folder = make_checkpoint({name: tensor}, config=config(quantization))
    with pytest.raises(UnsupportedSourceError, match=name):
        open_source(folder)


@pytest.mark.parametrize("quantization", [None, FP8_BLOCK, MODELOPT, MXFP4, COMPRESSED])
def test_fp8_codes_without_a_scale(
    make_checkpoint: MakeCheckpoint, quantization: dict[str, Any] | None
) -> None:
    folder = make_checkpoint({"a.weight": fp8_codes(2, 2)}, config=config(quantization))
    with pytest.raises(CheckpointError, match=r"'a\.weight' holds FP8 codes"):
        open_source(folder)


U8 = torch.uint8


@pytest.mark.parametrize(
    ("quantization", "tensors", "message"),
    [
        (FP8_BLOCK, {"a.weight": fp8_codes(4, 4), "a.weight_scale_inv": randn(2, 2)}, "blocks of"),
        (FP8, {"a.weight": fp8_codes(4, 4), "a.weight_scale": randn(3)}, "does not fit"),
        (FP8, {"a.weight": fp8_codes(4, 4), "a.weight_scale": torch.ones(4, dtype=U8)}, "integer"),
        (FP8 | {"weight_block_size": [128]}, {"a": randn(1)}, "weight_block_size"),
        (FP8 | {"weight_block_size": [0, 1]}, {"a": randn(1)}, "weight_block_size"),
        (
            MODELOPT,
            {"a.weight": torch.zeros(2, 8, dtype=U8), "a.weight_scale": fp8_codes(2, 1)},
            "lacks 'a.weight_scale_2'",
        ),
        (
            MODELOPT,
            {
                "a.weight": torch.zeros(2, 8, dtype=U8),
                "a.weight_scale": fp8_codes(2, 2),
                "a.weight_scale_2": randn(1),
            },
            "does not fit the nvfp4 codes",
        ),
        (MXFP4, {"a_blocks": torch.zeros(1, 1, 1, 16, dtype=U8)}, "lacks 'a_scales'"),
        (
            MXFP4,
            {
                "a_blocks": torch.zeros(1, 2, 1, 16, dtype=U8),
                "a_scales": torch.zeros(1, 1, 1, dtype=U8),
            },
            "does not fit the mxfp4_blocks codes",
        ),
        (
            MXFP4,
            {
                "a_blocks": torch.zeros(1, 1, 1, 16, dtype=U8),
                "a_scales": torch.zeros(1, 1, 1, dtype=U8),
                "a": randn(1),
            },
            "two versions",
        ),
    ],
)
def test_parts_that_do_not_fit(
    make_checkpoint: MakeCheckpoint,
    quantization: dict[str, Any],
    tensors: dict[str, Tensor],
    message: str,
) -> None:
    folder = make_checkpoint(tensors, config=config(quantization))
    with pytest.raises(CheckpointError, match=message):
        open_source(folder)


def test_missing_shard_is_told_before_the_method(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint({"a": randn(1)}, {"b": randn(1)}, config=config(FP8))
    shutil.copy(folder / "config.json", folder / "copy.json")
    save_file({"z": randn(1)}, folder / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="places tensor 'b'"):
        open_source(folder)
