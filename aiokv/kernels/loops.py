"""The source of the loops that `cpu` and `cuda` compile: one pass over memory for all functions of a plan.

`arithmetic` says what happens to one element; here stands how elements are read and written. Compilers put the
functions into the loop, so that a value stays in a register from the first function to the last.
"""

from __future__ import annotations

import hashlib
import inspect
import textwrap
from typing import TYPE_CHECKING

from aiokv.kernels import arithmetic
from aiokv.kernels.plan import Plan, parameters
from aiokv.kernels.reference import LANES

if TYPE_CHECKING:
    from collections.abc import Sequence

UPDATE = """\
def {name}({arguments}, numbers):
    {numbers}, = numbers
{loop}
        w = number(weight[i])
        g = number(total[i])
{body}
"""

NORMS = """\
def {name}({arguments}, numbers, lanes):
    {numbers}, = numbers
{loop}
            w = number(weight[i])
            g = number(total[i])
{body}
"""


def update_source(name: str, plan: Plan, loop: Sequence[str], *, in_place: bool, master: bool) -> str:
    """Return the source of an update's loop.

    Its arguments are weight, total, out unless it is `in_place`, the plan's state and inputs, and a tuple of numbers.

    Args:
        name: of the function.
        plan: what is computed.
        loop: lines that make `i` run over the elements.
        in_place: the new weight goes where the sum is. One array less lets the compiler see that none overlap.
        master: the weight is the copy in higher precision, and is updated as well.
    """
    out = "total" if in_place else "out"
    arrays = ["weight", "total"] if in_place else ["weight", "total", "out"]
    results = ["w", *plan.state]
    body = [*_reads(plan), f"{', '.join(results)}, = {_call(plan.function)}"]
    body += [f"{_kept(state)}[i] = {state}" for state in plan.state]
    body += ["weight[i] = w"] * master
    body += [f"{out}[i] = element(w, {out}[i])"]
    return _fill(UPDATE, name, plan, arrays, loop, body, 8)


def norms_source(name: str, plan: Plan, loop: Sequence[str], counted: int) -> str:
    """Return the source of the loop that adds squares to lanes.

    Its arguments are weight, total, the plan's state and inputs, a tuple of numbers, and a tuple of `counted` lanes.

    Args:
        name: of the function.
        plan: what is computed.
        loop: lines that make `j` run over the lanes, and `i` over the elements so that each lane is added in order.
        counted: how many results the plan's function has.
    """
    results = [f"result_{n}" for n in range(counted)]
    body = [*_reads(plan), f"{', '.join(results)}, = {_call(plan.function)}"]
    body += [f"lanes[{n}][j] = add_square(lanes[{n}][j], wide({result}))" for n, result in enumerate(results)]
    return _fill(NORMS, name, plan, ["weight", "total"], loop, body, 12)


def digest(*sources: str) -> str:
    """Return a name for the sources and the arithmetic: what was compiled from other ones has another name."""
    text = "\0".join((inspect.getsource(arithmetic), str(LANES), *sources))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _reads(plan: Plan) -> list[str]:
    lines = [f"{state} = {_kept(state)}[i]" for state in plan.state]
    lines += [f"{name} = number({_kept(name)}[i])" for name in plan.inputs]
    return lines + [f"g = {_call(function)}" for function in plan.prepare]


def _call(function: str) -> str:
    return f"{function}({', '.join(parameters(function))})"


def _kept(name: str) -> str:
    return f"array_{name}"


def _fill(
    template: str, name: str, plan: Plan, arrays: list[str], loop: Sequence[str], body: list[str], indent: int
) -> str:
    return template.format(
        name=name,
        arguments=", ".join([*arrays, *map(_kept, plan.state + plan.inputs)]),
        numbers=", ".join(plan.numbers),
        loop=textwrap.indent("\n".join(loop), " " * 4),
        body=textwrap.indent("\n".join(body), " " * indent),
    )
