//! Sums, scalings and reductions of rows that two or more mechanisms use.

use super::product::by_whole_registers;
use super::rows::{Rows, load_part};
use super::{Real, Vector, dispatch, operation};

/// Numbers of the widest register.
pub const WIDEST: usize = 16;

/// `to[at] = number` at every place of a slice, in whole registers `register`, both of what stands there in other slices or in this one,
/// which must be as long. As unsafe as registers are.
#[macro_export]
macro_rules! elementwise {
    ($to:ident, [$($from:ident),+], $register:expr, $number:expr) => {{
        $(assert!($from.len() >= $to.len());)+
        let whole = $to.len() / V::LANES * V::LANES;
        for at in (0..whole).step_by(V::LANES) {
            let register = {
                $(let $from = V::load($from.as_ptr().add(at));)+
                $register
            };
            register.store($to.as_mut_ptr().add(at));
        }
        for at in whole..$to.len() {
            let number = {
                $(let $from = $from[at];)+
                $number
            };
            $to[at] = number;
        }
    }};
}

pub use crate::elementwise;

operation!(StoreScaled, |from: &'a [T], factor: T, to: &'a mut [T]| {
    // SAFETY: forwarded to the caller.
    unsafe { elementwise!(to, [from], from.mul(V::splat(factor)), from * factor) };
});

/// `to[i] = from[i] · factor`.
pub fn store<T: Real>(from: &[T], factor: T, to: &mut [T]) {
    dispatch(StoreScaled { from, factor, to })
}

// Writes the transpose of a block of `rows × columns`; both are rounded up to whole registers, so `to` must have that
// many rows and `from`'s rows beyond `rows` are read too.
operation!(Transpose, |from: &'a [T], from_row: usize, rows: usize, columns: usize, to: &'a mut [T], to_row: usize| {
    let (rows, columns) = (rows.next_multiple_of(V::LANES), columns.next_multiple_of(V::LANES));
    if rows == 0 || columns == 0 {
        return;
    }
    assert!((rows - 1) * from_row + columns <= from.len());
    assert!((columns - 1) * to_row + rows <= to.len());
    for row in (0..rows).step_by(V::LANES) {
        for column in (0..columns).step_by(V::LANES) {
            // SAFETY: the tile lies in both slices by the assertions above.
            unsafe {
                let from = from.as_ptr().add(row * from_row + column);
                V::transpose(from, from_row, to.as_mut_ptr().add(column * to_row + row), to_row);
            }
        }
    }
});

/// Writes the transpose of a block of `rows × columns`, as [`Transpose`]; of both blocks the numbers and the distance from
/// one row to the next.
pub fn transpose<T: Real>(
    (from, from_row): (&[T], usize),
    (rows, columns): (usize, usize),
    (to, to_row): (&mut [T], usize),
) {
    dispatch(Transpose { from, from_row, rows, columns, to, to_row })
}

operation!(AddColumnSums, |block: &'a [T], row_length: usize, rows: usize, to: &'a mut [T]| {
    if rows == 0 {
        return;
    }
    assert!((rows - 1) * row_length + to.len() <= block.len() && to.len().is_multiple_of(V::LANES));
    // SAFETY: every row has its registers by the assertion above.
    unsafe { by_whole_registers!(0, to.len(), 4, add_register_sums(block, row_length, rows, to)) };
});

/// `to += Σ_rows block[row]`.
pub fn add_column_sums<T: Real>(block: &[T], row_length: usize, rows: usize, to: &mut [T]) {
    dispatch(AddColumnSums { block, row_length, rows, to })
}

#[inline(always)]
unsafe fn add_register_sums<V: Vector, const N: usize>(
    block: &[V::Element],
    row_length: usize,
    rows: usize,
    to: &mut [V::Element],
    column: usize,
) {
    // SAFETY: the caller has `N` registers from `column` in every row and in `to`.
    unsafe {
        let from = |row: usize| block.as_ptr().add(row * row_length + column);
        let zero = [V::splat(V::Element::ZERO); N];
        let (mut even, mut odd) = (zero, zero);
        for row in (1..rows).step_by(2) {
            for n in 0..N {
                even[n] = even[n].add(V::load(from(row - 1).add(n * V::LANES)));
                odd[n] = odd[n].add(V::load(from(row).add(n * V::LANES)));
            }
        }
        for n in 0..N {
            if !rows.is_multiple_of(2) {
                even[n] = even[n].add(V::load(from(rows - 1).add(n * V::LANES)));
            }
            even[n] = even[n].add(odd[n]);
        }
        add_registers(even, to, column);
    }
}

operation!(Dot, |x: &'a [T], y: &'a [T]| -> T {
    let whole = x.len() / V::LANES * V::LANES;
    assert!(x.len() <= y.len());
    // SAFETY: `whole` numbers lie in both slices.
    let mut sum = unsafe {
        let mut sums = V::splat(V::Element::ZERO);
        for column in (0..whole).step_by(V::LANES) {
            sums = V::load(x.as_ptr().add(column)).mul_add(V::load(y.as_ptr().add(column)), sums);
        }
        sums.sum()
    };
    for column in whole..x.len() {
        sum += x[column] * y[column];
    }
    sum
});

