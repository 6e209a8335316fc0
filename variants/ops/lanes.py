"""Vectors of 16 numbers for compiled loops, and what attention to single tokens does with them.

numba leaves it to LLVM to find loops that fill the vector registers, and LLVM takes half of them, and sums up the lanes of each product by
itself. Here rows lie in registers by name: `products` makes sixteen sums at once out of sixteen registers of lanes.

A table is a matrix whose rows are `width` numbers wide, flat; width is a multiple of 2 LANES. Of four rows at a time (the query heads that
share a key) nothing has to be there but numbers: fill up with 0.
"""

from typing import Any, no_type_check

from llvmlite import ir
from numba import njit, types
from numba.core.datamodel import PrimitiveModel
from numba.extending import intrinsic, register_model

from variants.ops.loops import LOOPS

LANES, HEADS = 16, 4


class Lanes(types.Type):
    """LANES numbers in a register, or in several."""

    def __init__(self, dtype: Any):
        self.dtype = dtype
        super().__init__(name=f"Lanes({dtype})")


@register_model(Lanes)
class _LanesModel(PrimitiveModel):
    @no_type_check
    def __init__(self, manager, kind):
        super().__init__(manager, kind, _vector(kind.dtype))


@no_type_check
def _vector(dtype):
    return ir.VectorType(ir.FloatType() if dtype == types.float32 else ir.DoubleType(), LANES)


@no_type_check
def _place(context, builder, signature, arguments):
    """A pointer to the numbers of a flat array (argument 0) from an offset (argument 1) on."""
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(array.data, [arguments[1]])


@no_type_check
def _align(dtype):
    return 4 if dtype == types.float32 else 8


@intrinsic
@no_type_check
def load(typing, x, offset):
    """LANES numbers of a flat array."""

    def generate(context, builder, signature, arguments):
        at = builder.bitcast(_place(context, builder, signature, arguments), _vector(x.dtype).as_pointer())
        return builder.load(at, align=_align(x.dtype))

    return Lanes(x.dtype)(x, types.intp), generate


@intrinsic
@no_type_check
def store(typing, x, offset, lanes):
    """Write LANES numbers into a flat array."""

    def generate(context, builder, signature, arguments):
        at = builder.bitcast(_place(context, builder, signature, arguments), _vector(x.dtype).as_pointer())
        builder.store(arguments[2], at, align=_align(x.dtype))
        return context.get_dummy_value()

    return types.void(x, types.intp, lanes), generate


@intrinsic
@no_type_check
def spread(typing, x, offset):
    """One number of a flat array in all lanes."""

    def generate(context, builder, signature, arguments):
        number = builder.load(_place(context, builder, signature, arguments))
        kind = _vector(x.dtype)
        one = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
        mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), mask)

    return Lanes(x.dtype)(x, types.intp), generate


@intrinsic
@no_type_check
def zeros(typing, x):
    """0 in all lanes, in the dtype of a flat array."""

    def generate(context, builder, signature, arguments):
        return ir.Constant(_vector(x.dtype), [0.0] * LANES)

    return Lanes(x.dtype)(x), generate


@intrinsic
@no_type_check
def fma(typing, a, b, c):
    """a b + c."""

    def generate(context, builder, signature, arguments):
        first, second, third = arguments
        return builder.fadd(builder.fmul(first, second, flags=("contract",)), third, flags=("contract",))

    return a(a, b, c), generate


@intrinsic
@no_type_check
def fold(typing, a, b):
    """Sums of neighbouring lanes: those of a, then those of b. Four times, and sixteen vectors are the sums of each."""

    def generate(context, builder, signature, arguments):
        masks = (ir.Constant(ir.VectorType(ir.IntType(32), LANES), list(range(first, 2 * LANES, 2))) for first in (0, 1))
        return builder.fadd(*(builder.shuffle_vector(*arguments, mask) for mask in masks))

    return a(a, b), generate


