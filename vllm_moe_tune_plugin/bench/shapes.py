"""The MoE layers that are measured, and how tokens are routed to their experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DTYPES = ("bf16", "fp16", "fp8", "fp8-block")
ROUTINGS = ("uniform", "skewed")

#: Weights of fp8-block share one scale in each square of this size.
BLOCK = 128


@dataclass(frozen=True)
class Shape:
    """One MoE layer of a model, as one GPU holds it.

    Attributes:
        intermediate: N, the width between the two projections on this GPU (a model's divided by the TP size).
        hidden: K, the width of the layer's input and output.
        router_weight_on_input: the model multiplies its input by the router's weight, not its output.
    """

    name: str
    num_experts: int
    top_k: int
    intermediate: int
    hidden: int
    activation: str = "silu"
    has_bias: bool = False
    router_weight_on_input: bool = False

    @classmethod
    def parse(cls, text: str) -> Shape:
        """A known shape's name, or ``E,topk,N,K``.

        Raises:
            ValueError: it is neither.
        """
        known = SHAPES | TINY
        if text.lower() in known:
            return known[text.lower()]
        try:
            num_experts, top_k, intermediate, hidden = (int(number) for number in text.split(","))
        except ValueError:
            raise ValueError(f"{text!r} is neither E,topk,N,K nor one of {', '.join(SHAPES)}") from None
        if min(num_experts, top_k, intermediate, hidden) < 1 or top_k > num_experts:
            raise ValueError(f"{text!r}: all four must be positive, and topk at most E")
        return cls(text, num_experts, top_k, intermediate, hidden)

    def expert_bytes(self, dtype: str) -> int:
        """What reading all of one expert moves: both weights, their scales and biases."""
        numbers = 3 * self.intermediate * self.hidden
        if dtype == "fp8-block":
            inner, outer = blocks(self.intermediate), blocks(self.hidden)
            size = numbers + 4 * (blocks(2 * self.intermediate) * outer + outer * inner)
        elif dtype == "fp8":
            size = numbers + 2 * 4
        else:
            size = numbers * 2
        return size + 2 * (2 * self.intermediate + self.hidden) * self.has_bias

    def activation_bytes(self, tokens: int) -> int:
        """The least that a call moves besides weights: its input, its output, the ids and weights of the routing."""
        return tokens * (2 * 2 * self.hidden + 8 * self.top_k)

    def refusal(self, dtype: str, ep: int) -> str:
        """Why this shape cannot be had in this dtype and EP size; empty where it can."""
        if self.num_experts % ep:
            return f"{self.num_experts} experts cannot be shared out to {ep} ranks"
        if dtype == "fp8-block" and (self.hidden % BLOCK or self.intermediate % BLOCK):
            return f"vLLM quantises activations in groups of {BLOCK}, which do not divide N and K"
        return ""


def blocks(size: int) -> int:
    """How many quantisation blocks cover ``size``."""
    return -(-size // BLOCK)


def _known(*shapes: Shape) -> dict[str, Shape]:
    return {shape.name: shape for shape in shapes}


#: By name, in the order in which they are measured. ``-tp8``: one of eight tensor-parallel ranks.
SHAPES = _known(
    Shape("qwen3-30b-a3b", 128, 8, 768, 2048),
    Shape("qwen3-next-80b-a3b", 512, 10, 512, 2048),
    Shape("qwen3.5-35b-a3b", 256, 8, 512, 2048),
    Shape("deepseek-v3-tp8", 256, 8, 256, 7168),
    Shape("gpt-oss-120b", 128, 4, 2880, 2880, activation="swigluoai", has_bias=True),
    Shape("gpt-oss-20b", 32, 4, 2880, 2880, activation="swigluoai", has_bias=True),
    Shape("mixtral-8x7b", 8, 2, 14336, 4096),
    Shape("llama-4-maverick-tp8", 128, 1, 1024, 5120, router_weight_on_input=True),
    Shape("glm-4.5-air", 128, 8, 1408, 4096),
)

#: What Triton's interpreter runs in seconds; the paths are those of the large ones.
TINY = _known(
    Shape("tiny", 16, 2, 128, 128),
    Shape("tiny-oss", 8, 2, 32, 64, activation="swigluoai", has_bias=True),
    Shape("tiny-llama4", 8, 1, 32, 64, router_weight_on_input=True),
)

#: Expert of rank r has a popularity of r ** -ZIPF in a skewed routing.
ZIPF = 1.0


def draw_routing(shape: Shape, routing: str, calls: int, tokens: int, device: Any) -> tuple[Any, Any]:
    """Fresh ids [calls, tokens, top_k] (int32) and weights (float32, summing to 1).

    Each token takes ``top_k`` different experts. Skewed: popularity follows Zipf's law, and each call, which stands for a
    layer, has popular experts of its own.
    """
    import torch

    scores = -torch.log(-torch.log(torch.rand(calls, tokens, shape.num_experts, device=device).clamp_(1e-20, 1 - 1e-7)))
    if routing == "skewed":
        # Adding Gumbel noise to log-probabilities and taking the largest samples without replacement.
        ranks = torch.rand(calls, 1, shape.num_experts, device=device).argsort(-1) + 1
        scores -= ZIPF * ranks.log()
    ids = scores.topk(shape.top_k, dim=-1).indices.to(torch.int32)
    weights = torch.softmax(torch.randn(calls, tokens, shape.top_k, device=device), dim=-1)
    return ids, weights


def parse_numbers(text: str) -> Sequence[int]:
    """``1,2,4`` or ``1-4`` as positive numbers.

    Raises:
        ValueError: it is neither.
    """
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    if not numbers or min(numbers) < 1:
        raise ValueError(f"{text!r} names no positive numbers")
    return numbers
