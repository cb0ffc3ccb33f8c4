//! Maps of single numbers, applied while rows are read, and their derivatives.

use super::FeatureMap;
use crate::simd::block::{Largest, WIDEST};
use crate::simd::rows::{Rows, load_part};
use crate::simd::{Operation, Real, Vector, dispatch, ln_1p_unit, operation, sigmoid};

/// One loop for each elementwise map, in which it is a constant: a choice inside the loop would be made for every register. Maps of
/// whole rows are not made here and count as the identity.
macro_rules! for_each_map {
    ($map:expr, $constant:ident => $loop:expr) => {
        $crate::feature_map::elementwise::for_each_map!(
            $map, $constant => $loop, EluPlusOne Relu Softplus Exp; Identity
        )
    };
    ($map:expr, $constant:ident => $loop:expr, $($name:ident)*; $other:ident) => {
        match $map {
            $(FeatureMap::$name => {
                const $constant: FeatureMap = FeatureMap::$name;
                $loop
            })*
            _ => {
                const $constant: FeatureMap = FeatureMap::$other;
                $loop
            }
        }
    };
}
pub(crate) use for_each_map;

/// `φ(x − shift)` of a register.
#[inline(always)]
pub(crate) unsafe fn feature<V: Vector>(map: FeatureMap, x: V, shift: V) -> V {
    // SAFETY: forwarded to the caller.
    unsafe {
        let zero = V::splat(V::Element::ZERO);
        match map {
            FeatureMap::EluPlusOne => {
                // Not used where x is positive.
                let exp = x.exp_nonpositive();
                x.if_positive(x.add(V::splat(V::Element::ONE)), exp)
            }
            FeatureMap::Relu => zero.max(x),
            FeatureMap::Softplus => zero.max(x).add(ln_1p_unit(zero.sub(x.abs()).exp_nonpositive())),
            FeatureMap::Exp => x.sub(shift).exp_nonpositive(),
            // Maps of whole rows are not made here.
            _ => x,
        }
    }
}

/// The features that positions turn: formed already, or mapped on the way.
pub(crate) enum Features<'a, T> {
    Formed(&'a [T]),
    /// What an elementwise map makes of raw rows; see [`LoadFeatures`]. They stand in `to` afterwards if they are to be kept.
    Mapped {
        map: FeatureMap,
        shift: T,
        from: Rows<'a, T>,
        ignored: Option<&'a [bool]>,
        to: &'a mut [T],
        keep: bool,
    },
}

