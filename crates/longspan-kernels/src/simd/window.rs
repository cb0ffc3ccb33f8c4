//! Sums of rows over windows, where a row has one weight for all of its channels: `Σ_p weight_p(n)·row_{n+p}` for every
//! output `n`, and sums that a row enters with every output.
//!
//! A line of weights belongs to one tap `p` and has a lane for each output, so that exponents are formed in whole
//! registers of outputs whatever the number of taps.

use super::block::BLOCK_ROWS;
use super::log_sum::{load_part, sigmoid, store_part};
use super::running::OutputRows;
use super::vector::{Constants, Vector, exp_nonpositive};
use crate::real::Real;
use crate::shape::{Columns, Rows};

/// Items on a line: their exponents, in two parts as for [`join`](super::log_sum::join), and their weights.
#[derive(Clone, Copy)]
pub(crate) struct Line<'a, T> {
    pub x: &'a [T],
    pub b: &'a [T],
    pub d: &'a [T],
}

/// The largest exponent of each output so far, in two parts.
pub(crate) struct Tops<'a, T> {
    pub x: &'a mut [T],
    pub b: &'a mut [T],
}

/// Lines of 0 before the first tap's and after the last one's: output `n + r` of a block of rows has no tap `−r`.
pub(crate) const MARGIN: usize = BLOCK_ROWS - 1;

/// Raises the tops by the items of each output's window, item `n + p` with a bias of `taps[p]`.
#[inline(always)]
pub(crate) unsafe fn window_tops<V: Vector>(
    line: Line<'_, V::Element>,
    taps: &[V::Element],
    tops: &mut Tops<'_, V::Element>,
) {
    let lanes = tops.x.len();
    assert!(lanes.is_multiple_of(V::LANES) && tops.b.len() == lanes);
    assert!(line.x.len().min(line.b.len()) >= lanes + taps.len());
    let mut lane = 0;
    while lane < lanes {
        // SAFETY: every line has a register at `lane`, and for every tap one further on, by the assertions above.
        unsafe {
            let (mut x, mut b) = (V::load(tops.x.as_ptr().add(lane)), V::load(tops.b.as_ptr().add(lane)));
            for (p, &tap) in taps.iter().enumerate() {
                let own_x = V::load(line.x.as_ptr().add(lane + p));
                let own_b = V::load(line.b.as_ptr().add(lane + p)).add(V::splat(tap));
                let rise = own_x.sub(x).add(own_b.sub(b));
                (x, b) = (rise.if_positive(own_x, x), rise.if_positive(own_b, b));
            }
            x.store(tops.x.as_mut_ptr().add(lane));
            b.store(tops.b.as_mut_ptr().add(lane));
        }
        lane += V::LANES;
    }
}

/// Writes a line of weights `e^{x+b+tap−top}` for each tap, and adds up `Σ weight·d`.
#[inline(always)]
pub(crate) unsafe fn window_weights<V: Vector>(
    line: Line<'_, V::Element>,
    taps: &[V::Element],
    tops: &Tops<'_, V::Element>,
    weights: &mut [V::Element],
    sums: &mut [V::Element],
) where
    V::Element: Constants,
{
    let lanes = tops.x.len();
    assert!(lanes.is_multiple_of(V::LANES) && tops.b.len() == lanes && sums.len() == lanes);
    assert!(line.x.len().min(line.b.len()).min(line.d.len()) >= lanes + taps.len());
    assert!(weights.len() >= taps.len() * lanes);
    let mut lane = 0;
    while lane < lanes {
        // SAFETY: as for the tops.
        unsafe {
            let (x, b) = (V::load(tops.x.as_ptr().add(lane)), V::load(tops.b.as_ptr().add(lane)));
            let mut sum = V::load(sums.as_ptr().add(lane));
            for (p, &tap) in taps.iter().enumerate() {
                let own_x = V::load(line.x.as_ptr().add(lane + p));
                let own_b = V::load(line.b.as_ptr().add(lane + p)).add(V::splat(tap));
                let weight = exp_nonpositive(own_x.sub(x).add(own_b.sub(b)));
                weight.store(weights.as_mut_ptr().add(p * lanes + lane));
                sum = weight.mul_add(V::load(line.d.as_ptr().add(lane + p)), sum);
            }
            sum.store(sums.as_mut_ptr().add(lane));
        }
        lane += V::LANES;
    }
}

