"""GPT-2 (Radford et al. 2019) as trained in the MARS comparison (arXiv 2411.10438), nothing else.

Pre-norm transformer, learned positions, tied token embedding and output head, tanh GELU. Two departures from GPT-2,
both from the published runs: no biases, and attention scores divided by the layer's number (a stabilisation of the
Mistral project's GPT-2s). The file needs only torch and can be copied out and used alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT. The defaults are GPT-2 small with its vocabulary of 50257 padded to a multiple of 64."""

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block_size: int = 1024
    vocab_size: int = 50304
    dropout: float = 0.0
    bias: bool = False
    scale_attn_by_inverse_layer_idx: bool = True


class SelfAttention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.scale = 1 / math.sqrt(config.n_embd // config.n_head)
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer + 1
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        batch, length, width = x.shape
        # (B, T, 3C) -> three of (B, heads, T, C / heads)
        query, key, value = (
            part.view(batch, length, self.n_head, -1).transpose(1, 2) for part in self.c_attn(x).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, scale=self.scale)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(batch, length, width)))


class MLP(nn.Module):
    """Two linear layers, four times the width between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))


class Block(nn.Module):
    """Attention, then MLP, each on a normalised copy of the residual stream that it adds to."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = SelfAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """Everything but the output head: token ids to normalised hidden states."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, C)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


class GPT(nn.Module):
    """GPT-2. Parameter names are nanoGPT's.

    Raises:
        ValueError: the heads do not divide the width.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(f"a width of n_embd={config.n_embd} cannot be divided by n_head={config.n_head} heads")
        self.config = config
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        self._initialise()

    def _initialise(self) -> None:
        """N(0, 0.02), and 0.02 / sqrt(2 n_layer) for the two projections of a block that add to the residual stream."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if name.endswith("c_proj") else 0.02
                nn.init.normal_(module.weight, mean=0.0, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits of the next token, and the loss where targets are given.

        Args:
            tokens: (B, T) token ids, T at most block_size.
            targets: (B, T) ids of the tokens that follow; -1 where none counts.

        Returns:
            logits (B, T, vocab_size), and the mean cross-entropy in nats a token (a scalar) or None.

        Raises:
            ValueError: T is above block_size.
        """
        length = tokens.shape[1]
        if length > self.config.block_size:
            raise ValueError(f"a sequence of {length} tokens is longer than block_size={self.config.block_size}")
        logits = self.lm_head(self.transformer(tokens))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)

    def num_parameters(self) -> int:
        """All parameters, the tied embedding once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self) -> int:
        """Floating-point operations of one forward and backward pass a token (PaLM, arXiv 2204.02311, appendix B).

        6 for each parameter of a matrix product, and 12 n_layer n_embd block_size for attention scores and values. The
        position embedding takes part in no product; the tied token embedding does, as the output head.
        """
        in_products = self.num_parameters() - self.transformer.wpe.weight.numel()
        attention = 12 * self.config.n_layer * self.config.n_embd * self.config.block_size
        return 6 * in_products + attention
