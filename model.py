"""GPT-2 (Radford et al. 2019) as trained in the MARS comparison (arXiv 2411.10438), nothing else.

Pre-norm transformer, learned positions, tied token embedding and output head, tanh GELU. Two departures from GPT-2,
both from the published runs: no biases, and attention scores divided by the layer's number (a stabilisation of the
Mistral project's GPT-2s). Neither the attention matrices nor, where `chunked_loss` says so, the logits of a batch ever
exist as a whole. The file needs only torch and can be copied out and used alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -1  # a target that does not count
SHORT = 256  # tokens up to which attention on a CPU is faster in float32
AT_ONCE = {"cpu": 1 << 22}  # logits that a block of the loss has; a CPU's caches are small
AT_ONCE_ELSEWHERE = 1 << 27


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
        y = attend(query, key, value, self.scale, self.dropout if self.training else 0.0)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(batch, length, width)))


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
    """softmax(scale * query key^T + causal mask) value, of (B, heads, T, D) each, by a kernel that never holds the
    (T, T) matrices."""
    if query.device.type == "cpu" and query.dtype != torch.float64 and query.shape[2] <= SHORT:
        # torch's kernel of the backward pass is up to eight times slower there in 16 bits than in float32.
        with torch.autocast("cpu", enabled=False):
            query, key, value = (part.float() for part in (query, key, value))
            return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, scale=scale)
    return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, scale=scale)


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


def loss_of_all(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy from all logits at once; shapes as of `GPT.forward`, hidden (B, T, C), weight (V, C)."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


def log_sum_exp(logits: Tensor) -> Tensor:  # (N, V') -> (N), float32
    return torch.logsumexp(logits.float(), dim=1)


def log_sum_exp_by_softmax(logits: Tensor) -> Tensor:
    """As `log_sum_exp`, in one kernel of torch's where nothing fuses several."""
    return logits[:, 0].float() - torch.log_softmax(logits, dim=1, dtype=torch.float32)[:, 0]


def to_probabilities(logits: Tensor, log_sums: Tensor) -> Tensor:
    """exp(logits - log_sums), in the place of the logits (N, V'); log_sums (N, 1)."""
    return logits.copy_((logits - log_sums).exp_())


class Kernels:
    """The elementwise work of the loss, as it is or compiled.

    Args:
        compile: takes a function and options of torch.compile.
    """

    def __init__(self, compile: Callable[..., Any] | None = None) -> None:
        self.loss, self.log_sum_exp, self.to_probabilities = loss_of_all, log_sum_exp_by_softmax, to_probabilities
        if compile is not None:
            self.loss = compile(loss_of_all)
            # The last block is smaller; threads are to share the work whatever the size compiled for first.
            any_size: dict[str, Any] = {"dynamic": True, "options": {"cpp.dynamic_threads": True}}
            self.log_sum_exp = compile(log_sum_exp, **any_size)
            self.to_probabilities = compile(to_probabilities, **any_size)