/// `to_n += Σ_p weights_p(n)·row_{n+p}` for `outputs` outputs; `weights` has [`MARGIN`] lines of 0 on either side of its
/// taps', each of `lanes` numbers. Rows of both blocks are as long.
#[inline(always)]
pub(crate) unsafe fn add_window<V: Vector>(
    weights: &[V::Element],
    lanes: usize,
    rows: &[V::Element],
    row_length: usize,
    outputs: usize,
    to: &mut [V::Element],
) {
    let taps = weights.len() / lanes - 2 * MARGIN;
    let whole = outputs.next_multiple_of(BLOCK_ROWS);
    assert!(row_length.is_multiple_of(V::LANES) && whole <= lanes && to.len() >= whole * row_length);
    assert!(rows.len() >= (whole + taps - 1) * row_length);
    for output in (0..whole).step_by(BLOCK_ROWS) {
        let mut column = 0;
        while column < row_length {
            let left = (row_length - column) / V::LANES;
            // SAFETY: every row has so many registers at `column`, and rows and lines are as many as the assertions say.
            unsafe {
                macro_rules! tile {
                    ($n:literal) => {
                        window_tile::<V, $n>(weights, lanes, taps, rows, row_length, output, column, to)
                    };
                }
                match left.min(V::BLOCK_COLUMNS) {
                    4 => tile!(4),
                    3 => tile!(3),
                    2 => tile!(2),
                    _ => tile!(1),
                }
            }
            column += left.min(V::BLOCK_COLUMNS) * V::LANES;
        }
    }
}

/// `BLOCK_ROWS` outputs and `N` registers.
#[allow(clippy::needless_range_loop, clippy::too_many_arguments)]
#[inline(always)]
unsafe fn window_tile<V: Vector, const N: usize>(
    weights: &[V::Element],
    lanes: usize,
    taps: usize,
    rows: &[V::Element],
    row_length: usize,
    output: usize,
    column: usize,
    to: &mut [V::Element],
) {
    // SAFETY: the caller checked that all these rows and lines are there.
    unsafe {
        let to = to.as_mut_ptr().add(output * row_length + column);
        let mut sums = [[V::splat(V::Element::ZERO); N]; BLOCK_ROWS];
        for r in 0..BLOCK_ROWS {
            for n in 0..N {
                sums[r][n] = V::load(to.add(r * row_length + n * V::LANES));
            }
        }
        let from = rows.as_ptr().add(output * row_length + column);
        let weights = weights.as_ptr().add(output);
        for j in 0..taps + MARGIN {
            let mut row = [V::splat(V::Element::ZERO); N];
            for n in 0..N {
                row[n] = V::load(from.add(j * row_length + n * V::LANES));
            }
            for r in 0..BLOCK_ROWS {
                let factor = V::splat(*weights.add((j + MARGIN - r) * lanes + r));
                for n in 0..N {
                    sums[r][n] = factor.mul_add(row[n], sums[r][n]);
                }
            }
        }
        for r in 0..BLOCK_ROWS {
            for n in 0..N {
                sums[r][n].store(to.add(r * row_length + n * V::LANES));
            }
        }
    }
}

/// What every output does to a running sum: it reads `share` of it, and then it is kept so far and row `n` enters.
#[derive(Clone, Copy)]
pub(crate) struct Entering<'a, T> {
    pub keep: &'a [T],
    pub enter: &'a [T],
    pub rows: &'a [T],
}

/// Takes rows into `sum` in order, or from the last to the first; output `n` gets `share[n]` of the sum before its row
/// enters added, for as many outputs as there are shares.
#[inline(always)]
pub(crate) unsafe fn run_rows<V: Vector>(
    sum: &mut [V::Element],
    run: Entering<'_, V::Element>,
    share: &[V::Element],
    backwards: bool,
    to: &mut [V::Element],
) {
    let (width, count) = (sum.len(), run.keep.len());
    assert!(width.is_multiple_of(V::LANES) && run.enter.len() == count && run.rows.len() >= count * width);
    assert!((share.is_empty() || share.len() == count) && to.len() >= share.len() * width);
    let mut column = 0;
    while column < width {
        let left = (width - column) / V::LANES;
        // SAFETY: every row has so many registers at `column` by the assertions above.
        unsafe {
            macro_rules! columns {
                ($n:literal) => {
                    run_columns::<V, $n>(sum, run, share, backwards, column, to)
                };
            }
            match left.min(4) {
                4 => columns!(4),
                3 => columns!(3),
                2 => columns!(2),
                _ => columns!(1),
            }
        }
        column += left.min(4) * V::LANES;
    }
}