/// `Σ x·y`.
pub fn dot<T: Real>(x: &[T], y: &[T]) -> T {
    dispatch(Dot { x, y })
}

operation!(Largest, |x: &'a [T]| -> T {
    let whole = x.len() / V::LANES * V::LANES;
    let mut lanes = [V::Element::NEG_INFINITY; 16];
    // SAFETY: `whole` numbers lie in the slice, a register in `lanes`.
    unsafe {
        let mut top = V::load(lanes.as_ptr());
        for column in (0..whole).step_by(V::LANES) {
            // The second operand stays where the first is NaN.
            top = V::load(x.as_ptr().add(column)).max(top);
        }
        top.store(lanes.as_mut_ptr());
    }
    lanes[..V::LANES].iter().chain(&x[whole..]).copied().fold(V::Element::NEG_INFINITY, V::Element::max)
});

/// The largest number that is not NaN; −∞ for none.
pub fn largest<T: Real>(x: &[T]) -> T {
    dispatch(Largest { x })
}

// The largest number of each row, as [`largest`].
operation!(LargestOfRows, |rows: Rows<'a, T>, width: usize, to: &'a mut [T]| {
    for (row, to) in to.iter_mut().enumerate() {
        // SAFETY: forwarded to the caller.
        *to = unsafe { Largest { x: rows.row(row, width) }.run::<V>() };
    }
});

/// Writes the largest number of each row of `width`.
pub fn largest_of_rows<T: Real>(rows: Rows<'_, T>, width: usize, to: &mut [T]) {
    dispatch(LargestOfRows { rows, width, to })
}

operation!(AddRowDots, |block: &'a [T], row_length: usize, vector: &'a [T], to: &'a mut [T]| {
    for (row, to) in to.iter_mut().enumerate() {
        // SAFETY: forwarded to the caller.
        *to += unsafe { Dot { x: &block[row * row_length..][..vector.len()], y: vector }.run::<V>() };
    }
});

/// `to[i] += block[i]·vector` for each row.
pub fn add_row_dots<T: Real>(block: &[T], row_length: usize, vector: &[T], to: &mut [T]) {
    dispatch(AddRowDots { block, row_length, vector, to })
}

operation!(AddScaled, |to: &'a mut [T], a: T, x: &'a [T]| {
    // SAFETY: forwarded to the caller.
    unsafe { elementwise!(to, [to, x], V::splat(a).mul_add(x, to), to + a * x) };
});

/// `to += a·x`.
pub fn add_scaled<T: Real>(to: &mut [T], a: T, x: &[T]) {
    dispatch(AddScaled { to, a, x })
}

operation!(Multiply, |to: &'a mut [T], x: &'a [T]| {
    // SAFETY: forwarded to the caller.
    unsafe { elementwise!(to, [to, x], to.mul(x), to * x) };
});

/// `to ← to · x`, elementwise.
pub fn multiply<T: Real>(to: &mut [T], x: &[T]) {
    dispatch(Multiply { to, x })
}

// `to = e^to` for numbers that are at most 0; whole registers.
operation!(Exp, |to: &'a mut [T]| {
    assert!(to.len().is_multiple_of(V::LANES));
    // SAFETY: whole registers by the assertion.
    unsafe {
        for at in (0..to.len()).step_by(V::LANES) {
            let place = to.as_mut_ptr().add(at);
            V::load(place).exp_nonpositive().store(place);
        }
    }
});

// `to ← x ⊙ y`, or `to += x ⊙ y`.
operation!(Products, |x: &'a [T], y: &'a [T], add: bool, to: &'a mut [T]| {
    // SAFETY: forwarded to the caller.
    unsafe {
        if add {
            elementwise!(to, [to, x, y], x.mul_add(y, to), to + x * y);
        } else {
            elementwise!(to, [x, y], x.mul_add(y, V::splat(T::ZERO)), T::ZERO + x * y);
        }
    }
});

/// `to ← x ⊙ y`.
pub fn set_products<T: Real>(x: &[T], y: &[T], to: &mut [T]) {
    dispatch(Products { x, y, add: false, to });
}

/// `to += x ⊙ y`.
pub fn add_products<T: Real>(x: &[T], y: &[T], to: &mut [T]) {
    dispatch(Products { x, y, add: true, to });
}

operation!(Scale, |to: &'a mut [T], a: T| {
    // SAFETY: forwarded to the caller.
    unsafe { elementwise!(to, [to], to.mul(V::splat(a)), to * a) };
});

/// `to ← a · to`.
pub fn scale_by<T: Real>(to: &mut [T], a: T) {
    dispatch(Scale { to, a })
}

