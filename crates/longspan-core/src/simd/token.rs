//! What a token's step reads from its state.

use super::block::{WIDEST, add_registers};
use super::product::by_whole_registers;
use super::{Real, Vector, operation};

// `out += qᵀ S`.
operation!(ReadToken, |sum: &'a [T], q: &'a [T], out: &'a mut [T]| {
    let width = out.len();
    assert!(sum.len() >= q.len() * width);
    let whole = width / V::LANES * V::LANES;
    // SAFETY: the sum is as long as the assertion says.
    unsafe { by_whole_registers!(0, whole, 4, read_columns(sum, q, out)) };
    for column in whole..width {
        out[column] += q.iter().enumerate().map(|(feature, &q)| q * sum[feature * width + column]).sum::<V::Element>();
    }
});

#[inline(always)]
unsafe fn read_columns<V: Vector, const N: usize>(
    sum: &[V::Element],
    q: &[V::Element],
    out: &mut [V::Element],
    column: usize,
) {
    // SAFETY: the caller has `N` registers from `column` in every row of `sum` and in `out`.
    unsafe {
        let mut total = [V::splat(V::Element::ZERO); N];
        for (feature, &q) in q.iter().enumerate() {
            let row = sum.as_ptr().add(feature * out.len() + column);
            let q = V::splat(q);
            for (n, total) in total.iter_mut().enumerate() {
                *total = q.mul_add(V::load(row.add(n * V::LANES)), *total);
            }
        }
        add_registers(total, out, column);
    }
}

// `to += Σ weights[r] · v_r` over rows `v⁺ = [v, 1]`; returns the same sum of their last numbers.
operation!(AddWeighedValues, |rows: &'a [T], weights: &'a [T], to: &'a mut [T]| -> T {
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
});

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
