"""Triton's interpreter without its repeated work, which takes half of the time of kernels of many small functions.

Before every call of a @triton.jit function, also from within another, the interpreter looks through all members of
triton.language for those it must replace. Here it does so once for each module of the language, and what it replaced
stays replaced: a process whose kernels are interpreted compiles none.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_patch_by_looking = interpreter._patch_lang
_numpy_dtype = interpreter._get_np_dtype
_type_of_values = tl.core._type_for_tuple_values


class _KeptPatch:
    def restore(self) -> None: ...


@cache
def _patch_once(lang: ModuleType) -> None:
    _patch_by_looking(SimpleNamespace(__globals__={"lang": lang}))


def _patch(function: FunctionType) -> _KeptPatch:
    names = function.__globals__
    for lang in (tl, tl.core):
        if any(value is lang for value in names.values()):
            _patch_once(lang)
    return _KeptPatch()


@cache
def _type_of_shape(shape: tuple[int, ...]) -> Any:
    return _type_of_values(shape)


def _type_of(values: list[Any], fields: Any = None) -> Any:
    """Shapes are tuples of the language, whose type is spelled out anew for each of them."""
    sizes = tuple(value.value if type(value) is tl.constexpr else value for value in values)
    if fields is None and all(type(size) is int for size in sizes):
        return _type_of_shape(sizes)
    return _type_of_values(values, fields)


@cache
def _dtype_of_scalar(dtype: tl.dtype) -> Any:
    return _numpy_dtype(dtype)


def _dtype_of(dtype: tl.dtype) -> Any:
    scalar = dtype.scalar
    return _numpy_dtype(scalar) if scalar.is_ptr() else _dtype_of_scalar(scalar)


def look_once() -> None:
    interpreter._patch_lang = _patch
    interpreter._get_np_dtype = _dtype_of
    tl.core._type_for_tuple_values = _type_of
