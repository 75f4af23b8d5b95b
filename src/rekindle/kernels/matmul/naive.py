"""Matrix products by definition: the weight as float32 values, then torch."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor
from torch.nn.functional import silu

from rekindle.kernels.matmul.packing import GROUPED, TABLE
from rekindle.kernels.matmul.types import Packed


def stored_values(raw: np.ndarray, type: str, columns: int) -> Tensor:
    """Stored rows uint8 [rows, bytes of a row] -> float32 [rows, columns]."""
    values = dequantize(np.ascontiguousarray(raw), gguf.GGMLQuantizationType[type])
    return torch.from_numpy(np.array(values, dtype=np.float32)).view(raw.shape[0], columns)


def packed_values(packed: Packed) -> Tensor:
    """The planes as float32 [rows, columns]: what every kernel that reads planes must agree with."""
    codes = _codes(packed).float()  # [rows, blocks, 32]
    scales = packed.scales[..., None]
    if packed.type in ("Q4_K", "Q5_K"):
        d, dmin = (_per_block(part) for part in _halves(_super_scales(packed)))
        values = d * (scales & 255).float() * codes - dmin * (scales >> 8 & 255).float()
    elif packed.type == "Q6_K":
        halves = torch.cat((scales << 8 >> 8, scales >> 8), dim=-1).float()  # both signed
        d = _per_block(_super_scales(packed)) * halves
        values = d.repeat_interleave(16, dim=-1) * (codes - 32)
    elif packed.type == "IQ4_XS":
        d = _per_block(_super_scales(packed)) * scales.float()
        values = d * _looked_up(codes)
    elif packed.type in ("Q4_1", "Q5_1"):
        d, least = (part[..., None] for part in _halves(packed.scales))
        values = d * codes + least
    elif packed.type == "IQ4_NL":
        values = _float16(scales) * _looked_up(codes)
    else:
        values = _float16(scales) * (codes - {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128}[packed.type])
    return values.reshape(packed.rows, packed.columns)


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, in], weight [out, in] -> [rows, out] in x.dtype, summed in float32."""
    return (x.float() @ weight.float().T).to(x.dtype)


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate x) · (up x), in x.dtype; nothing is rounded in between."""
    wide = x.float()
    return (silu(wide @ gate.float().T) * (wide @ up.float().T)).to(x.dtype)


def _codes(packed: Packed) -> Tensor:
    """The codes as int32 [rows, blocks, 32]."""
    if packed.type in GROUPED:
        return _grouped_codes(packed)
    fields, width = (4, 8) if packed.type == "Q8_0" else (8, 4)
    j = torch.arange(fields, device=packed.codes.device)[:, None]
    codes = packed.codes[..., None, :] >> j * width & (1 << width) - 1  # [rows, blocks, j, i]
    if packed.high_bits is not None:
        place = 4 * j + torch.arange(4, device=packed.codes.device)
        codes = codes | (packed.high_bits[..., None, None] >> place & 1) << 4
    return codes.flatten(-2)


def _grouped_codes(packed: Packed) -> Tensor:
    groups = packed.codes.view(packed.rows, -1, 4, 4)  # [rows, groups, t, i]
    i = torch.arange(4, device=packed.codes.device)
    codes = []
    for weight in range(32):
        s, t, u, h = weight // 16, weight % 16 // 4, weight % 4 // 2, weight % 2
        f = 2 * s + u
        code = groups[:, :, t] >> 16 * h + 4 * f & 15  # [rows, groups, i]
        if packed.high_bits is not None:
            six = packed.high_bits.dtype == torch.int64
            place = 32 * (i // 2) + 16 * h + 8 * (i % 2) + 2 * f if six else 16 * h + 4 * i + f
            entry = packed.high_bits.view(packed.rows, -1, 4)[:, :, t, None]
            code = code | (entry >> place & (3 if six else 1)).to(code.dtype) << 4
        codes.append(code)
    return torch.stack(codes, dim=-1).view(packed.rows, -1, 32)


def _looked_up(codes: Tensor) -> Tensor:
    return torch.tensor(TABLE, dtype=torch.float32, device=codes.device)[codes.long()]


def _super_scales(packed: Packed) -> Tensor:
    assert packed.super_scales is not None, f"{packed.type} has super_scales"
    return packed.super_scales


def _per_block(super_scales: Tensor) -> Tensor:
    """[rows, blocks / 8] -> [rows, blocks, 1]."""
    return super_scales.repeat_interleave(8, dim=1)[..., None]


def _float16(bits: Tensor) -> Tensor:
    return bits.contiguous().view(torch.float16).float()


def _halves(bits: Tensor) -> tuple[Tensor, Tensor]:
    """int32 [..., n] -> the two float16 numbers in each, as float32."""
    pairs = _float16(bits).view(*bits.shape, 2)
    return pairs[..., 0], pairs[..., 1]
