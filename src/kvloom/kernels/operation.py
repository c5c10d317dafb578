"""Operations of compiled code that numba has none for, each of a few instructions of LLVM's.

numba's cache looks only at a kernel's own file: after a change to what it calls, remove `__pycache__/*.nb?`.
"""

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def operation(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of a function from an IR builder and IR values to an IR value."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            value = emit(builder, *values)
            return context.get_dummy_value() if result is types.void else value

        def typing(context: Any, *values: Any) -> Any:
            return result(*arguments), generate

        # numba counts the parameters of this function
        names = ["context", *(f"a{i}" for i in range(len(arguments)))]
        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        vars(typing)["__signature__"] = Signature(parameters)
        return intrinsic(typing)

    return decorate


def call(builder: Any, name: str, result: Any, *values: Any) -> Any:
    function = builder.module.declare_intrinsic(name, fnty=ir.FunctionType(result, [v.type for v in values]))
    return builder.call(function, values)


def pointer(builder: Any, address: Any, to: Any) -> Any:
    return builder.inttoptr(address, to.as_pointer())
