//! What one token of a decoder asks of long lists of rows: all their scores at once, and their weighted sum.
//!
//! Rows stand as the caller has them, without gaps, so here a row's end may lie inside a register.

use super::block::feature;
use super::vector::{Constants, Vector};
use crate::feature_map::FeatureMap;
use crate::real::Real;

/// Rows whose scores are formed side by side: their feature maps and sums hide each other's latency.
const ROWS: usize = 4;

/// Numbers of the widest register.
const WIDEST: usize = 16;

/// `to[r] = φ(rows[r] − shift)·q` for rows of `width` numbers, one after the other.
#[inline(always)]
pub(crate) unsafe fn feature_dots<V: Vector>(
    map: FeatureMap,
    shift: V::Element,
    rows: &[V::Element],
    width: usize,
    q: &[V::Element],
    to: &mut [V::Element],
) where
    V::Element: Constants,
{
    // One loop for each map: a choice inside it would be made for every register.
    macro_rules! each {
        ($($map:ident),*) => {
            match map {
                // SAFETY: forwarded to the caller.
                $(FeatureMap::$map => unsafe { dots_of::<V>(FeatureMap::$map, shift, rows, width, q, to) },)*
                // Maps of whole rows are not made here.
                _ => {}
            }
        };
    }
    each!(EluPlusOne, Relu, Softplus, Exp, Identity);
}

#[inline(always)]
unsafe fn dots_of<V: Vector>(
    map: FeatureMap,
    shift: V::Element,
    rows: &[V::Element],
    width: usize,
    q: &[V::Element],
    to: &mut [V::Element],
) where
    V::Element: Constants,
{
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
) -> [V; N]
where
    V::Element: Constants,
{
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
                tail[..width - whole].copy_from_slice(&rows[r * width + whole..][..width - whole]);
                feature(map, V::load(tail.as_ptr()), shift).store(tail.as_mut_ptr());
                rest[r] = tail.iter().zip(&q[whole..width]).fold(V::Element::ZERO, |sum, (&x, &q)| sum + x * q);
            }
        }
        sums
    }
}

/// `sum += factor · x yᵀ`; `sum` is `x.len() × y.len()`, row-major.
#[inline(always)]
pub(crate) unsafe fn add_outer<V: Vector>(
    sum: &mut [V::Element],
    factor: V::Element,
    x: &[V::Element],
    y: &[V::Element],
) {
    let width = y.len();
    assert!(sum.len() >= x.len() * width);
    let whole = width / V::LANES * V::LANES;
    for (row, &x) in sum.chunks_exact_mut(width.max(1)).zip(x) {
        let gain = factor * x;
        // SAFETY: registers below `whole` lie in a row and in `y`.
        unsafe {
            let all = V::splat(gain);
            let mut column = 0;
            while column < whole {
                let at = row.as_mut_ptr().add(column);
                all.mul_add(V::load(y.as_ptr().add(column)), V::load(at)).store(at);
                column += V::LANES;
            }
        }
        row[whole..].iter_mut().zip(&y[whole..]).for_each(|(to, &y)| *to += gain * y);
    }
}

/// `to += Σ weights[r] · v_r` over rows `v⁺ = [v, 1]`; returns the same sum of their last numbers.
#[inline(always)]
pub(crate) unsafe fn add_weighed_values<V: Vector>(
    rows: &[V::Element],
    weights: &[V::Element],
    to: &mut [V::Element],
) -> V::Element {
    let (width, row_length) = (to.len(), to.len() + 1);
    assert!(rows.len() >= weights.len() * row_length);
    if row_length < V::LANES {
        let mut last = V::Element::ZERO;
        for (row, &weight) in rows.chunks_exact(row_length).zip(weights) {
            to.iter_mut().zip(row).for_each(|(to, &x)| *to += weight * x);
            last += weight * row[width];
        }
        return last;
    }
    // What does not fill a register ends with the number after the values. The register that ends there reads some
    // values again, and only its last numbers count.
    let whole = width / V::LANES * V::LANES;
    let rest = row_length - whole;
    let mut tail = [V::Element::ZERO; WIDEST];
    let mut column = 0;
    // SAFETY: registers at columns up to `row_length − LANES` lie in each of the rows, of which there are as many as
    // weights by the assertion above; those below `whole` lie in `to`; the tail holds one.
    unsafe {
        macro_rules! columns {
            ($n:literal, $with_tail:literal) => {{
                let mut places = [row_length - V::LANES; $n + $with_tail];
                places.iter_mut().take($n).enumerate().for_each(|(n, place)| *place = column + n * V::LANES);
                let sums = weighed_sum::<V, { $n + $with_tail }>(rows.as_ptr(), places, row_length, weights);
                for (&place, sum) in places.iter().zip(sums).take($n) {
                    let at = to.as_mut_ptr().add(place);
                    V::load(at).add(sum).store(at);
                }
                if let Some(sum) = sums.get($n) {
                    sum.store(tail.as_mut_ptr());
                }
            }};
        }
        while whole - column > 4 * V::LANES {
            columns!(4, 0);
            column += 4 * V::LANES;
        }
        match (whole - column) / V::LANES {
            4 => columns!(4, 1),
            3 => columns!(3, 1),
            2 => columns!(2, 1),
            1 => columns!(1, 1),
            _ => columns!(0, 1),
        }
    }
    let tail = &tail[V::LANES - rest..V::LANES];
    to[whole..].iter_mut().zip(tail).for_each(|(to, &x)| *to += x);
    tail[rest - 1]
}

/// `Σ weights[r] · rows[r]` for the registers of rows at `N` columns; two sums a register hide the latency of the fused
/// products.
///
/// # Safety
/// As for [`Vector`]; registers at these columns of as many rows as there are weights must be valid to read.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn weighed_sum<V: Vector, const N: usize>(
    rows: *const V::Element,
    columns: [usize; N],
    row_length: usize,
    weights: &[V::Element],
) -> [V; N] {
    // SAFETY: forwarded to the caller.
    unsafe {
        let mut sums = [[V::splat(V::Element::ZERO); N]; 2];
        let add = |row: usize, sums: &mut [V; N]| {
            let weight = V::splat(*weights.get_unchecked(row));
            for n in 0..N {
                sums[n] = weight.mul_add(V::load(rows.add(row * row_length + columns[n])), sums[n]);
            }
        };
        for pair in 0..weights.len() / 2 {
            add(2 * pair, &mut sums[0]);
            add(2 * pair + 1, &mut sums[1]);
        }
        if !weights.len().is_multiple_of(2) {
            add(weights.len() - 1, &mut sums[0]);
        }
        std::array::from_fn(|n| sums[0][n].add(sums[1][n]))
    }
}
