"""Falcon-H1: attention and Mamba-2 side by side in each layer."""

from __future__ import annotations

from modelopt_lite.models.llama.specs import SPEC as LLAMA
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
SPEC = register(
    variant(
        LLAMA,
        "falcon_h1",
        export_spec=None,
        ptq_spec={
            "layer_names": ("FalconH1DecoderLayer",),
            "skip_modules": ("*.conv1d",),
            "norm_feeds": (
                ("pre_ff_layernorm", ("feed_forward.up_proj", "feed_forward.gate_proj")),
            ),
        },
        naming_spec={
            "layer_linear_names": (
                "q_proj",
                "k_proj",
                "v_proj",
                "o_proj",
                "out_proj",
                "in_proj",
                "gate_proj",
                "up_proj",
                "down_proj",
            )
        },
    )
)
