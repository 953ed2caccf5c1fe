"""DeepSeek-V2 and V2-Lite: latent attention (MLA), dense first layers, then experts."""

from __future__ import annotations

from modelopt_lite.models.deepseek_v3.specs import SPEC as DEEPSEEK_V3
from modelopt_lite.models.registry import register
from modelopt_lite.models.variants import variant

# Classes, module names, norms and who reads them: measured on built models, transformers 5.14.1 and
# 5.24.0. Names on disk: files written by save_pretrained of the same releases.
# DeepseekV2MoE: the name in earlier releases.
# Expert parallelism: first release whose config class carries a plan (5.13.0).
SPEC = register(
    variant(
        DEEPSEEK_V3,
        "deepseek_v2",
        moe_spec={"block_names": ("DeepseekV2MoE", "DeepseekV2Moe")},
        ptq_spec={"layer_names": ("DeepseekV2DecoderLayer",), "keep_dtype_names": ()},
    )
)
