"""A made-up mixture of experts: norms scale by weight + 1, experts have names of their own."""
# mypy: ignore-errors

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_wren import WrenConfig


class WrenNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return ((x.float() * scale) * (1 + self.weight.float())).to(x.dtype)


class WrenAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.num_attention_heads
        width = config.hidden_size
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class WrenExpert(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.bend = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.lift = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.land = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.land(nn.functional.silu(self.bend(x)) * self.lift(x))


class WrenFlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.few = config.num_experts_per_tok
        self.chooser = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(WrenExpert(config) for _ in range(config.num_experts))

    def forward(self, x):
        tokens = x.flatten(0, 1)
        shares, chosen = self.chooser(tokens).softmax(-1).topk(self.few)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            at, slot = (chosen == number).nonzero(as_tuple=True)
            out.index_add_(0, at, expert(tokens[at]) * shares[at, slot, None])
        return out.view_as(x)


class WrenLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.first_norm = WrenNorm(config.hidden_size)
        self.self_attn = WrenAttention(config)
        self.second_norm = WrenNorm(config.hidden_size)
        self.flock = WrenFlock(config)

    def forward(self, x):
        x = x + self.self_attn(self.first_norm(x))
        return x + self.flock(self.second_norm(x))


class WrenModel(PreTrainedModel):
    config_class = WrenConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(WrenLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = WrenNorm(config.hidden_size)
        self.post_init()

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class WrenForCausalLM(PreTrainedModel):
    config_class = WrenConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = WrenModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, attention_mask=None, use_cache=None, **kwargs):
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids)))
