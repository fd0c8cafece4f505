"""Vectors of 16 float32 numbers in functions that numba compiles; LLVM maps them to the registers of the CPU.

A tile is a tuple of vectors. Arrays are flat; offsets into them count numbers, and nothing checks them. Loops over
numbers would be shorter, but LLVM makes code of them that is ten times slower.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, overload, register_model
from numba.np.arrayobj import make_array

from rllm_local.fast import LANES

_FLOAT, _INDEX = ir.FloatType(), ir.IntType(32)
_FLOATS, _INTEGERS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INDEX, LANES)
# Coefficients of Cephes for exp(x) at |x| < log(2) / 2; the relative error is about 1e-7.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0)


class _Vector(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Vector16")


VECTOR = _Vector()


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)


def _returns(returned: Any) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function of compiled code of one that gets LLVM's builder, and values, or addresses of arrays.

    Args:
        returned: Type of the result; or a function of the types of the arguments that returns it.
    """

    def wrap(build: Callable[..., Any]) -> Any:
        def typed(context: Any, *kinds: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                given = [
                    make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
                    for kind, value in zip(signature.args, values, strict=True)
                ]
                result = build(builder, *given)
                return context.get_dummy_value() if result is None else result

            result = returned(*kinds) if inspect.isfunction(returned) else returned
            return result(*kinds), generate

        typed.__signature__ = inspect.signature(build)  # type: ignore[attr-defined]
        return intrinsic(typed)

    return wrap


def _constant(number: float, kind: Any = _FLOATS) -> Any:
    return ir.Constant(kind, [number] * LANES)


def _call(builder: Any, name: str, *values: Any, returned: Any = _FLOATS, flag: str = "nsz") -> Any:
    kind = ir.FunctionType(returned, [value.type for value in values])
    function = builder.module.declare_intrinsic(f"llvm.{name}.v16f32", (), kind)
    return builder.call(function, values, fastmath=(flag,))


def _vector_at(builder: Any, array: Any, at: Any) -> Any:
    return builder.bitcast(builder.gep(array, [at]), _FLOATS.as_pointer())


def _spread(builder: Any, number: Any) -> Any:
    empty = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    first = builder.insert_element(empty, number, _INDEX(0))
    return builder.shuffle_vector(first, empty, _constant(0, _INTEGERS))


@_returns(VECTOR)
def spread(builder: Any, number: Any) -> Any:
    """Returns a vector of one float32 number."""
    return _spread(builder, number)


@_returns(VECTOR)
def load(builder: Any, array: Any, at: Any) -> Any:
    """Returns the vector at an offset."""
    return builder.load(_vector_at(builder, array, at), align=4)


@_returns(types.void)
def store(builder: Any, array: Any, at: Any, value: Any) -> None:
    """Writes a vector to an offset."""
    builder.store(value, _vector_at(builder, array, at), align=4)


@_returns(VECTOR)
def largest(builder: Any, left: Any, right: Any) -> Any:
    """Returns the larger number of each lane."""
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


@_returns(types.float32)
def sum_of(builder: Any, value: Any) -> Any:
    """Returns the sum of the lanes."""
    return _call(builder, "vector.reduce.fadd", _FLOAT(0.0), value, returned=_FLOAT, flag="reassoc")


@_returns(types.float32)
def top_of(builder: Any, value: Any) -> Any:
    """Returns the largest lane."""
    return _call(builder, "vector.reduce.fmax", value, returned=_FLOAT, flag="nnan")


@_returns(VECTOR)
def within(builder: Any, value: Any, start: Any, end: Any, other: Any) -> Any:
    """Returns the lanes from ``start`` up to ``end``, and the number ``other`` in the rest."""
    lanes = ir.Constant(ir.VectorType(start.type, LANES), list(range(LANES)))
    for sign, bound in ((">=", start), ("<", end)):
        value = builder.select(
            builder.icmp_signed(sign, lanes, _spread(builder, bound)), value, _spread(builder, other)
        )
    return value


@_returns(VECTOR)
def exp(builder: Any, value: Any) -> Any:
    """Returns the exponential of numbers up to 88; what is below -87 counts as -87."""
    value = builder.select(builder.fcmp_ordered(">", value, _constant(-87.0)), value, _constant(-87.0))
    power = _call(builder, "rint", builder.fmul(value, _constant(1.44269504088896341)))
    for part in (-0.693359375, 2.12194440e-4):  # of log(2)
        value = _call(builder, "fma", power, _constant(part), value)
    result = _constant(_EXP[0])
    for coefficient in _EXP[1:]:
        result = _call(builder, "fma", result, value, _constant(coefficient))
    shift = builder.shl(builder.fptosi(power, _INTEGERS), _constant(23, _INTEGERS))
    return builder.bitcast(builder.add(builder.bitcast(result, _INTEGERS), shift), _FLOATS)


@_returns(types.UniTuple(VECTOR, 2))
def two_zeros(builder: Any) -> Any:
    """Returns a tile of two vectors of zeros."""
    return ir.Constant(ir.ArrayType(_FLOATS, 2), None)


@_returns(lambda tile, *_: tile)
def fma_tile(builder: Any, tile: Any, value: Any, array: Any, at: Any, stride: Any) -> Any:
    """Adds ``value * array[at + n * stride]`` to each vector n of a tile."""
    for index in range(tile.type.count):
        factor = _spread(builder, builder.load(builder.gep(array, [at])))
        added = _call(builder, "fma", value, factor, builder.extract_value(tile, index))
        tile, at = builder.insert_value(tile, added, index), builder.add(at, stride)
    return tile


def _overload(symbol: Any, method: str) -> None:
    apply = _returns(VECTOR)(lambda builder, left, right: getattr(builder, method)(left, right))

    @overload(symbol)
    def chosen(left, right):  # type: ignore[no-untyped-def]  # numba compares the signatures
        return (lambda left, right: apply(left, right)) if left is VECTOR and right is VECTOR else None


for _symbol, _method in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _overload(_symbol, _method)
