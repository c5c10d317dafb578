"""Attention of architectures whose modules do not pass on kvloom's arguments, or do not call transformers'
attention interface.

Most models do both, and nothing here concerns them. `_MODULES` has those that do not, and each entry says
what is done about it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import MethodType
from typing import Any, Final

from torch import Tensor, nn

from kvloom.exec.attention import kvloom_attention
from kvloom.types.errors import ConfigError

_STATE: Final = "kv"


class _Current(threading.local):
    """The forward state of the model's forward that runs on this thread."""

    state: Any = None


def reach_attention(module: nn.Module) -> bool:
    """Changes the model's attention modules: they get what the model is called with if its layers do not pass
    it on, and they call kvloom's attention if they do not call the interface. Returns True if a module does
    not call the interface, which need not be set then. Raises ConfigError for a form of attention that kvloom
    does not have."""
    found = [
        (one, _MODULES[type(one).__name__]) for one in module.modules() if type(one).__name__ in _MODULES
    ]
    if not found:
        return False
    current = _Current()

    def enter(_: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
        current.state = named.get(_STATE)

    def leave(*_: object) -> None:
        current.state = None

    def hand_over(_: nn.Module, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return arguments, {**named, _STATE: current.state}

    for one, prepare in found:
        prepare(one)
        one.register_forward_pre_hook(hand_over, with_kwargs=True)
    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)
    return any("forward" in vars(one) for one, _ in found)


def _as_it_is(module: Any) -> None:
    """Does nothing: the module calls the interface, and the hooks that all have are enough for it."""


def _without_tuning(module: Any) -> None:
    """Leaves out a factor that counts positions from the first row of a call, whatever sequence that is of.
    It is 1 for all positions of the context that `card` allows."""
    module.attn_temperature_tuning = False


def _falcon(module: Any) -> None:
    if module.config.alibi:
        raise ConfigError(
            "its attention has biases by distance (ALiBi), about which transformers' own forms of Falcon do "
            "not agree; a Falcon with rotary embeddings is right"
        )
    module.forward = MethodType(_falcon_forward, module)


def _falcon_forward(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor],
    kv: Any = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Computes what `FalconAttention` does with rotary embeddings. If its layers repeat KV heads for their
    queries, one of each is taken."""
    q, k, v = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
    if self.new_decoder_architecture:
        group = self.num_heads // self.num_kv_heads
        k, v = k[:, ::group], v[:, ::group]
    q, k = _stock(self, "apply_rotary_pos_emb")(q, k, *position_embeddings)
    out, _weights = kvloom_attention(self, q, k, v, None, scaling=self.inv_norm_factor, kv=kv)
    return self.dense(out.flatten(2)), None


def _bloom(module: Any) -> None:
    slopes = _stock(module, "_get_alibi_slopes")(module.num_heads, module.dense.weight.device)
    module.slopes = slopes.float().contiguous()
    module.forward = MethodType(_bloom_forward, module)


def _bloom_forward(
    self: Any, hidden_states: Tensor, residual: Tensor, kv: Any = None, **_: object
) -> tuple[Tensor, None]:
    """Computes what `BloomAttention` does."""
    q, k, v = self._reshape(self.query_key_value(hidden_states))
    given = {"scaling": self.inv_norm_factor, "slopes": self.slopes, "kv": kv}
    out, _weights = kvloom_attention(self, q, k, v, None, **given)
    return self.dense(out.flatten(2)) + residual, None


def _mpt(module: Any) -> None:
    device = module.out_proj.weight.device
    biases = _stock(module, "build_mpt_alibi_tensor")(module.n_heads, 2, device=device)
    module.slopes = -biases[:, 0, 0].float()  # those of the token before
    module.forward = MethodType(_mpt_forward, module)


def _mpt_forward(self: Any, hidden_states: Tensor, kv: Any = None, **_: object) -> tuple[Tensor, None]:
    """Computes what `MptAttention` does."""
    qkv = self.Wqkv(hidden_states)
    if self.clip_qkv:
        qkv = qkv.clamp(-self.clip_qkv, self.clip_qkv)
    q, k, v = (x.unflatten(2, (self.n_heads, -1)).transpose(1, 2) for x in qkv.chunk(3, 2))
    given = {"scaling": self.softmax_scale, "slopes": self.slopes, "kv": kv}
    out, _weights = kvloom_attention(self, q, k, v, None, **given)
    return self.out_proj(out.flatten(2)), None


def _stock(module: Any, name: str) -> Any:
    """Returns a function of the file in which the module's class is."""
    return type(module).__init__.__globals__[name]


# class of an attention module → what makes it ready, once
_MODULES: Final[dict[str, Callable[[Any], None]]] = {
    "StableLmAttention": _as_it_is,
    "NemotronAttention": _as_it_is,
    "Llama4TextAttention": _without_tuning,
    "FalconAttention": _falcon,
    "BloomAttention": _bloom,
    "MptAttention": _mpt,
}
