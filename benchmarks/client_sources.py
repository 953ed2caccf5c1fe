"""Read what the package compressed-tensors itself writes, bit for bit; part of clients.py."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.initialize import initialize_module_for_quantization
from safetensors.torch import save_file
from torch import Tensor, nn

from modelopt_lite.checkpoint.dequant import open_source

PRESETS = (
    "FP8",
    "FP8_DYNAMIC",
    "FP8_BLOCK",
    "W8A8",
    "W8A16",
    "W4A16",
    "W4A16_ASYM",
    "NVFP4",
    "NVFP4A16",
    "MXFP4",
    "MXFP8",
)
ROWS, COLUMNS = 128, 256
LARGEST = {("float", 8): 448.0, ("float", 4): 6.0, ("int", 8): 127.0, ("int", 4): 7.0}


def set_scales(layer: nn.Linear, scheme: QuantizationScheme) -> None:
    """Give a layer scales that cover its weights, and zero points that are not zero."""
    weights, stored = scheme.weights, layer.weight_scale
    rows, columns = (*stored.shape, 1)[:2]
    parts = layer.weight.float().view(rows, ROWS // rows, columns, COLUMNS // columns)
    scale = parts.abs().amax((1, 3)) / LARGEST[weights.type, weights.num_bits]
    if hasattr(layer, "weight_global_scale"):
        layer.weight_global_scale.fill_(2688 / parts.abs().max())
        scale = (scale * layer.weight_global_scale).to(torch.float8_e4m3fn).float()
    if weights.scale_dtype == torch.uint8:
        scale = torch.exp2(scale.log2().ceil())
    stored.copy_(scale.view(stored.shape))
    if not weights.symmetric:
        layer.weight_zero_point.copy_(torch.randint(-8, 8, layer.weight_zero_point.shape))


def compressed(scheme: QuantizationScheme, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors that a random matrix becomes, and the values they are decompressed to."""
    torch.manual_seed(0)
    layer = nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16)
    initialize_module_for_quantization(layer, scheme, force_zero_point=False)
    set_scales(layer, scheme)
    for name in ("input_scale", "input_global_scale"):
        if hasattr(layer, name):
            getattr(layer, name).fill_(2.0)
    compressor = BaseCompressor.get_value_from_registry(kind)
    tensors = compressor.compress(dict(layer.state_dict()), scheme)
    return tensors, compressor.decompress(tensors, scheme)["weight"].bfloat16()


def read_back() -> Iterator[tuple[str, str, str]]:
    """Yield preset, format, and whether what is read are the values of compressed-tensors."""
    for preset in PRESETS:
        scheme = preset_name_to_scheme(preset, ["Linear"])
        kind = infer_module_format(nn.Linear, scheme).value
        tensors, expected = compressed(scheme, kind)
        section: dict[str, Any] = {
            "quant_method": "compressed-tensors",
            "format": kind,
            "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        }
        config = {"model_type": "llama", "dtype": "bfloat16", "quantization_config": section}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            contents = {f"layer.{key}": value.contiguous() for key, value in tensors.items()}
            save_file(contents, folder / "model.safetensors")
            (folder / "config.json").write_text(json.dumps(config))
            with open_source(folder) as source:
                same = torch.equal(source.read("layer.weight"), expected)
        yield preset, kind, "equal" if same else "differ"
