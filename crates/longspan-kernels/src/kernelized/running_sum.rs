//! Sums that rows enter one after the other: over a chunk, over segments in compensated form, and by a single token.

use crate::simd::block::{AddScaled, Dot, Scale, add_registers, elementwise};
use crate::simd::product::by_whole_registers;
use crate::simd::{Real, Vector, dispatch, operation};

operation!(Combine, |to: &'a mut [T], a: T, x: &'a [T], b: T, y: &'a [T]| {
    // SAFETY: forwarded to the caller.
    unsafe { elementwise!(to, [x, y], V::splat(b).mul_add(y, V::splat(a).mul(x)), a * x + b * y) };
});

/// `to = a·x + b·y`.
pub(crate) fn combine<T: Real>(to: &mut [T], a: T, x: &[T], b: T, y: &[T]) {
    dispatch(Combine { to, a, x, b, y })
}

/// Rows that enter a running sum one after the other: before row `n` the sum takes in `gains[n] · rows[n]`, after it the
/// sum is multiplied by `decays[n]`.
#[derive(Clone, Copy)]
pub(crate) struct Run<'a, T> {
    pub rows: &'a [T],
    pub row_length: usize,
    pub count: usize,
    /// From the last row to the first.
    pub reverse: bool,
    pub gains: &'a [T],
    pub decays: &'a [T],
    /// One weight a row: what the sum is multiplied by where it is used; spaced by `weight_step`.
    pub weights: &'a [T],
    pub weight_step: usize,
}

impl<T> Run<'_, T> {
    #[inline(always)]
    fn order(&self, n: usize) -> usize {
        if self.reverse { self.count - 1 - n } else { n }
    }
}

// Runs a sum over rows and adds it to those of `to`: `to[n] += weights[n] · sum`. Empty `to` only runs it.
operation!(AddRunning, |sum: &'a mut [T], run: Run<'a, T>, to: &'a mut [T], to_row: usize| {
    if run.count == 0 {
        return;
    }
    let width = sum.len();
    assert!(width.is_multiple_of(V::LANES) && (run.count - 1) * run.row_length + width <= run.rows.len());
    let writes = !to.is_empty();
    assert!(!writes || (run.count - 1) * to_row + width <= to.len());
    assert!(!writes || (run.count - 1) * run.weight_step < run.weights.len());
    assert!(run.count <= run.gains.len().min(run.decays.len()));
    let mut column = 0;
    while column < width {
        // SAFETY: each row of `rows` and `to` has a register at `column` by the assertions above.
        unsafe {
            let mut total = V::load(sum.as_ptr().add(column));
            for n in 0..run.count {
                let row = run.order(n);
                let gain = V::splat(*run.gains.get_unchecked(row));
                total = gain.mul_add(V::load(run.rows.as_ptr().add(row * run.row_length + column)), total);
                if writes {
                    let weight = V::splat(*run.weights.get_unchecked(row * run.weight_step));
                    let place = to.as_mut_ptr().add(row * to_row + column);
                    weight.mul_add(total, V::load(place)).store(place);
                }
                total = total.mul(V::splat(*run.decays.get_unchecked(row)));
            }
            total.normal_or_zero().store(sum.as_mut_ptr().add(column));
        }
        column += V::LANES;
    }
});

// Runs a sum over rows and takes its products with those of `with`: `dots[n] += with[n] · sum`.
operation!(RunningDots, |sum: &'a mut [T], run: Run<'a, T>, with: &'a [T], with_row: usize, dots: &'a mut [T]| {
    let width = sum.len();
    for n in 0..run.count {
        let row = run.order(n);
        // SAFETY: forwarded to the caller; the slices are indexed with checks.
        unsafe {
            AddScaled { to: sum, a: run.gains[row], x: &run.rows[row * run.row_length..][..width] }.run::<V>();
            dots[row] += Dot { x: sum, y: &with[row * with_row..][..width] }.run::<V>();
            if run.decays[row] != V::Element::ONE {
                Scale { to: sum, a: run.decays[row] }.run::<V>();
            }
        }
    }
});

// One token of a running sum: `S += k vᵀ`, then `out += qᵀ S`; `S` is `k.len() × v.len()`, row-major.
operation!(AbsorbToken, |sum: &'a mut [T], k: &'a [T], v: &'a [T], q: &'a [T], out: &'a mut [T]| {
    let width = v.len();
    assert!(sum.len() >= k.len() * width && q.len() >= k.len() && out.len() >= width);
    let whole = width / V::LANES * V::LANES;
    // SAFETY: all are as long as the assertion says.
    unsafe { by_whole_registers!(0, whole, 4, absorb_columns(sum, k, v, q, out)) };
    for column in whole..width {
        for (feature, (&k, &q)) in k.iter().zip(q).enumerate() {
            let s = &mut sum[feature * width + column];
            *s += k * v[column];
            out[column] += q * *s;
        }
    }
});

#[inline(always)]
unsafe fn absorb_columns<V: Vector, const N: usize>(
    sum: &mut [V::Element],
    k: &[V::Element],
    v: &[V::Element],
    q: &[V::Element],
    out: &mut [V::Element],
    column: usize,
) {
    // SAFETY: the caller has `N` registers from `column` in every row of `sum`, in `v` and in `out`.
    unsafe {
        let mut total = [V::splat(V::Element::ZERO); N];
        let value: [V; N] = std::array::from_fn(|n| V::load(v.as_ptr().add(column + n * V::LANES)));
        for (feature, (&k, &q)) in k.iter().zip(q).enumerate() {
            let row = sum.as_mut_ptr().add(feature * v.len() + column);
            let (k, q) = (V::splat(k), V::splat(q));
            for n in 0..N {
                let s = k.mul_add(value[n], V::load(row.add(n * V::LANES)));
                s.store(row.add(n * V::LANES));
                total[n] = q.mul_add(s, total[n]);
            }
        }
        add_registers(total, out, column);
    }
}

operation!(AddCompensated, |high: &'a mut [T], low: &'a mut [T], terms: &'a [T], factor: T| {
    for ((high, low), &term) in high.iter_mut().zip(low).zip(terms) {
        let more = term * factor + *low;
        let sum = *high + more;
        let shown = sum - *high;
        let error = (*high - (sum - shown)) + (more - shown);
        *high = sum;
        // An infinite or NaN sum has no error to keep.
        *low = if error.is_finite() { error } else { V::Element::ZERO };
    }
});

/// `high + low += factor · terms` by Knuth's exact sum: `low` keeps what `high` loses, with no demand on which is larger.
pub(crate) fn add_compensated<T: Real>(high: &mut [T], low: &mut [T], terms: &[T], factor: T) {
    dispatch(AddCompensated { high, low, terms, factor })
}
