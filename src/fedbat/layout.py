"""Which tensors of a model travel, in which order, and how: the contract between client, wire and server."""

import hashlib
import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn

from fedbat.errors import ConfigError, WireError
from fedbat.streams import Tensors

Role = Literal["compress", "dense", "max", "skip"]
"""compress: the method encodes it; dense: its change travels as floats; max: integers, the server keeps the largest;
skip: it is not sent."""

_INTEGERS = tuple(f"{sign}int{width}" for sign in ("", "u") for width in (8, 16, 32, 64))
_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16", "bool", *_INTEGERS)}

_TOO_MANY = 2**60  # elements: their bytes could no longer be counted in 64 bits


class Entry(NamedTuple):
    """One tensor that travels."""

    name: str
    role: Role
    dtype: torch.dtype
    shape: torch.Size

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        """Bytes when sent uncompressed: integers in their own type, floats as float32 (float64 stays float64)."""
        return self.numel * self.wire_dtype.itemsize

    @property
    def wire_dtype(self) -> torch.dtype:
        """The type in which it travels when it is not compressed."""
        half = self.dtype in (torch.float16, torch.bfloat16)
        return torch.float32 if half else self.dtype


class Layout(tuple[Entry, ...]):
    """The tensors that travel, in wire order: parameters as the model lists them, then buffers."""

    @cached_property
    def compressed(self) -> "Layout":
        """The tensors a method encodes."""
        return Layout(entry for entry in self if entry.role == "compress")

    @cached_property
    def rest(self) -> "Layout":
        """The tensors that travel as they are."""
        return Layout(entry for entry in self if entry.role != "compress")

    @cached_property
    def text(self) -> str:
        """One line for each tensor; `from_text` reads it."""
        return "".join(
            f"{role}\t{str(dtype).removeprefix('torch.')}\t{','.join(map(str, shape))}\t{name}\n"
            for name, role, dtype, shape in self
        )

    @cached_property
    def hash(self) -> bytes:
        """Eight bytes that differ when names, roles, types, shapes or the order differ."""
        return hashlib.blake2b(self.text.encode(), digest_size=8).digest()

    def __str__(self) -> str:
        """A table; its bytes are those of the tensor sent uncompressed."""
        rows = [("role", "shape", "name", "bytes")]
        rows += [(e.role, " x ".join(map(str, e.shape)) or "1", e.name, f"{e.nbytes:,}") for e in self]
        role, shape, name, nbytes = (max(map(len, column)) for column in zip(*rows, strict=True))
        return "\n".join(f"{a:{role}}  {b:{shape}}  {c:{name}}  {d:>{nbytes}}" for a, b, c, d in rows)

    @staticmethod
    def from_text(text: str) -> "Layout":
        """The layout that another process wrote as `text`."""
        return Layout(_entry_from_line(line) for line in text.removesuffix("\n").split("\n") if text)


def layout_of(model: nn.Module, roles: Mapping[str, Role] | None = None) -> Layout:
    """The default policy, overridden for names that match a pattern of `roles` ("head.*": "dense"; the last wins).

    Weights with two or more dimensions are compressed; other floats (biases, norms, float buffers) travel dense, as do
    parameters without elements; of integer buffers the server keeps the maximum; frozen parameters are not sent. Tied
    weights count once, and patterns match any of their names.
    """
    model = uncompiled(model)
    entries, unused, tied = [], set(roles or {}), tied_names(model)
    for name, tensor, role in _tensors_with_default_role(model):
        names = [name, *(other for other, first in tied.items() if first == name)]
        for pattern, wanted in (roles or {}).items():
            if pattern in names or any(fnmatchcase(one, pattern) for one in names):
                unused.discard(pattern)
                if pattern in names or _fits(tensor, wanted):
                    role = wanted
        if role != "skip":
            _check(name, tensor, role)
            entries.append(Entry(name, role, tensor.dtype, tensor.shape))
    if unused:
        raise ConfigError(
            f"roles names {', '.join(sorted(map(repr, unused)))}, which matches no tensor of the model; "
            "patterns are matched against the names in model.state_dict()"
        )
    if not entries:
        raise ConfigError(
            "the model has nothing to send: every tensor is frozen or skipped; check requires_grad and roles"
        )
    return Layout(entries)


