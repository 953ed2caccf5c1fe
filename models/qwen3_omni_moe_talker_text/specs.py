"""Qwen3-Omni's talker, text layers only: experts and a shared one."""

from __future__ import annotations

from modelopt_lite.models.qwen2_moe.specs import SPEC as QWEN2_MOE
from modelopt_lite.models.registry import register
from modelopt_lite.models.specs import EPSpec
from modelopt_lite.models.variants import variant

# Classes and children of the block: built models, transformers 5.6.2 to 5.24.0. The files of the
# text model alone have no output head: planning needs the model. Who reads the norms was not
# measured: no norm_feeds.
SPEC = register(
    variant(
        QWEN2_MOE,
        "qwen3_omni_moe_talker_text",
        min_transformers_version="5.6",
        moe_spec={"block_names": ("Qwen3OmniMoeTalkerTextSparseMoeBlock",)},
        export_spec=None,
        ep_spec=EPSpec(requires_transformers="5.7"),
        ptq_spec={"layer_names": ("Qwen3OmniMoeTalkerDecoderLayer",), "norm_feeds": ()},
        naming_spec=None,
    )
)