class ChunkedLoss(torch.autograd.Function):
    """Mean cross-entropy of hidden weight^T, from blocks of the vocabulary (Wijmans et al. 2024, arXiv 2411.09009).

    The first pass keeps the logarithm of each row's sum of exponentials alone. The backward pass finds the logits of a
    block again, turns them into probabilities, and these into the block's part of both gradients: four products of the
    size of the output head instead of three, and no memory for all logits, of which a batch has V a token.

    Numbers are those of autocast where it is on, sums are float32.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, block: int, kernels: Kernels) -> Tensor:
        """Args: hidden (N, C), weight (V, C), targets (N); `block` rows of weight are worked on at a time."""
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            hidden = hidden.to(torch.get_autocast_dtype(device))
        sums, chosen = [], torch.zeros(len(hidden), device=hidden.device)
        with torch.autocast(device, enabled=False):
            for rows, logits in logits_of_blocks(hidden, weight, block):
                sums.append(kernels.log_sum_exp(logits))
                places, inside = places_of(targets, rows)
                chosen.addcmul_(logits.gather(1, places).squeeze(1).float(), inside)
        log_sums = torch.stack(sums).logsumexp(dim=0)
        counts = targets != IGNORED
        count = counts.sum()
        ctx.save_for_backward(hidden, weight, targets, log_sums.masked_fill(~counts, math.inf), count)
        ctx.block, ctx.kernels = block, kernels
        return ((log_sums - chosen) * counts).sum() / count

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_sums, count = ctx.saved_tensors
        scale, log_sums = (grad / count).reshape(1, 1), log_sums[:, None]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.promote_types(hidden.dtype, torch.float32))
        grad_weight = torch.empty_like(weight)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, logits in logits_of_blocks(hidden, weight, ctx.block):
                # The gradient of a row's logits: its probabilities, less one at the target; zero where none counts.
                errors = ctx.kernels.to_probabilities(logits, log_sums)
                places, inside = places_of(targets, rows)
                errors.scatter_add_(1, places, -inside[:, None].to(errors.dtype))
                grad_hidden.add_(errors @ weight[rows].to(errors.dtype))
                torch.mul(errors.T @ hidden, scale, out=grad_weight[rows])
        return grad_hidden.mul_(scale), grad_weight, None, None, None


def logits_at_once(hidden: Tensor) -> int:
    """How many of the vocabulary's logits a block of the loss has for hidden states (B, T, C)."""
    tokens = hidden.shape[0] * hidden.shape[1]
    return max(64, AT_ONCE.get(hidden.device.type, AT_ONCE_ELSEWHERE) // tokens // 64 * 64)


def logits_of_blocks(hidden: Tensor, weight: Tensor, block: int) -> Iterator[tuple[slice, Tensor]]:
    """The rows of each block of the weight, and its logits (N, rows), all in the same memory."""
    room = hidden.new_empty(len(hidden) * min(block, len(weight)))
    for start in range(0, len(weight), block):
        part = weight[start : start + block].to(hidden.dtype)
        logits = room[: len(hidden) * len(part)].view(len(hidden), len(part))
        yield slice(start, start + len(part)), torch.mm(hidden, part.T, out=logits)


def places_of(targets: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Where in a block each target is, (N, 1), and as 1.0 or 0.0 whether it is there at all, (N)."""
    inside = (targets >= rows.start) & (targets < rows.stop)
    return (targets - rows.start).clamp(0, rows.stop - rows.start - 1)[:, None], inside.float()


class GPT(nn.Module):
    """GPT-2. Parameter names are nanoGPT's.

    Args:
        config: the shape.
        chunked_loss: whether the loss is found from blocks of logits: far less memory, a third more operations of the
            output head in training; None: on a CPU, where this is faster too.

    Raises:
        ValueError: the heads do not divide the width.
    """

    def __init__(self, config: GPTConfig, chunked_loss: bool | None = None) -> None:
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(f"a width of n_embd={config.n_embd} cannot be divided by n_head={config.n_head} heads")
        self.config, self.chunked_loss = config, chunked_loss
        self._kernels = Kernels()
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

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits of the next token, or the loss where targets are given.

        Args:
            tokens: (B, T) token ids, T at most block_size.
            targets: (B, T) ids of the tokens that follow; -1 where none counts.

        Returns:
            logits (B, T, vocab_size); with targets the mean cross-entropy in nats a token, a float32 scalar.

        Raises:
            ValueError: T is above block_size.
        """
        length = tokens.shape[1]
        if length > self.config.block_size:
            raise ValueError(f"a sequence of {length} tokens is longer than block_size={self.config.block_size}")
        hidden = self.transformer(tokens)
        if targets is None:
            return self.lm_head(hidden)
        chunked = hidden.device.type == "cpu" if self.chunked_loss is None else self.chunked_loss
        block = logits_at_once(hidden) if chunked else self.config.vocab_size
        if block >= self.config.vocab_size:
            return self._kernels.loss(hidden, self.lm_head.weight, targets)
        return ChunkedLoss.apply(hidden.flatten(0, 1), self.lm_head.weight, targets.flatten(), block, self._kernels)

    def compile(self, **options: Any) -> None:
        """Has torch.compile make one graph of the transformer and one of the loss, or of the loss's elementwise parts
        where that works on blocks.

        Args:
            options: as of torch.compile.
        """
        self.transformer.compile(**options)
        self._kernels = Kernels(lambda function, **own: torch.compile(function, **own, **options))

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
