"""Train the mixture-of-experts checkpoint that ships with the package.

    python examples/train_tiny_moe.py

writes ``modelopt_lite/data/tiny_qwen3_moe`` (4.1 million parameters, 8.3 MB). One thread, fixed
seeds: the same Python, torch and kind of CPU give the same bytes, in ten to fifteen minutes.

Only the calibration share of `modelopt_lite.calibrate.text` is read, repeated paragraphs once. Its
last twentieth is held out: the weights kept are those of the step that predicts it best. The
evaluation share is looked at once, after that choice, for the figures that are printed.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoConfig, Qwen3MoeForCausalLM

from modelopt_lite.calibrate.text import SEPARATOR, calibration_text, evaluation_text

DATA = Path(__file__).parents[1] / "modelopt_lite" / "data" / "tiny_qwen3_moe"
SEED = 0
CONTEXT = 256
BATCH = 8
STEPS = 1200
WARMUP = 0.05
PEAK_LR = 3e-3
WEIGHT_DECAY = 0.1
DROPOUT = 0.1
HELD_OUT = 0.05
EVALUATE_EVERY = 100

# Written as it stands. Releases rename keys when they save (num_experts, rope_theta), and an older
# one then falls back to its defaults without a word; with both spellings of the rope base and the
# older name of the experts every release from 4.57 on computes the same.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 256,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 256,
    "max_position_embeddings": 2048,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 257,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 384,
}
GENERATION = {"do_sample": False, "eos_token_id": 256, "pad_token_id": 257}
SPECIAL_TOKENS = ("<|endoftext|>", "<|pad|>")  # ids 256 and 257; 258 to 383 are never used


def byte_alphabet() -> list[str]:
    """Return the character that stands for each byte 0..255 in GPT-2's byte-level vocabularies.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for the
    characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer without merges: the id of a byte is the byte."""
    vocab = {character: byte for byte, character in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "clean_up_tokenization_spaces": False,
            "eos_token": SPECIAL_TOKENS[0],
            "model_max_length": CONFIG["max_position_embeddings"],
            "pad_token": SPECIAL_TOKENS[1],
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file with two spaces of indentation and a final newline."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def byte_ids(text: str) -> Tensor:
    """Return the UTF-8 bytes of a text as int64 token ids [T]."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def batches(ids_T: Tensor) -> Iterator[Tensor]:
    """Yield int64 ids [B, CONTEXT] for ever; each pass cuts the text elsewhere and shuffles it."""
    generator = torch.Generator().manual_seed(SEED)
    while True:
        offset = int(torch.randint(CONTEXT, (), generator=generator))
        windows = ids_T[offset:].unfold(0, CONTEXT, CONTEXT)
        order = torch.randperm(len(windows), generator=generator)
        for chosen in order.split(BATCH):
            yield windows[chosen]


def add_dropout(model: nn.Module) -> None:
    """Drop a share of what attention and experts add to the residual, in training only.

    The architecture has no dropout of its own, and the text is short enough to be learnt by heart.
    """
    dropout = nn.Dropout(DROPOUT)

    def drop(module: nn.Module, args: Any, output: Any) -> Any:
        dropout.train(module.training)
        if isinstance(output, tuple):
            return dropout(output[0]), *output[1:]
        return dropout(output)

    for name, module in model.named_modules():
        if name.endswith((".self_attn", ".mlp")):
            module.register_forward_hook(drop)