@intrinsic
@no_type_check
def store_quarters(typing, x, offset, step, lanes):
    """Write lanes 0-3, 4-7, 8-11 and 12-15 into a flat array, `step` numbers apart."""

    def generate(context, builder, signature, arguments):
        at = _place(context, builder, signature, arguments)
        quarter = ir.VectorType(_vector(x.dtype).element, LANES // 4)
        for n in range(4):
            mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES // 4), list(range(4 * n, 4 * n + 4)))
            part = builder.shuffle_vector(arguments[3], arguments[3], mask)
            builder.store(part, builder.bitcast(at, quarter.as_pointer()), align=_align(x.dtype))
            at = builder.gep(at, [arguments[2]])
        return context.get_dummy_value()

    return types.void(x, types.intp, types.intp, lanes), generate


@intrinsic
@no_type_check
def larger(typing, a, b):
    """The larger of two numbers in each lane."""

    def generate(context, builder, signature, arguments):
        return builder.select(builder.fcmp_ordered(">", *arguments), *arguments)

    return a(a, b), generate


@njit(**LOOPS)
@no_type_check
def largest(x, start, count, spare):
    """The largest of count >= 1 numbers of a flat array; spare: room for LANES numbers. Of NaN, which LLVM compares one by one, any."""
    if count < LANES:
        top = x[start]
        for n in range(start, start + count):
            top = max(top, x[n])
        return top
    lanes = load(x, start + count - LANES)
    for n in range(start, start + count - LANES, LANES):
        lanes = larger(lanes, load(x, n))
    store(spare, 0, lanes)
    top = spare[0]
    for n in range(LANES):
        top = max(top, spare[n])
    return top


@njit(**LOOPS)
@no_type_check
def products(rows, table, base, width, places, count, out, step):
    """out[i step + n] = rows[i] . table[places[n]] for four rows; `places` and `out` have room for the next multiple of four."""
    for n in range(count, (count + 3) // 4 * 4):
        places[n] = places[count - 1]
    for n in range(0, count, 4):
        j0, j1 = base + places[n] * width, base + places[n + 1] * width
        j2, j3 = base + places[n + 2] * width, base + places[n + 3] * width
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = zeros(rows)
        c0 = c1 = c2 = c3 = d0 = d1 = d2 = d3 = zeros(rows)
        for c in range(0, width, LANES):
            k0, k1, k2, k3 = load(table, j0 + c), load(table, j1 + c), load(table, j2 + c), load(table, j3 + c)
            q = load(rows, c)
            a0, a1, a2, a3 = fma(q, k0, a0), fma(q, k1, a1), fma(q, k2, a2), fma(q, k3, a3)
            q = load(rows, width + c)
            b0, b1, b2, b3 = fma(q, k0, b0), fma(q, k1, b1), fma(q, k2, b2), fma(q, k3, b3)
            q = load(rows, 2 * width + c)
            c0, c1, c2, c3 = fma(q, k0, c0), fma(q, k1, c1), fma(q, k2, c2), fma(q, k3, c3)
            q = load(rows, 3 * width + c)
            d0, d1, d2, d3 = fma(q, k0, d0), fma(q, k1, d1), fma(q, k2, d2), fma(q, k3, d3)
        ab = fold(fold(fold(a0, a1), fold(a2, a3)), fold(fold(b0, b1), fold(b2, b3)))
        cd = fold(fold(fold(c0, c1), fold(c2, c3)), fold(fold(d0, d1), fold(d2, d3)))
        store_quarters(out, n, step, fold(ab, cd))


@njit(**LOOPS)
@no_type_check
def gather(weights, step, table, base, width, places, count, rows):
    """rows[i] += sum_n weights[i step + n] table[places[n]] for four rows."""
    for c in range(0, width, 2 * LANES):
        a0, a1 = load(rows, c), load(rows, c + LANES)
        b0, b1 = load(rows, width + c), load(rows, width + c + LANES)
        c0, c1 = load(rows, 2 * width + c), load(rows, 2 * width + c + LANES)
        d0, d1 = load(rows, 3 * width + c), load(rows, 3 * width + c + LANES)
        for n in range(count):
            j = base + places[n] * width + c
            k0, k1 = load(table, j), load(table, j + LANES)
            p = spread(weights, n)
            a0, a1 = fma(p, k0, a0), fma(p, k1, a1)
            p = spread(weights, step + n)
            b0, b1 = fma(p, k0, b0), fma(p, k1, b1)
            p = spread(weights, 2 * step + n)
            c0, c1 = fma(p, k0, c0), fma(p, k1, c1)
            p = spread(weights, 3 * step + n)
            d0, d1 = fma(p, k0, d0), fma(p, k1, d1)
        store(rows, c, a0), store(rows, c + LANES, a1)
        store(rows, width + c, b0), store(rows, width + c + LANES, b1)
        store(rows, 2 * width + c, c0), store(rows, 2 * width + c + LANES, c1)
        store(rows, 3 * width + c, d0), store(rows, 3 * width + c + LANES, d1)


@njit(**LOOPS)
@no_type_check
def scatter(weights, step, rows, table, base, width, places, count):
    """table[places[n]] += sum_i weights[i step + n] rows[i] for four rows; places are all different."""
    for c in range(0, width, 2 * LANES):
        a0, a1 = load(rows, c), load(rows, c + LANES)
        b0, b1 = load(rows, width + c), load(rows, width + c + LANES)
        c0, c1 = load(rows, 2 * width + c), load(rows, 2 * width + c + LANES)
        d0, d1 = load(rows, 3 * width + c), load(rows, 3 * width + c + LANES)
        for n in range(count):
            j = base + places[n] * width + c
            k0, k1 = load(table, j), load(table, j + LANES)
            p = spread(weights, n)
            k0, k1 = fma(p, a0, k0), fma(p, a1, k1)
            p = spread(weights, step + n)
            k0, k1 = fma(p, b0, k0), fma(p, b1, k1)
            p = spread(weights, 2 * step + n)
            k0, k1 = fma(p, c0, k0), fma(p, c1, k1)
            p = spread(weights, 3 * step + n)
            k0, k1 = fma(p, d0, k0), fma(p, d1, k1)
            store(table, j, k0), store(table, j + LANES, k1)
