"""Which kinds of tensors a kernel can be given: those whose elements lie in memory of the CPU or a GPU, as they are.

A kernel reads memory. Subclasses of torch.Tensor that have memory, nn.Parameter among them, are served as what lies
there; what only stands for values that lie elsewhere, or differ from what lies there, is refused.
"""

from __future__ import annotations

from typing import Any

SERVED_DEVICES = ("cpu", "cuda")


def refusal(name: str, tensor: Any) -> str | None:
    """Why the argument `name` can't be read by a kernel, and the way out, in a sentence; None if it can.

    Strides and alignment are not judged here.
    """
    import torch

    kind = type(tensor).__name__
    if not isinstance(tensor, torch.Tensor):
        named = f"{type(tensor).__module__}.{kind}" if kind == "Tensor" else kind
        way_out = f"; pass torch.from_dlpack({name})" if is_foreign(tensor) else ""
        return f"'{name}' is {named}, not a torch.Tensor{way_out}"
    if tensor.is_nested:
        return f"'{name}' is a nested tensor; pass its values packed or padded, as the spec's shape says"
    if tensor.layout is not torch.strided or tensor.device.type not in SERVED_DEVICES:
        return f"'{name}' is a {tensor.layout} tensor on {tensor.device}; dense, on cpu or cuda is served"
    if tensor.is_quantized:
        return f"'{name}' is quantized ({tensor.dtype}); pass {name}.dequantize(), or its integers and scales"
    # torch's public functions give negative views of the imaginary parts of complex numbers alone: none is contiguous
    # and 16-byte aligned, so that the hot path, which can't see the bit, takes none either.
    if tensor.is_conj():
        return f"'{name}' is a conjugate view, whose memory holds other values; pass {name}.resolve_conj()"
    if tensor.is_neg():
        return f"'{name}' is a negative view, whose memory holds other values; pass {name}.resolve_neg()"
    if tensor.numel() and not _has_memory(tensor):
        if kind in ("Tensor", "Parameter"):
            why = "it is under a torch.func transform, all zeros by symbol, or its storage was freed"
        else:
            why = f"a {kind} stands for tensors that lie elsewhere"
        return f"'{name}' has no memory of its own ({why}); pass a plain tensor, or trace tunekit.torch_op instead"
    return None


def is_foreign(value: Any) -> bool:
    """Whether a value is a tensor of another library than torch. TVM-FFI takes those too, on a stream of their own."""
    import torch

    if isinstance(value, torch.Tensor):
        return False
    return hasattr(value, "__dlpack__") or hasattr(value, "__dlpack_c_exchange_api__")


def _has_memory(tensor: Any) -> bool:
    """Whether a tensor's elements can be pointed to. (A wrapper has the shape of one, and a null pointer.)"""
    try:
        storage = tensor.untyped_storage()
        return storage.device.type in SERVED_DEVICES and bool(storage.data_ptr())  # a FakeTensor's lies on meta
    except RuntimeError:  # NotImplementedError too: what torch raises of tensors that have no storage
        return False