/// `N` registers of every row.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn run_columns<V: Vector, const N: usize>(
    sum: &mut [V::Element],
    run: Entering<'_, V::Element>,
    share: &[V::Element],
    backwards: bool,
    column: usize,
    to: &mut [V::Element],
) {
    let (width, count) = (sum.len(), run.keep.len());
    // SAFETY: forwarded to the caller.
    unsafe {
        let at = sum.as_mut_ptr().add(column);
        let mut sums = [V::splat(V::Element::ZERO); N];
        for n in 0..N {
            sums[n] = V::load(at.add(n * V::LANES));
        }
        for index in 0..count {
            let index = if backwards { count - 1 - index } else { index };
            if !share.is_empty() {
                let share = V::splat(share[index]);
                let to = to.as_mut_ptr().add(index * width + column);
                for n in 0..N {
                    let place = to.add(n * V::LANES);
                    share.mul_add(sums[n], V::load(place)).store(place);
                }
            }
            let (keep, enter) = (V::splat(run.keep[index]), V::splat(run.enter[index]));
            let row = run.rows.as_ptr().add(index * width + column);
            for n in 0..N {
                sums[n] = sums[n].mul_add(keep, enter.mul(V::load(row.add(n * V::LANES))));
            }
        }
        for n in 0..N {
            sums[n].store(at.add(n * V::LANES));
        }
    }
}

/// `d_taps[p] += Σ_n weights_p(n)·(output_n·row_{n+p} − c_n)`. Outputs and rows stand turned round, a line of `lanes` or
/// `items` numbers for each channel.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
pub(crate) unsafe fn window_dots<V: Vector>(
    weights: &[V::Element],
    outputs: &[V::Element],
    rows: &[V::Element],
    items: usize,
    width: usize,
    c: &[V::Element],
    d_taps: &mut [V::Element],
) {
    /// Taps at once: with four registers of outputs sixteen sums.
    const TAPS: usize = 4;
    let (lanes, taps) = (c.len(), d_taps.len());
    assert!(lanes.is_multiple_of(V::LANES) && weights.len() >= taps * lanes);
    assert!(outputs.len() >= width * lanes && items >= lanes + taps && rows.len() >= width * items);
    for first in (0..taps).step_by(TAPS) {
        let most = (taps - first).min(TAPS);
        let mut lane = 0;
        while lane < lanes {
            let registers = ((lanes - lane) / V::LANES).min(4);
            // SAFETY: every line has so many registers at `lane`, and one tap further on, by the assertions above.
            unsafe {
                let zero = V::splat(V::Element::ZERO);
                let mut dots = [[zero; 4]; TAPS];
                if registers == 4 && most == TAPS {
                    for channel in 0..width {
                        let output = outputs.as_ptr().add(channel * lanes + lane);
                        let row = rows.as_ptr().add(channel * items + lane + first);
                        let output: [V; 4] = std::array::from_fn(|n| V::load(output.add(n * V::LANES)));
                        for (p, dots) in dots.iter_mut().enumerate() {
                            for (n, dot) in dots.iter_mut().enumerate() {
                                *dot = output[n].mul_add(V::load(row.add(p + n * V::LANES)), *dot);
                            }
                        }
                    }
                } else {
                    for channel in 0..width {
                        let output = outputs.as_ptr().add(channel * lanes + lane);
                        let row = rows.as_ptr().add(channel * items + lane + first);
                        for (p, dots) in dots.iter_mut().enumerate().take(most) {
                            for (n, dot) in dots.iter_mut().enumerate().take(registers) {
                                let output = V::load(output.add(n * V::LANES));
                                *dot = output.mul_add(V::load(row.add(p + n * V::LANES)), *dot);
                            }
                        }
                    }
                }
                for (p, dots) in dots.iter().enumerate().take(most) {
                    let mut sum = zero;
                    for (n, dot) in dots.iter().enumerate().take(registers) {
                        let at = lane + n * V::LANES;
                        let weight = V::load(weights.as_ptr().add((first + p) * lanes + at));
                        sum = weight.mul_add(dot.sub(V::load(c.as_ptr().add(at))), sum);
                    }
                    d_taps[first + p] += sum.sum();
                }
            }
            lane += registers * V::LANES;
        }
    }
}

/// Every number's exponential, for numbers that are not positive.
#[inline(always)]
pub(crate) unsafe fn exp_all<V: Vector>(block: &mut [V::Element])
where
    V::Element: Constants,
{
    assert!(block.len().is_multiple_of(V::LANES));
    for lane in (0..block.len()).step_by(V::LANES) {
        // SAFETY: the block is a whole number of registers.
        unsafe {
            let at = block.as_mut_ptr().add(lane);
            exp_nonpositive(V::load(at)).store(at);
        }
    }
}

