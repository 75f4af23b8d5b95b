"""The feed-forward half of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.spec.base import F32, Shapes


@dataclass(frozen=True, slots=True)
class FfnSpec:
    """Dense when `experts` is 0; otherwise routed experts plus one shared expert."""

    width: int = 0
    experts: int = 0
    used: int = 0
    expert_width: int = 0
    shared_width: int = 0

    @property
    def is_moe(self) -> bool:
        return self.experts > 0

    def tensors(self, hidden: int) -> Shapes:
        """What a model file holds for one layer."""
        if not self.is_moe:
            return {
                "ffn_gate.weight": (self.width, hidden),
                "ffn_up.weight": (self.width, hidden),
                "ffn_down.weight": (hidden, self.width),
            }
        return {
            "ffn_gate_inp.weight": (self.experts, hidden),
            "ffn_gate_exps.weight": (self.experts, self.expert_width, hidden),
            "ffn_up_exps.weight": (self.experts, self.expert_width, hidden),
            "ffn_down_exps.weight": (self.experts, hidden, self.expert_width),
            "ffn_gate_inp_shexp.weight": (hidden,),
            "ffn_gate_shexp.weight": (self.shared_width, hidden),
            "ffn_up_shexp.weight": (self.shared_width, hidden),
            "ffn_down_shexp.weight": (hidden, self.shared_width),
        }

    def row_bytes(self, hidden: int, value_bytes: int) -> int:
        """One row of activations at the widest point. What a router says, and what each expert gives, is float32."""
        if not self.is_moe:
            return 3 * self.width * value_bytes
        inner = 3 * (self.used * self.expert_width + self.shared_width)
        return (self.experts + self.used * hidden) * F32 + inner * value_bytes