// `row ← factors[n] · row` for the first `width` numbers of each row.
operation!(ScaleRows, |block: &'a mut [T], row_length: usize, width: usize, factors: &'a [T]| {
    for (row, &a) in block.chunks_mut(row_length.max(1)).zip(factors) {
        // SAFETY: forwarded to the caller.
        unsafe { Scale { to: &mut row[..width], a }.run::<V>() };
    }
});

/// `row ← factors[n] · row` for each of as many rows as there are factors.
pub fn scale_rows<T: Real>((block, row_length): (&mut [T], usize), width: usize, factors: &[T]) {
    dispatch(ScaleRows { block, row_length, width, factors })
}

operation!(Decay, |to: &'a mut [T], a: T| {
    let decayed = |x: T| if x.vanishes() { T::ZERO } else { x };
    // SAFETY: forwarded to the caller.
    unsafe { elementwise!(to, [to], to.mul(V::splat(a)).normal_or_zero(), decayed(to * a)) };
});

/// `to ← a · to`, where sums that fall again and again end at 0.
pub fn decay_by<T: Real>(to: &mut [T], a: T) {
    dispatch(Decay { to, a })
}

/// Adds registers to the numbers from `column` on.
#[inline(always)]
pub unsafe fn add_registers<V: Vector, const N: usize>(total: [V; N], to: &mut [V::Element], column: usize) {
    for (n, total) in total.into_iter().enumerate() {
        // SAFETY: the caller has `N` registers there.
        unsafe {
            let at = to.as_mut_ptr().add(column + n * V::LANES);
            V::load(at).add(total).store(at);
        }
    }
}

operation!(AllFinite, |from: Rows<'a, T>, count: usize, width: usize| -> bool {
    // Rows without a gap are one long row.
    let (count, width) = if from.stride == width { (count.min(1), count * width) } else { (count, width) };
    // SAFETY: no register reaches beyond its row.
    unsafe {
        // x·0 is 0 for finite x and NaN else; NaN survives the sums, of which several wait for each other less.
        let zero = V::splat(V::Element::ZERO);
        let mut sums = [zero; 4];
        for row in 0..count {
            let (whole, rest) = from.row(row, width).split_at(width / (4 * V::LANES) * (4 * V::LANES));
            for four in whole.chunks_exact(4 * V::LANES) {
                for (n, sum) in sums.iter_mut().enumerate() {
                    *sum = V::load(four.as_ptr().add(n * V::LANES)).mul_add(zero, *sum);
                }
            }
            for (sum, column) in sums.iter_mut().zip((0..rest.len()).step_by(V::LANES)) {
                *sum = load_part::<V>(rest, column).mul_add(zero, *sum);
            }
        }
        let [a, b, c, d] = sums;
        a.add(b).add(c.add(d)).sum() == V::Element::ZERO
    }
});

/// Whether all of a caller's numbers are finite.
pub fn all_finite<T: Real>(from: Rows<'_, T>, count: usize, width: usize) -> bool {
    dispatch(AllFinite { from, count, width })
}

/// The exponent of the unit: finite, so that differences with −∞ have a meaning, and below all that keys can be.
pub fn floor<T: Real>() -> T {
    -(T::ONE / T::MIN_POSITIVE)
}

operation!(Exponentials, |block: &'a mut [T], row_length: usize, columns: usize, row_max: &'a mut [T]| -> T {
    let whole = columns.next_multiple_of(V::LANES);
    assert!(columns > 0 && whole <= row_length && block.len() >= row_max.len() * row_length);
    let mut widest = V::Element::ZERO;
    for (row, top) in row_max.iter_mut().enumerate() {
        let row = &mut block[row * row_length..][..whole];
        let first = row[0];
        row[columns..].fill(first);
        // SAFETY: the row is a whole number of registers.
        unsafe {
            // Not below the floor: −∞ − −∞ is no number.
            let (mut most, mut least) = (V::splat(top.max(floor())), V::load(row.as_ptr()));
            for column in (0..whole).step_by(V::LANES) {
                let w = V::load(row.as_ptr().add(column));
                (most, least) = (w.max(most), w.min(least));
            }
            *top = most.largest();
            let bottom = -V::splat(V::Element::ZERO).sub(least).largest();
            widest = widest.max(*top - bottom);
            let top = V::splat(*top);
            for column in (0..whole).step_by(V::LANES) {
                let at = row.as_mut_ptr().add(column);
                V::load(at).sub(top).exp_nonpositive().store(at);
            }
        }
    }
    widest
});

/// Replaces every row `w` of a block by `e^{w − m}`, `m` the largest of it and of what stands in `row_max`, and puts `m` there. Returns
/// how far any number is below its `m`.
pub fn exponentials<T: Real>(block: &mut [T], row_length: usize, columns: usize, row_max: &mut [T]) -> T {
    dispatch(Exponentials { block, row_length, columns, row_max })
}
