"""Phi 1 and 2: attention and MLP both read one LayerNorm, side by side."""

from __future__ import annotations

from modelopt_lite.models.glm4.specs import SPEC as GLM4
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
SPEC = register(
    variant(
        GLM4,
        "phi",
        ptq_spec={
            "layer_names": ("PhiDecoderLayer",),
            "norm_feeds": (
                (
                    "input_layernorm",
                    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.fc1"),
                ),
            ),
        },
        naming_spec={"layer_linear_names": ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2")},
    )
)