/// `out = σ(q) ⊙ factor·sum` for rows of sums one after the other; no `queries` are no gate.
#[inline(always)]
pub(crate) unsafe fn gated_rows<V: Vector>(
    sums: &[V::Element],
    factors: &[V::Element],
    queries: Option<Rows<'_, V::Element>>,
    to: &mut Columns<'_, V::Element>,
) where
    V::Element: Constants,
{
    let (count, head_dim) = (factors.len(), to.width());
    let width = sums.len() / count.max(1);
    assert!(width.is_multiple_of(V::LANES) && head_dim <= width && to.rows() >= count);
    for (row, (sum, &factor)) in sums.chunks_exact(width.max(1)).zip(factors).enumerate() {
        let q = queries.map(|queries| queries.row(row, head_dim));
        let out = to.row(row);
        let mut column = 0;
        while column < head_dim {
            // SAFETY: the sum has a register at `column` by the assertion above.
            unsafe {
                let mut value = V::load(sum.as_ptr().add(column)).mul(V::splat(factor));
                if let Some(q) = q {
                    value = value.mul(sigmoid(load_part::<V>(q, column)).0);
                }
                store_part(value, out, column);
            }
            column += V::LANES;
        }
    }
}

/// Rows of the backward: `dq`; into `items` `factor·G ⊙ σ(q)`, one after the other; and into `sums` `factor·G·Y`. A row whose factor is 0
/// sees nothing, and all of this is 0.
#[inline(always)]
pub(crate) unsafe fn gated_cotangents<V: Vector>(
    rows: OutputRows<'_, V::Element>,
    factors: &[V::Element],
    dq: &mut Columns<'_, V::Element>,
    items: &mut [V::Element],
    sums: &mut [V::Element],
) where
    V::Element: Constants,
{
    let (count, head_dim) = (factors.len(), dq.width());
    let width = items.len() / count.max(1);
    assert!(width.is_multiple_of(V::LANES) && head_dim <= width && sums.len() >= count);
    assert!(rows.count == count && dq.rows() >= count);
    for (row, (item, &factor)) in items.chunks_exact_mut(width.max(1)).zip(factors).enumerate() {
        let d_query = dq.row(row);
        if factor == V::Element::ZERO {
            d_query.fill(V::Element::ZERO);
            item.fill(V::Element::ZERO);
            sums[row] = V::Element::ZERO;
            continue;
        }
        let (q, d_out) = (rows.q.map(|q| q.row(row, head_dim)), rows.d_out.row(row, head_dim));
        let out = rows.out.row(row, head_dim);
        let mut column = 0;
        // SAFETY: `item` has a register at `column` by the assertion above.
        unsafe {
            let zero = V::splat(V::Element::ZERO);
            let factor = V::splat(factor);
            let mut sum = zero;
            while column < width {
                let (mut g, mut slope) = (zero, zero);
                if column < head_dim {
                    g = load_part::<V>(d_out, column);
                    let product = g.mul(load_part::<V>(out, column));
                    sum = sum.add(product);
                    if let Some(q) = q {
                        let (gate, rest) = sigmoid(load_part::<V>(q, column));
                        g = g.mul(gate);
                        slope = product.mul(rest);
                    }
                    store_part(slope, d_query, column);
                }
                g.mul(factor).store(item.as_mut_ptr().add(column));
                column += V::LANES;
            }
            sums[row] = sum.mul(factor).sum();
        }
    }
}

/// `dv += factor·sum`; returns `sum·v`.
#[inline(always)]
pub(crate) unsafe fn add_row_dot<V: Vector>(
    sum: &[V::Element],
    factor: V::Element,
    v: &[V::Element],
    dv: &mut [V::Element],
) -> V::Element {
    assert!(sum.len().is_multiple_of(V::LANES) && dv.len() <= sum.len() && v.len() == dv.len());
    let mut column = 0;
    // SAFETY: the sum has a register at `column` by the assertion above.
    unsafe {
        let mut dot = V::splat(V::Element::ZERO);
        while column < dv.len() {
            let own = V::load(sum.as_ptr().add(column));
            dot = own.mul_add(load_part::<V>(v, column), dot);
            store_part(own.mul_add(V::splat(factor), load_part::<V>(dv, column)), dv, column);
            column += V::LANES;
        }
        dot.sum()
    }
}