def uncompiled(model: nn.Module) -> nn.Module:
    """The model inside torch.compile's wrapper, which gives every tensor another name; other models as they are."""
    inside = getattr(model, "_orig_mod", None)
    return inside if isinstance(inside, nn.Module) else model


def whole_layout(model: nn.Module, layout: Layout) -> Layout:
    """The layout of the full state dict, in its order: tied weights take their partner's role, tensors that `layout`
    skips travel unchanged.
    """
    roles: dict[str, Role] = {entry.name: entry.role for entry in layout}
    entries, tied = [], tied_names(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        role = roles.get(tied.get(name, name), "dense" if tensor.is_floating_point() else "max")
        entries.append(Entry(name, role, tensor.dtype, tensor.shape))
    return Layout(entries)


def tied_names(model: nn.Module) -> dict[str, str]:
    """The other names of tied tensors, each with the name under which it travels."""
    names = {id(tensor): name for name, tensor, _ in _tensors_with_default_role(model)}
    everything = model.state_dict(keep_vars=True).items()
    return {name: names[id(tensor)] for name, tensor in everything if names.get(id(tensor), name) != name}


def tensors_of(model: nn.Module, layout: Layout) -> Tensors:
    """The live tensors of the model that travel, detached from autograd but sharing memory."""
    everything = {name: tensor.detach() for name, tensor, _ in _tensors_with_default_role(model)}
    for entry in layout:
        if entry.name not in everything or everything[entry.name].shape != entry.shape:
            found = list(everything[entry.name].shape) if entry.name in everything else "nothing"
            raise ConfigError(
                f"the layout is of another model: it has {entry.name} of shape {list(entry.shape)}, this model has "
                f"{found}; build it by layout_of(model)"
            )
    return {entry.name: everything[entry.name] for entry in layout}


def _tensors_with_default_role(model: nn.Module) -> Iterator[tuple[str, Tensor, Role]]:
    for name, parameter in model.named_parameters():
        trained: Role = "compress" if parameter.dim() >= 2 and parameter.numel() else "dense"
        yield name, parameter, trained if parameter.requires_grad else "skip"
    persistent = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield name, buffer, "dense" if buffer.is_floating_point() else "max"


def _entry_from_line(line: str) -> Entry:
    match line.split("\t"):
        case [role, dtype, sizes, name] if role in get_args(Role) and dtype in _DTYPES:
            shape = [int(size) for size in sizes.split(",") if size.isdecimal() and len(size) < 20]
            if ",".join(map(str, shape)) == sizes and math.prod(size or 1 for size in shape) < _TOO_MANY:
                return Entry(name, cast(Role, role), _DTYPES[dtype], torch.Size(shape))
    raise WireError(f"unreadable layout line {line!r}, expected role, type, sizes and name; was it sent by fedbat?")


def _fits(tensor: Tensor, role: Role) -> bool:
    """Whether a pattern such as "head.*" may give a tensor this role: integer buffers cannot travel as floats."""
    if role == "compress":
        return isinstance(tensor, nn.Parameter) and tensor.numel() > 0
    return role != "dense" or tensor.is_floating_point()


def _check(name: str, tensor: Tensor, role: Role) -> None:
    if "\t" in name or "\n" in name:
        raise ConfigError(
            f"the name {name!r} holds a tab or a line break, which separate the fields of a layout; rename it"
        )
    if role not in get_args(Role):
        raise ConfigError(f"role of {name} is {role!r}; choose from {', '.join(get_args(Role))}")
    if tensor.is_complex():
        raise ConfigError(f"{name} is complex, only real tensors can be sent; give it the role 'skip'")
    if tensor.dtype not in _DTYPES.values():
        raise ConfigError(f"{name} is {tensor.dtype}, which has no form to be sent in; give it the role 'skip'")
    if tensor.is_floating_point() == (role == "max"):
        kind = "floats" if tensor.is_floating_point() else "integers"
        raise ConfigError(f"{name} holds {kind} and cannot have role {role!r}; use 'skip' or drop the entry")
    if role == "compress" and not tensor.numel():
        raise ConfigError(f"{name} has no elements, and so no step size; use 'dense' or 'skip'")
    if role == "compress" and not isinstance(tensor, nn.Parameter):
        raise ConfigError(f"{name} is a buffer, only parameters can be compressed; use 'dense' or 'skip'")
