"""A stand-in for torch that knows shapes and nothing else: enough to build a `Decoder` and to record its forward.

Importing torch takes seconds, and recording needs no number. The process that records (plait.plan.recorder) puts this
module in torch's place before it imports the forward; no other process may. It is strict: what it does not know raises,
and then the calling process records with torch. A name that is mentioned while modules are imported has to be listed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


class Mentioned:
    """A name of torch that may be passed around while a forward is recorded. Whatever is done with it is an error."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"{self._name} is used while shapes are recorded")

    __call__ = __getitem__ = __iter__ = __bool__ = __len__ = __contains__ = __eq__ = __lt__ = _refuse
    __hash__ = None  # type: ignore[assignment]


class DType:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"torch.{self._name}"


class Tensor:
    """A shape and a dtype."""

    def __init__(self, *shape: Any, dtype: Any = None) -> None:
        self.shape = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        self.dtype = dtype or float32

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def _refuse(self, *_: Any) -> Any:
        raise TypeError("a shape has no numbers")

    __bool__ = __iter__ = __len__ = __getitem__ = __contains__ = _refuse


class Parameter(Tensor):
    def __init__(self, data: Tensor, requires_grad: bool = True) -> None:
        super().__init__(*data.shape, dtype=data.dtype)


class Module:
    """Parameters and modules by attribute, in the order of their assignment."""

    training = True
    forward: Any  # every part defines its own

    def __init__(self) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        yield prefix, self
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield from value.named_modules(f"{prefix}{name}.")

    def modules(self) -> Iterator[Module]:
        return (module for _, module in self.named_modules())

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        seen = set()
        for prefix, module in self.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Parameter) and id(value) not in seen:
                    seen.add(id(value))
                    yield prefix + name, value

    def to(self, dtype: Any) -> Any:
        for _, parameter in self.named_parameters():
            parameter.dtype = dtype
        return self

    def eval(self) -> Any:
        for module in self.modules():
            module.training = False
        return self


class ModuleList(Module):
    def __init__(self, modules: Any) -> None:
        super().__init__()
        self._count = 0
        for module in modules:
            setattr(self, str(self._count), module)
            self._count += 1

    def __iter__(self) -> Iterator[Module]:
        return (getattr(self, str(index)) for index in range(self._count))


class Linear(Module):
    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(outputs, inputs))
        self.bias = Parameter(Tensor(outputs)) if bias else None


class _Device:
    """`torch.device(...)`: a context that changes nothing, of the kind that it was made with."""

    def __init__(self, name: Any) -> None:
        self.type = str(name)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


# Names that the reference's tables of functions mention when they are imported.
MENTIONED = {"torch": ("sigmoid",), "torch.nn.functional": ("gelu", "relu", "silu")}

float32, bfloat16, float16 = DType("float32"), DType("bfloat16"), DType("float16")


def install() -> None:
    """Put the stand-in in torch's place. RuntimeError where torch has been imported."""
    if "torch" in sys.modules:
        raise RuntimeError("torch has been imported already")
    torch = _module("torch", Tensor=Tensor, device=_Device, float32=float32, bfloat16=bfloat16, float16=float16)
    for name in ("empty", "ones", "zeros"):
        setattr(torch, name, Tensor)
    nn = _module("torch.nn", Module=Module, ModuleList=ModuleList, Linear=Linear, Parameter=Parameter)
    functional = _module("torch.nn.functional")
    torch.nn, nn.functional = nn, functional  # type: ignore[attr-defined]


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update({mention: Mentioned(f"{name}.{mention}") for mention in MENTIONED.get(name, ())} | contents)
    sys.modules[name] = module
    return module
