"""The bundled checkpoint: its shape on disk, its tokenizer, and that it is really trained."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from example import load_example
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import modelopt_lite.calibrate.text as text_module
from modelopt_lite.calibrate.text import evaluation_text

DATA = Path(text_module.__file__).parents[1] / "data" / "tiny_qwen3_moe"
WEIGHTS = DATA / "model.safetensors"
LAYERS, EXPERTS = 4, 8
WINDOW = 256
PERPLEXITY_BELOW = 5.5  # 4.87 with the text of Python 3.11; a model that knows nothing: 256


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_example("train_tiny_moe")


@pytest.fixture(scope="module")
def tokenizer():  # type: ignore[no-untyped-def]
    return AutoTokenizer.from_pretrained(DATA)


def expected_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (384, 256),
        "model.norm.weight": (256,),
        "lm_head.weight": (384, 256),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (256,),
        "post_attention_layernorm": (256,),
        "self_attn.q_norm": (64,),
        "self_attn.k_norm": (64,),
        "self_attn.q_proj": (256, 256),
        "self_attn.k_proj": (128, 256),
        "self_attn.v_proj": (128, 256),
        "self_attn.o_proj": (256, 256),
        "mlp.gate": (EXPERTS, 256),
    }
    for e in range(EXPERTS):
        layer[f"mlp.experts.{e}.gate_proj"] = layer[f"mlp.experts.{e}.up_proj"] = (128, 256)
        layer[f"mlp.experts.{e}.down_proj"] = (256, 128)
    for i in range(LAYERS):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def test_tensors_are_named_per_expert_in_bf16() -> None:
    with safe_open(WEIGHTS, "pt") as opened:
        found = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        assert {n: tuple(s.get_shape()) for n, s in found.items()} == expected_shapes()
        assert {s.get_dtype() for s in found.values()} == {"BF16"}


def test_every_linear_but_the_routers_divides_into_blocks_of_128() -> None:
    for name, shape in expected_shapes().items():
        if len(shape) == 2 and not name.endswith("mlp.gate.weight"):
            assert all(size % 128 == 0 for size in shape), name


def test_folder_is_under_10_mb() -> None:
    assert sum(file.stat().st_size for file in DATA.iterdir()) < 10_000_000


def test_files_are_what_the_script_writes(script: ModuleType, tmp_path: Path) -> None:
    script.write_tokenizer(tmp_path)
    script.write_json(tmp_path / "config.json", script.CONFIG)
    script.write_json(tmp_path / "generation_config.json", script.GENERATION)
    written = {file.name: json.loads(file.read_text("utf-8")) for file in tmp_path.iterdir()}
    assert len(written) == 4
    assert written == {name: json.loads((DATA / name).read_text("utf-8")) for name in written}


def test_config_means_the_same_to_old_and_new_releases(script: ModuleType) -> None:
    assert script.CONFIG["num_experts"] == EXPERTS
    assert script.CONFIG["rope_parameters"]["rope_theta"] == script.CONFIG["rope_theta"]
    assert not script.CONFIG["tie_word_embeddings"]


@given(st.text())
@settings(max_examples=50, deadline=None)
def test_tokenizer_turns_text_into_its_bytes_and_back(tokenizer, text: str) -> None:  # type: ignore[no-untyped-def]
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_tokenizer_knows_its_special_tokens(tokenizer) -> None:  # type: ignore[no-untyped-def]
    assert tokenizer("a<|endoftext|>b")["input_ids"] == [97, 256, 98]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (256, 257, 258)


def test_model_loads_whole_and_predicts_unseen_text() -> None:
    model, info = AutoModelForCausalLM.from_pretrained(
        DATA, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.num_experts == EXPERTS

    ids_NT = torch.tensor(list(evaluation_text().encode()[: 32 * WINDOW])).view(-1, WINDOW)
    with torch.no_grad():
        out = model(input_ids=ids_NT, labels=ids_NT, output_router_logits=True)
    logits_NV = out.logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits_NV, ids_NT[:, 1:].flatten())
    assert math.exp(loss) < PERPLEXITY_BELOW

    assert len(out.router_logits) == LAYERS
    for logits_NE in out.router_logits:
        tokens_E = logits_NE.topk(2, dim=-1).indices.flatten().bincount(minlength=EXPERTS)
        assert int(tokens_E.min()) > 0, tokens_E.tolist()
