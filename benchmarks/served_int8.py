"""How well the mean log-probability of INT8 with static inputs is determined.

    python benchmarks/served_int8.py CHECKPOINT EXPORT

Prints that of 508 tokens for a dense checkpoint and its int8 export (dialect compressed-tensors),
by three ways of multiplying: of dequantized values in the model's dtype, as `evaluate` does; of
integers, scaled and rounded once, as kernels do; and of dequantized weights with inputs left. Each
is repeated with embeddings moved at random by one step of bfloat16 or none, a change that means
nothing: how far the means move then is how well they are determined.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from served import prompts
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from modelopt_lite.formats.integer import INT8_MAX

STEP = 2.0**-8  # of bfloat16, relative
DRAWS = 4


class Quantized(nn.Module):
    """A linear layer of an export: codes [R, K], a scale for each row, one for all inputs."""

    def __init__(self, tensors: dict[str, Tensor], name: str, how: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.codes_RK = tensors[f"{name}.weight"].float()
        self.scale_R = tensors[f"{name}.weight_scale"].float().view(-1)
        self.input_scale = tensors[f"{name}.input_scale"].float().view(())
        self.how = how
        self.w_RK = (self.codes_RK * self.scale_R[:, None]).to(dtype).float()

    def forward(self, x: Tensor) -> Tensor:
        """Multiply in one of the ways; sums are float32, the product is rounded to x's dtype."""
        if self.how == "inputs left":
            return (x.float() @ self.w_RK.T).to(x.dtype)
        codes = (x.float() / self.input_scale).round_().clamp_(-INT8_MAX - 1, INT8_MAX)
        if self.how == "integers":
            product = (codes @ self.codes_RK.T) * (self.input_scale * self.scale_R)
        else:
            product = (codes * self.input_scale).to(x.dtype).float() @ self.w_RK.T
        return product.to(x.dtype)


class Plain(nn.Module):
    """A linear layer that is left as it is, multiplied in float32 and rounded once."""

    def __init__(self, weight_RK: Tensor) -> None:
        super().__init__()
        self.w_RK = weight_RK.float()

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return (x.float() @ self.w_RK.T).to(x.dtype)


def model_of(source: Path, export: Path, how: str, dtype: torch.dtype) -> nn.Module:
    """Return the source's model with the linear layers of the export; its own as "original"."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
    tensors = load_file(export / "model.safetensors")
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            quantized = how != "original" and f"{name}.weight_scale" in tensors
            made = Quantized(tensors, name, how, dtype) if quantized else None
            model.set_submodule(name, made or Plain(layer.weight))
    return model


def mean_logprob(model: nn.Module, ids_BT: Tensor, moved: Callable[[Tensor], Tensor]) -> float:
    """Return the mean over all tokens but the first of each prompt."""
    found = []
    for ids_T in ids_BT:
        embedded = moved(model.get_input_embeddings()(ids_T[None]))
        logits_TV = model(inputs_embeds=embedded, use_cache=False).logits[0, :-1].float()
        found.append(logits_TV.log_softmax(-1).gather(1, ids_T[1:, None]))
    return float(torch.cat(found).double().mean())


def main() -> None:
    """Print the means."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("export", type=Path)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    ids_BT = prompts(arguments.source).flatten()[:512].view(4, 128)
    ways = [
        (w, torch.bfloat16) for w in ("original", "inputs left", "as evaluate does", "integers")
    ]
    for how, dtype in (*ways, ("integers", torch.float32)):
        model = model_of(arguments.source, arguments.export, how, dtype)
        made = [mean_logprob(model, ids_BT, lambda embedded: embedded)]
        for draw in range(DRAWS):
            generator = torch.Generator().manual_seed(draw)

            def moved(embedded: Tensor, generator: torch.Generator = generator) -> Tensor:
                steps = torch.randint(-1, 2, embedded.shape, generator=generator)
                return (embedded.float() * (1 + STEP * steps)).to(embedded.dtype)

            made.append(mean_logprob(model, ids_BT, moved))
        print(
            f"{how}, {dtype}: {made[0]:.4f}, moved: {', '.join(f'{m:.4f}' for m in made[1:])}",
            flush=True,
        )


if __name__ == "__main__":
    with torch.no_grad():
        main()