def losses(model: nn.Module, ids_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Predict each byte of a batch but the first of every row.

    Returns:
        The mean cross-entropy in nats; the balancing loss of Switch Transformers (arXiv:2101.03961,
        equation 4), 1 where a layer uses its experts evenly; tokens per expert [layers, experts].
    """
    out = model(input_ids=ids_BT, output_router_logits=True, use_cache=False)
    logits_NV = out.logits[:, :-1].flatten(0, 1).float()
    cross_entropy = nn.functional.cross_entropy(logits_NV, ids_BT[:, 1:].flatten())
    # transformers pools the layers in its own loss: uneven layers that cancel out look even there.
    logits_LNE = torch.stack(out.router_logits).float()
    top_LNK = logits_LNE.topk(CONFIG["num_experts_per_tok"], dim=-1).indices
    tokens_LE = nn.functional.one_hot(top_LNK, CONFIG["num_experts"]).sum((1, 2))
    share_LE = tokens_LE / tokens_LE.sum(-1, keepdim=True)
    balance_LE = CONFIG["num_experts"] * share_LE * logits_LNE.softmax(-1).mean(1)
    return cross_entropy, balance_LE.sum(-1).mean(), tokens_LE


@torch.no_grad()
def measure(model: nn.Module, ids_T: Tensor) -> tuple[float, Tensor]:
    """Score a text in windows of CONTEXT bytes that do not overlap.

    Returns:
        Bits per byte, and the tokens sent to each expert, int64 [layers, experts].
    """
    model.eval()
    windows = ids_T.unfold(0, CONTEXT, CONTEXT)
    bits, tokens_LE = 0.0, torch.zeros((), dtype=torch.long)
    for ids_BT in windows.split(BATCH):
        cross_entropy, _, tokens = losses(model, ids_BT)
        bits += float(cross_entropy) / math.log(2) * len(ids_BT) / len(windows)
        tokens_LE = tokens_LE + tokens
    return bits, tokens_LE


def train(model: nn.Module, steps: int) -> int:
    """Train on the calibration share and leave the best held-out weights in the model.

    Returns:
        The step that those weights are of.
    """
    # Later topics repeat whole sections of earlier ones, which would leak into what is held out.
    ids_T = byte_ids(SEPARATOR.join(dict.fromkeys(calibration_text().split(SEPARATOR))))
    cut = len(ids_T) - int(len(ids_T) * HELD_OUT)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_LR, total_steps=steps, pct_start=WARMUP, cycle_momentum=False
    )
    best, best_step, kept = math.inf, 0, copy.deepcopy(model.state_dict())
    start = time.perf_counter()
    for step, ids_BT in enumerate(islice(batches(ids_T[:cut]), steps), start=1):
        model.train()
        loss, balance, _ = losses(model, ids_BT)
        (loss + CONFIG["router_aux_loss_coef"] * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % EVALUATE_EVERY == 0 or step == steps:
            bits, _ = measure(model, ids_T[cut:])
            seconds = time.perf_counter() - start
            even = f"balance {balance.item():.3f}, held out {bits:.3f} bits/byte"
            print(f"step {step}: loss {loss.item():.3f}, {even}, {seconds:.0f} s", flush=True)
            if bits < best:
                best, best_step, kept = bits, step, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    return best_step


def main() -> None:
    """Train, write the checkpoint, print its figures."""
    parser = argparse.ArgumentParser(description="Train the bundled mixture-of-experts checkpoint.")
    parser.add_argument("--out", type=Path, default=DATA, help="folder to write")
    parser.add_argument("--steps", type=int, default=STEPS, help="of 2048 bytes each")
    args = parser.parse_args()
    if args.steps < EVALUATE_EVERY:
        parser.error(f"--steps {args.steps} is too short a run; give at least {EVALUATE_EVERY}")
    torch.set_num_threads(1)  # sums in one order, whatever the machine
    torch.manual_seed(SEED)

    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "config.json", CONFIG)
    write_tokenizer(args.out)

    model = Qwen3MoeForCausalLM(AutoConfig.from_pretrained(args.out)).float()
    add_dropout(model)
    best_step = train(model, args.steps)

    model.bfloat16().save_pretrained(args.out)  # one safetensors file, a tensor per expert
    write_json(args.out / "config.json", CONFIG)  # instead of what this release would write
    write_json(args.out / "generation_config.json", GENERATION)
    bits, tokens_LE = measure(model, byte_ids(evaluation_text()))
    print(f"step {best_step} kept; evaluation: {bits:.3f} bits/byte, perplexity {2**bits:.3f}")
    print(f"tokens sent to each expert, a row per layer: {tokens_LE.tolist()}")


if __name__ == "__main__":
    main()