/// What is subtracted from the exponents of each row of an exponential map; other maps do not look at it.
pub(crate) enum Shift<'s, T> {
    /// The same number from all.
    One(T),
    /// A number from each.
    Each(&'s [T]),
    /// Each row's own largest exponent, which is written here; 0 where none is finite.
    Own(&'s mut [T]),
}

// Reads `count` rows of `width` numbers from a caller's tensor into a block, through `φ(x − shift)`; rows whose entry
// in `ignored` is true become 0 whatever stands in them.
operation!(LoadFeatures, |map: FeatureMap,
                          shift: Shift<'a, T>,
                          from: Rows<'a, T>,
                          count: usize,
                          width: usize,
                          ignored: Option<&'a [bool]>,
                          to: &'a mut [T],
                          to_row: usize| {
    assert!(count == 0 || (width <= to_row && to_row.is_multiple_of(V::LANES)));
    // SAFETY: forwarded to the caller.
    for_each_map!(map, MAP => unsafe {
        load_through::<V>(MAP, shift, from, count, width, ignored, to, to_row);
    });
});

/// Reads `count` rows of `width` numbers through `φ(x − shift)` with one shift for all, as [`LoadFeatures`].
#[inline]
pub(crate) fn load_features<T: Real>(
    (map, shift): (FeatureMap, T),
    from: Rows<'_, T>,
    (count, width): (usize, usize),
    ignored: Option<&[bool]>,
    (to, to_row): (&mut [T], usize),
) {
    dispatch(LoadFeatures { map, shift: Shift::One(shift), from, count, width, ignored, to, to_row });
}

/// Reads `count` rows of `width` numbers from a caller's tensor into a block of rows `to_row` apart, which are filled up
/// with 0; ignored rows become 0.
#[inline]
pub(crate) fn copy_rows<T: Real>(
    from: Rows<'_, T>,
    (count, width): (usize, usize),
    ignored: Option<&[bool]>,
    (to, to_row): (&mut [T], usize),
) {
    load_features((FeatureMap::Identity, T::ZERO), from, (count, width), ignored, (to, to_row));
}

/// Writes `e^{x − shift}` for numbers that are at most `shift`, and 0 to what is left of `to`, which is whole registers.
#[inline]
pub(crate) fn load_exponentials<T: Real>(x: &[T], shift: T, to: &mut [T]) {
    let (from, to_row) = (Rows { data: x, stride: x.len() }, to.len());
    load_features((FeatureMap::Exp, shift), from, (1, x.len()), None, (to, to_row));
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn load_through<V: Vector>(
    map: FeatureMap,
    mut shift: Shift<'_, V::Element>,
    from: Rows<'_, V::Element>,
    count: usize,
    width: usize,
    ignored: Option<&[bool]>,
    to: &mut [V::Element],
    to_row: usize,
) {
    let whole = width / V::LANES * V::LANES;
    for row in 0..count {
        let to = &mut to[row * to_row..][..to_row];
        let from = from.row(row, width);
        let shift = match &mut shift {
            Shift::One(shift) => *shift,
            Shift::Each(shifts) => shifts[row],
            Shift::Own(row_max) => {
                // SAFETY: forwarded to the caller.
                let top = unsafe { Largest { x: from }.run::<V>() };
                row_max[row] = if top.is_finite() { top } else { V::Element::ZERO };
                row_max[row]
            }
        };
        if ignored.is_some_and(|ignored| ignored[row]) {
            to.fill(V::Element::ZERO);
            continue;
        }
        // SAFETY: `from` has `width` numbers, `to` a whole number of registers of at least that.
        unsafe {
            let shift = V::splat(shift);
            let mut column = 0;
            while column < whole {
                feature(map, V::load(from.as_ptr().add(column)), shift).store(to.as_mut_ptr().add(column));
                column += V::LANES;
            }
            if whole < width {
                V::splat(V::Element::ZERO).store(to.as_mut_ptr().add(whole));
                let x = V::load_first(from.as_ptr().add(whole), width - whole);
                feature(map, x, shift).store_first(to.as_mut_ptr().add(whole), width - whole);
                column += V::LANES;
            }
            while column < to_row {
                V::splat(V::Element::ZERO).store(to.as_mut_ptr().add(column));
                column += V::LANES;
            }
        }
    }
}

// `d ← d · φ′(x)` for rows of raw inputs `x` and their features `phi`.
operation!(PullBackFeatures, |map: FeatureMap,
                              x: Rows<'a, T>,
                              phi: &'a [T],
                              d: &'a mut [T],
                              count: usize,
                              width: usize,
                              row_length: usize| {
    if map == FeatureMap::Identity || !map.is_elementwise() {
        return;
    }
    assert!(count == 0 || width.next_multiple_of(V::LANES) <= row_length);
    for row in 0..count {
        let x = x.row(row, width);
        let phi = &phi[row * row_length..][..row_length];
        let d = &mut d[row * row_length..][..row_length];
        for column in (0..width).step_by(V::LANES) {
            // SAFETY: `phi` and `d` have a whole number of registers a row.
            unsafe {
                let (zero, one) = (V::splat(V::Element::ZERO), V::splat(V::Element::ONE));
                let phi = V::load(phi.as_ptr().add(column));
                let slope = match map {
                    // eˣ below 0, where φ = eˣ ≤ 1, and 1 above, where φ > 1.
                    FeatureMap::EluPlusOne => one.min(phi),
                    FeatureMap::Relu => phi.if_positive(one, zero),
                    FeatureMap::Softplus => sigmoid(load_part::<V>(x, column)),
                    _ => phi,
                };
                let at = d.as_mut_ptr().add(column);
                V::load(at).mul(slope).store(at);
            }
        }
    }
});

/// Rows whose scores are formed side by side: their feature maps and sums hide each other's latency.
const ROWS: usize = 4;

// `to[r] = φ(rows[r] − shift)·q` for rows of `width` numbers, one after the other.
operation!(FeatureDots, |map: FeatureMap, shift: T, rows: &'a [T], width: usize, q: &'a [T], to: &'a mut [T]| {
    // Features of whole rows stand in the state as they are.
    // SAFETY: forwarded to the caller.
    for_each_map!(map, MAP => unsafe { dots_of::<V>(MAP, shift, rows, width, q, to) });
});

#[inline(always)]
unsafe fn dots_of<V: Vector>(
    map: FeatureMap,
    shift: V::Element,
    rows: &[V::Element],
    width: usize,
    q: &[V::Element],
    to: &mut [V::Element],
) {
    assert!(rows.len() >= to.len() * width && q.len() >= width);
    let mut groups = to.chunks_exact_mut(ROWS);
    let mut row = 0;
    // SAFETY: as many rows of `width` numbers as `to` has lie in `rows`, and `width` numbers in `q`.
    unsafe {
        for to in &mut groups {
            let sums = some_dots::<V, ROWS>(map, shift, &rows[row * width..], width, q, to);
            to.iter_mut().zip(V::sums(sums)).for_each(|(to, sum)| *to += sum);
            row += ROWS;
        }
        for to in groups.into_remainder().chunks_exact_mut(1) {
            let [sum] = some_dots::<V, 1>(map, shift, &rows[row * width..], width, q, to);
            to[0] += sum.sum();
            row += 1;
        }
    }
}

/// The products of `N` rows, lane by lane; what does not fill a register stands summed in `rest`.
///
/// # Safety
/// As for [`Vector`]; `N` rows of `width` numbers must lie in `rows`, and `width` numbers in `q`.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn some_dots<V: Vector, const N: usize>(
    map: FeatureMap,
    shift: V::Element,
    rows: &[V::Element],
    width: usize,
    q: &[V::Element],
    rest: &mut [V::Element],
) -> [V; N] {
    let whole = width / V::LANES * V::LANES;
    rest.fill(V::Element::ZERO);
    // SAFETY: the caller's rows and `q` reach as far as is read; the tail holds a register.
    unsafe {
        let shift = V::splat(shift);
        let mut sums = [V::splat(V::Element::ZERO); N];
        let mut column = 0;
        while column < whole {
            let q = V::load(q.as_ptr().add(column));
            for r in 0..N {
                let x = V::load(rows.as_ptr().add(r * width + column));
                sums[r] = feature(map, x, shift).mul_add(q, sums[r]);
            }
            column += V::LANES;
        }
        if whole < width {
            for r in 0..N {
                let mut tail = [V::Element::ZERO; WIDEST];
                let x = V::load_first(rows.as_ptr().add(r * width + whole), width - whole);
                feature(map, x, shift).store(tail.as_mut_ptr());
                rest[r] = tail.iter().zip(&q[whole..width]).fold(V::Element::ZERO, |sum, (&x, &q)| sum + x * q);
            }
        }
        sums
    }
}
