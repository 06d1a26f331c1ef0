# mypy: ignore-errors
"""Activations and their derivatives on tiles in registers, in fp32: the elementwise half of every epilogue.

gate is the first pre-activation (x W1^T + b1), up the second (x W3^T + b3); activations without a product ignore up.
The names are those of `torchmoe.kernels.activations`; identity recomputes one half of H.
"""

import triton
import triton.language as tl

# GPT-OSS: gate is clamped from above, up on both sides; a gradient passes where the value is inside, borders included.
_ALPHA = tl.constexpr(1.702)
_LIMIT = tl.constexpr(7.0)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    """A = act(H) for one tile; fp32 in, fp32 out."""
    if ACTIVATION == "swiglu":
        result = gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "geglu":
        result = _gelu(gate) * up
    elif ACTIVATION == "reglu":
        result = _relu(gate) * up
    elif ACTIVATION == "clamped_swiglu":
        clamped = _clamp_above(gate)
        result = clamped * tl.sigmoid(clamped * _ALPHA) * (_clamp_both(up) + 1.0)
    elif ACTIVATION == "silu":
        result = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        result = _gelu(gate)
    elif ACTIVATION == "relu2":
        positive = _relu(gate)
        result = positive * positive
    elif ACTIVATION == "identity":
        result = gate
    else:
        tl.static_assert(False, "activation without a tile function")
    return result


@triton.jit
def activate_gradient(gate, up, ACTIVATION: tl.constexpr):
    """(dA/dgate, dA/dup) for one tile; the second is dA/dgate again where the activation has no up."""
    if ACTIVATION == "swiglu":
        sigmoid = tl.sigmoid(gate)
        d_gate = up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        d_up = gate * sigmoid
    elif ACTIVATION == "geglu":
        d_gate = up * _gelu_gradient(gate)
        d_up = _gelu(gate)
    elif ACTIVATION == "reglu":
        d_gate = tl.where(gate > 0, up, 0.0)
        d_up = _relu(gate)
    elif ACTIVATION == "clamped_swiglu":
        clamped = _clamp_above(gate)
        sigmoid = tl.sigmoid(clamped * _ALPHA)
        slope = sigmoid * (1.0 + clamped * _ALPHA * (1.0 - sigmoid))
        d_gate = tl.where(gate > _LIMIT, 0.0, (_clamp_both(up) + 1.0) * slope)
        d_up = tl.where((up > _LIMIT) | (up < -_LIMIT), 0.0, clamped * sigmoid)
    elif ACTIVATION == "silu":
        sigmoid = tl.sigmoid(gate)
        d_gate = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        d_up = d_gate
    elif ACTIVATION == "gelu":
        d_gate = _gelu_gradient(gate)
        d_up = d_gate
    elif ACTIVATION == "relu2":
        d_gate = 2.0 * _relu(gate)
        d_up = d_gate
    else:
        tl.static_assert(False, "activation without a tile function")
    return d_gate, d_up


# Comparisons below are written so that NaN stays NaN: a NaN row must be seen, not silently become zero.


@triton.jit
def _relu(value):
    return tl.where(value < 0, 0.0, value)


@triton.jit
def _clamp_above(value):
    return tl.where(value > _LIMIT, _LIMIT, value)


@triton.jit
def _clamp_both(value):
    return tl.where(value < -_LIMIT, -_LIMIT, tl.where(value > _LIMIT, _LIMIT, value))


@triton.jit
def _gelu(value):
    return 0.5 * value * (1.0 + tl.erf(value * _SQRT_HALF))


@triton.jit
def _gelu_gradient(value):
    return 0.5 * (1.0 + tl.erf(value * _SQRT_HALF)) + value * _INV_SQRT_2PI * tl.exp(-0.5 * value * value)
