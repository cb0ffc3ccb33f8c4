//! Sums of rows over windows, where a row has one weight for all of its channels: `Σ_p weight_p(n)·row_{n+p}` for every
//! output `n`, and sums that a row enters with every output.
//!
//! A line of weights belongs to one tap `p` and has a lane for each output, so that exponents are formed in whole
//! registers of outputs whatever the number of taps.

use crate::aft::log_sum::sigmoid;
use crate::aft::running::{OutputRows, TokenGradients};
use crate::simd::block::floor;
use crate::simd::product::{BLOCK_ROWS, by_whole_registers};
use crate::simd::rows::{Ahead, Columns, Fetching, Rows, covers, get, load_part, put, store_part};
use crate::simd::{Operation, Real, Vector, exp_nonpositive};

/// Items on a line: their exponents, in two parts as for [`join`](super::log_sum::join), and their weights.
#[derive(Clone, Copy)]
pub(crate) struct Line<'a, T> {
    pub x: &'a [T],
    pub b: &'a [T],
    pub d: &'a [T],
}

/// The largest exponent of each output so far, in two parts.
pub(crate) struct RunningMax<'a, T> {
    pub x: &'a mut [T],
    pub b: &'a mut [T],
}

/// Lines of 0 before the first tap's and after the last one's: output `n + r` of a block of rows has no tap `−r`.
pub(crate) const MARGIN: usize = BLOCK_ROWS - 1;

/// Raises the tops by the items of each output's window, item `n + p` with a bias of `taps[p]`.
pub(crate) struct WindowMax<'a, 'b, T> {
    pub line: Line<'a, T>,
    pub taps: &'a [T],
    pub running_max: &'a mut RunningMax<'b, T>,
}

impl<T: Real> Operation for WindowMax<'_, '_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { line, taps, running_max } = self;
        let lanes = running_max.x.len();
        assert!(lanes.is_multiple_of(V::LANES) && running_max.b.len() == lanes);
        assert!(line.x.len().min(line.b.len()) >= lanes + taps.len());
        let mut lane = 0;
        while lane < lanes {
            // SAFETY: every line has a register at `lane`, and for every tap one further on, by the assertions above.
            unsafe {
                let (mut x, mut b) =
                    (V::load(running_max.x.as_ptr().add(lane)), V::load(running_max.b.as_ptr().add(lane)));
                for (p, &tap) in taps.iter().enumerate() {
                    let own_x = V::load(line.x.as_ptr().add(lane + p));
                    let own_b = V::load(line.b.as_ptr().add(lane + p)).add(V::splat(tap));
                    let rise = own_x.sub(x).add(own_b.sub(b));
                    (x, b) = (rise.if_positive(own_x, x), rise.if_positive(own_b, b));
                }
                x.store(running_max.x.as_mut_ptr().add(lane));
                b.store(running_max.b.as_mut_ptr().add(lane));
            }
            lane += V::LANES;
        }
    }
}

/// Writes a line of weights `e^{x+b+tap−top}` for each tap, and adds up `Σ weight·d`.
pub(crate) struct WindowWeights<'a, T> {
    pub line: Line<'a, T>,
    pub taps: &'a [T],
    pub running_max: &'a RunningMax<'a, T>,
    pub weights: &'a mut [T],
    pub sums: &'a mut [T],
}

impl<T: Real> Operation for WindowWeights<'_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { line, taps, running_max, weights, sums } = self;
        let lanes = running_max.x.len();
        assert!(lanes.is_multiple_of(V::LANES) && running_max.b.len() == lanes && sums.len() == lanes);
        assert!(line.x.len().min(line.b.len()).min(line.d.len()) >= lanes + taps.len());
        assert!(weights.len() >= taps.len() * lanes);
        let mut lane = 0;
        while lane < lanes {
            // SAFETY: as for the tops.
            unsafe {
                let (x, b) = (V::load(running_max.x.as_ptr().add(lane)), V::load(running_max.b.as_ptr().add(lane)));
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
}

/// `to_n += Σ_p weights_p(n)·row_{n+p}` for `outputs` outputs; `weights` has [`MARGIN`] lines of 0 on either side of its
/// taps', each of `lanes` numbers. Rows of both blocks are as long.
pub(crate) struct AddWindow<'a, T> {
    pub weights: &'a [T],
    pub lanes: usize,
    pub rows: &'a [T],
    pub row_length: usize,
    pub outputs: usize,
    pub to: &'a mut [T],
}

impl<T: Real> Operation for AddWindow<'_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { weights, lanes, rows, row_length, outputs, to } = self;
        let taps = weights.len() / lanes - 2 * MARGIN;
        let whole = outputs.next_multiple_of(BLOCK_ROWS);
        assert!(row_length.is_multiple_of(V::LANES) && whole <= lanes && to.len() >= whole * row_length);
        assert!(rows.len() >= (whole + taps - 1) * row_length);
        for output in (0..whole).step_by(BLOCK_ROWS) {
            // SAFETY: rows are whole registers, and rows and lines are as many as the assertions say.
            unsafe {
                by_whole_registers!(
                    0,
                    row_length,
                    V::BLOCK_COLUMNS,
                    window_tile(weights, lanes, taps, rows, row_length, output, to)
                )
            };
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
    to: &mut [V::Element],
    column: usize,
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
pub(crate) struct RunRows<'a, T> {
    pub sum: &'a mut [T],
    pub run: Entering<'a, T>,
    pub share: &'a [T],
    pub backwards: bool,
    pub to: &'a mut [T],
}

impl<T: Real> Operation for RunRows<'_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { sum, run, share, backwards, to } = self;
        let (width, count) = (sum.len(), run.keep.len());
        assert!(width.is_multiple_of(V::LANES) && run.enter.len() == count && run.rows.len() >= count * width);
        assert!((share.is_empty() || share.len() == count) && to.len() >= share.len() * width);
        // SAFETY: rows are whole registers, and as many as the assertions say.
        unsafe { by_whole_registers!(0, width, 4, run_columns(sum, run, share, backwards, to)) };
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
    to: &mut [V::Element],
    column: usize,
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
pub(crate) struct WindowDots<'a, T> {
    pub weights: &'a [T],
    pub outputs: &'a [T],
    pub rows: &'a [T],
    pub items: usize,
    pub width: usize,
    pub c: &'a [T],
    pub d_taps: &'a mut [T],
}

impl<T: Real> Operation for WindowDots<'_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { weights, outputs, rows, items, width, c, d_taps } = self;
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
}

/// What the exponents of a range of items may be relative to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReachMax<T> {
    /// The largest exponent, in two parts; the floor if there is nothing.
    pub x: T,
    pub b: T,
    /// How far below it the least is, among those above the floor.
    pub depth: T,
    /// How many are above the floor.
    pub count: usize,
}

/// The largest exponent of a line.
pub(crate) struct FindReachMax<'a, T> {
    pub line: Line<'a, T>,
}

impl<T: Real> Operation for FindReachMax<'_, T> {
    type Element = T;
    type Output = ReachMax<T>;

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) -> ReachMax<T> {
        let Self { line } = self;
        let len = line.x.len();
        assert!(len.is_multiple_of(V::LANES) && line.b.len() >= len);
        // SAFETY: both lines are whole registers by the assertion above; the lanes have room for one.
        unsafe {
            let (zero, one, bottom) = (V::splat(V::Element::ZERO), V::splat(V::Element::ONE), V::splat(floor()));
            let at = |lane: usize| (V::load(line.x.as_ptr().add(lane)), V::load(line.b.as_ptr().add(lane)));
            let (mut x, mut b, mut count) = (bottom, zero, zero);
            for lane in (0..len).step_by(V::LANES) {
                let (own_x, own_b) = at(lane);
                let rise = own_x.sub(x).add(own_b.sub(b));
                (x, b) = (rise.if_positive(own_x, x), rise.if_positive(own_b, b));
                count = count.add(own_x.sub(bottom).if_positive(one, zero));
            }
            // Of the lanes whose sums are the largest, one; sums relative to something near them keep their digits.
            let (near_x, near_b) = (V::splat(x.largest()), V::splat(b.largest()));
            let rise = x.sub(near_x).add(b.sub(near_b));
            let less = V::splat(rise.largest()).sub(rise);
            let none = V::splat(V::Element::NEG_INFINITY);
            let top_x = less.if_positive(none, x).largest();
            let less = V::splat(top_x).sub(x).if_positive(one, less);
            let top = (top_x, less.if_positive(none, b).largest());
            let mut depth = zero;
            for lane in (0..len).step_by(V::LANES) {
                let (own_x, own_b) = at(lane);
                let own = V::splat(top.0).sub(own_x).add(V::splat(top.1).sub(own_b));
                depth = own_x.sub(bottom).if_positive(own, zero).max(depth);
            }
            ReachMax { x: top.0, b: top.1, depth: depth.largest(), count: count.sum().to_f64() as usize }
        }
    }
}

/// Writes the weight `e^{x+b−top}` of each item, and its product with `d`.
pub(crate) struct ReachWeights<'a, T> {
    pub line: Line<'a, T>,
    pub top: &'a ReachMax<T>,
    pub weights: &'a mut [T],
    pub products: &'a mut [T],
}

impl<T: Real> Operation for ReachWeights<'_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { line, top, weights, products } = self;
        let len = line.x.len();
        assert!(len.is_multiple_of(V::LANES) && line.b.len().min(line.d.len()) >= len);
        assert!(weights.len().min(products.len()) >= len);
        for lane in (0..len).step_by(V::LANES) {
            // SAFETY: every line has a register at `lane` by the assertions above.
            unsafe {
                let at = |line: &[V::Element]| V::load(line.as_ptr().add(lane));
                let exponent = at(line.x).sub(V::splat(top.x)).add(at(line.b).sub(V::splat(top.b)));
                let weight = exp_nonpositive(exponent);
                weight.store(weights.as_mut_ptr().add(lane));
                weight.mul(at(line.d)).store(products.as_mut_ptr().add(lane));
            }
        }
    }
}

/// Writes a line of weights `kernel[p]·items[n + p]` for each tap, and adds up `Σ_p kernel[p]·products[n + p]`.
pub(crate) struct BandWeights<'a, T> {
    pub kernel: &'a [T],
    pub items: &'a [T],
    pub products: &'a [T],
    pub weights: &'a mut [T],
    pub sums: &'a mut [T],
}

impl<T: Real> Operation for BandWeights<'_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { kernel, items, products, weights, sums } = self;
        let lanes = sums.len();
        assert!(lanes.is_multiple_of(V::LANES) && weights.len() >= kernel.len() * lanes);
        assert!(items.len().min(products.len()) + 1 >= lanes + kernel.len());
        for lane in (0..lanes).step_by(V::LANES) {
            // SAFETY: every line has a register at `lane`, and items one for every tap further on, by the assertions above.
            unsafe {
                let mut sum = V::load(sums.as_ptr().add(lane));
                for (p, &factor) in kernel.iter().enumerate() {
                    let factor = V::splat(factor);
                    let weight = factor.mul(V::load(items.as_ptr().add(lane + p)));
                    weight.store(weights.as_mut_ptr().add(p * lanes + lane));
                    sum = factor.mul_add(V::load(products.as_ptr().add(lane + p)), sum);
                }
                sum.store(sums.as_mut_ptr().add(lane));
            }
        }
    }
}

/// `to = Σ_j weights[j]·row_j`.
pub(crate) struct SumRows<'a, T> {
    pub weights: &'a [T],
    pub rows: &'a [T],
    pub to: &'a mut [T],
}

impl<T: Real> Operation for SumRows<'_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { weights, rows, to } = self;
        let width = to.len();
        assert!(width.is_multiple_of(V::LANES) && rows.len() >= weights.len() * width);
        // SAFETY: rows are whole registers, and as many as the assertion says.
        unsafe { by_whole_registers!(0, width, 4, sum_columns(weights, rows, to)) };
    }
}

/// `N` registers of every row; two sums for each.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn sum_columns<V: Vector, const N: usize>(
    weights: &[V::Element],
    rows: &[V::Element],
    to: &mut [V::Element],
    column: usize,
) {
    // SAFETY: forwarded to the caller.
    unsafe {
        let mut sums = [[V::splat(V::Element::ZERO); N]; 2];
        let row = |j: usize| rows.as_ptr().add(j * to.len() + column);
        for (pair, two) in weights.chunks(2).enumerate() {
            for (own, &weight) in two.iter().enumerate() {
                for n in 0..N {
                    let register = V::load(row(2 * pair + own).add(n * V::LANES));
                    sums[own][n] = V::splat(weight).mul_add(register, sums[own][n]);
                }
            }
        }
        for n in 0..N {
            sums[0][n].add(sums[1][n]).store(to.as_mut_ptr().add(column + n * V::LANES));
        }
    }
}

/// The sums of rows of a chunk whose weights are all relative to one exponent: windows, what comes before them and what after.
#[derive(Clone, Copy)]
pub(crate) struct Convolution<'a, T> {
    /// A line of `lanes` outputs for each tap.
    pub weights: &'a [T],
    pub lanes: usize,
    pub taps: usize,
    /// What items weigh outside of windows.
    pub items: &'a [T],
    /// As many rows, as long as those of the sums.
    pub rows: &'a [T],
    pub row_length: usize,
    pub outputs: usize,
    /// Whether what comes before windows counts.
    pub before: bool,
    /// How many items behind the first output's window enter what comes after, if that counts.
    pub after: Option<usize>,
}

/// Writes `to_n = before_n + Σ_p weights_p(n)·row_{n+p} + after_n`. `before` is what comes before the first output's window, and
/// then the last one's; `after` what comes after all items, and has room for a row for each block of outputs behind it.
pub(crate) struct Convolve<'a, T> {
    pub c: &'a Convolution<'a, T>,
    pub before: &'a mut [T],
    pub after: &'a mut [T],
    pub to: &'a mut [T],
    pub ahead: &'a [Ahead<T>],
}

impl<T: Real> Operation for Convolve<'_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { c, before, after, to, ahead } = self;
        let (width, blocks) = (c.row_length, c.outputs.div_ceil(BLOCK_ROWS));
        let (whole, behind) = (blocks * BLOCK_ROWS, c.taps - 1);
        assert!(width.is_multiple_of(V::LANES) && c.taps > 0 && whole <= c.lanes && to.len() >= whole * width);
        assert!(c.weights.len() >= c.taps * c.lanes && before.len() >= width);
        let items = c.items.len().min(c.rows.len() / width.max(1));
        assert!(items >= whole + behind);
        if let Some(end) = c.after {
            assert!(after.len() >= (blocks + 1) * width && items >= behind + end.max(whole));
        }
        let strides = (c.taps.saturating_sub(MARGIN)).div_ceil(STRIDE);
        let mut fetching = Fetching::new(ahead, blocks * strides);
        // SAFETY: rows are whole registers, and rows and lines are as many as the assertions say.
        unsafe {
            by_whole_registers!(0, width, V::BLOCK_COLUMNS, convolve_columns(c, before, after, to, &mut fetching));
        }
    }
}

/// `N` registers of every row.
#[inline(always)]
unsafe fn convolve_columns<V: Vector, const N: usize>(
    c: &Convolution<'_, V::Element>,
    before: &mut [V::Element],
    after: &mut [V::Element],
    to: &mut [V::Element],
    fetching: &mut Fetching<'_, V::Element>,
    column: usize,
) {
    // SAFETY: forwarded to the caller.
    unsafe {
        if let Some(end) = c.after {
            after_blocks::<V, N>(c, end, column, after);
        }
        for block in 0..c.outputs.div_ceil(BLOCK_ROWS) {
            convolution_tile::<V, N>(c, block, column, before, after, to, fetching);
        }
    }
}

/// Rows that are multiplied between two times that memory is asked for a few lines: more at a time would wait for it.
const STRIDE: usize = 8;

/// What comes after the last output of each block, behind the sum of what comes after all.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn after_blocks<V: Vector, const N: usize>(
    c: &Convolution<'_, V::Element>,
    end: usize,
    column: usize,
    after: &mut [V::Element],
) {
    let blocks = c.outputs.div_ceil(BLOCK_ROWS);
    // SAFETY: the caller checked that all these rows are there.
    unsafe {
        let mut sum: [V; N] = std::array::from_fn(|n| V::load(after.as_ptr().add(column + n * V::LANES)));
        let mut item = end;
        for block in (0..blocks).rev() {
            while item > (block + 1) * BLOCK_ROWS {
                item -= 1;
                let at = c.taps - 1 + item;
                let (weight, row) =
                    (V::splat(*c.items.get_unchecked(at)), c.rows.as_ptr().add(at * c.row_length + column));
                for n in 0..N {
                    sum[n] = weight.mul_add(V::load(row.add(n * V::LANES)), sum[n]);
                }
            }
            for n in 0..N {
                sum[n].store(after.as_mut_ptr().add((block + 1) * c.row_length + column + n * V::LANES));
            }
        }
    }
}

/// `BLOCK_ROWS` outputs and `N` registers. No output meets a row that its window does not hold: what stands there may be no
/// number.
#[allow(clippy::needless_range_loop, clippy::too_many_arguments)]
#[inline(always)]
unsafe fn convolution_tile<V: Vector, const N: usize>(
    c: &Convolution<'_, V::Element>,
    block: usize,
    column: usize,
    before: &mut [V::Element],
    after: &[V::Element],
    to: &mut [V::Element],
    fetching: &mut Fetching<'_, V::Element>,
) {
    let (output, length) = (block * BLOCK_ROWS, c.row_length);
    // SAFETY: the caller checked that all these rows and lines are there.
    unsafe {
        let mut sums = [[V::splat(V::Element::ZERO); N]; BLOCK_ROWS];
        let row = |item: usize| -> [V; N] {
            let row = c.rows.as_ptr().add(item * length + column);
            std::array::from_fn(|n| V::load(row.add(n * V::LANES)))
        };
        if c.before {
            let place = before.as_mut_ptr().add(column);
            let mut sum: [V; N] = std::array::from_fn(|n| V::load(place.add(n * V::LANES)));
            for r in 0..BLOCK_ROWS {
                sums[r] = sum;
                let (weight, row) = (V::splat(*c.items.get_unchecked(output + r)), row(output + r));
                for n in 0..N {
                    sum[n] = weight.mul_add(row[n], sum[n]);
                }
            }
            for n in 0..N {
                sum[n].store(place.add(n * V::LANES));
            }
        }
        if c.after.is_some() {
            let place = after.as_ptr().add((block + 1) * length + column);
            let mut sum: [V; N] = std::array::from_fn(|n| V::load(place.add(n * V::LANES)));
            for r in (0..BLOCK_ROWS).rev() {
                let at = output + r + c.taps - 1;
                let (weight, row) = (V::splat(*c.items.get_unchecked(at)), row(at));
                for n in 0..N {
                    sums[r][n] = sums[r][n].add(sum[n]);
                    sum[n] = weight.mul_add(row[n], sum[n]);
                }
            }
        }
        // Output `r` of the block meets row `j` by tap `j − r`. Which outputs is told by constants, so that sums stay in registers.
        let weights = c.weights.as_ptr().wrapping_add(output);
        macro_rules! meet {
            ($j:expr, |$r:ident| $meets:expr) => {
                let (j, row) = ($j, row(output + $j));
                for $r in 0..BLOCK_ROWS {
                    if $meets {
                        let weight = V::splat(*weights.add((j - $r) * c.lanes + $r));
                        for n in 0..N {
                            sums[$r][n] = weight.mul_add(row[n], sums[$r][n]);
                        }
                    }
                }
            };
        }
        macro_rules! first {
            ($($j:literal)*) => { $( meet!($j, |r| r <= $j && $j < c.taps + r); )* };
        }
        macro_rules! last {
            ($($j:literal)*) => { $( if c.taps + $j >= MARGIN { meet!(c.taps + $j, |r| r > $j); } )* };
        }
        const { assert!(MARGIN == 3, "the lists below") };
        first!(0 1 2);
        for stride in 0..c.taps.saturating_sub(MARGIN).div_ceil(STRIDE) {
            fetching.next::<V>();
            for j in MARGIN + stride * STRIDE..(MARGIN + (stride + 1) * STRIDE).min(c.taps) {
                meet!(j, |_r| true);
            }
        }
        last!(0 1 2);
        let to = to.as_mut_ptr().add(output * length + column);
        for r in 0..BLOCK_ROWS {
            for n in 0..N {
                sums[r][n].store(to.add(r * length + n * V::LANES));
            }
        }
    }
}

/// `to_j = weights[j]·row_j`.
pub(crate) struct ScaleRows<'a, T> {
    pub weights: &'a [T],
    pub rows: &'a [T],
    pub width: usize,
    pub to: &'a mut [T],
}

impl<T: Real> Operation for ScaleRows<'_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { weights, rows, width, to } = self;
        assert!(width.is_multiple_of(V::LANES) && rows.len().min(to.len()) >= weights.len() * width);
        for (j, &weight) in weights.iter().enumerate() {
            for at in (j * width..(j + 1) * width).step_by(V::LANES) {
                // SAFETY: both blocks have a register there by the assertion above.
                unsafe { V::splat(weight).mul(V::load(rows.as_ptr().add(at))).store(to.as_mut_ptr().add(at)) };
            }
        }
    }
}

/// Gradients of the taps of a chunk whose weights are all relative to one exponent.
#[derive(Clone, Copy)]
pub(crate) struct TapGradients<'a, T> {
    /// Rows of outputs, one after the other, and what is subtracted from their products; 0 beyond the last output.
    pub outputs: &'a [T],
    pub c: &'a [T],
    pub count: usize,
    /// Weights of items, and their rows times these.
    pub items: &'a [T],
    pub rows: &'a [T],
    pub width: usize,
    pub kernel: &'a [T],
}

/// `to[p] += kernel[p]·Σ_n (output_n·row_{n+p} − items[n+p]·c_n)`.
pub(crate) struct AddTapGradients<'a, T> {
    pub g: &'a TapGradients<'a, T>,
    pub to: &'a mut [T],
    pub ahead: &'a [Ahead<T>],
}

impl<T: Real> Operation for AddTapGradients<'_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { g, to, ahead } = self;
        /// Taps at once: each has one sum, and so many of them hide the latency of the fused products.
        const TAPS: usize = 12;
        let (taps, lanes) = (g.kernel.len(), g.c.len());
        assert!(g.width.is_multiple_of(V::LANES) && lanes.is_multiple_of(V::LANES) && to.len() >= taps);
        assert!(g.outputs.len() >= g.count * g.width && g.count <= lanes && g.items.len() + 1 >= lanes + taps);
        assert!(g.rows.len() >= (g.count + taps).saturating_sub(1) * g.width);
        let groups = taps.div_ceil(TAPS);
        let mut fetching = Fetching::new(ahead, groups * g.count);
        for group in 0..groups {
            let (first, last) = (group * taps / groups, (group + 1) * taps / groups);
            let mut dots = [V::Element::ZERO; TAPS];
            // SAFETY: outputs and rows are as many as the assertions say.
            unsafe {
                macro_rules! some {
                    ($($n:literal)*) => {
                        match last - first {
                            $($n => tap_products::<V, $n>(g, first, &mut dots, &mut fetching),)*
                            _ => tap_products::<V, TAPS>(g, first, &mut dots, &mut fetching),
                        }
                    };
                }
                some!(1 2 3 4 5 6 7 8 9 10 11);
            }
            for (p, dot) in (first..last).zip(dots) {
                // SAFETY: as many lanes stand in `c`, and in the items for every tap further on, by the assertions above.
                let less = unsafe {
                    let mut less = V::splat(V::Element::ZERO);
                    for lane in (0..lanes).step_by(V::LANES) {
                        let c = V::load(g.c.as_ptr().add(lane));
                        less = c.mul_add(V::load(g.items.as_ptr().add(lane + p)), less);
                    }
                    less.sum()
                };
                to[p] += g.kernel[p] * (dot - less);
            }
        }
    }
}

/// `Σ_n output_n·row_{n+p}` of `P` taps.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn tap_products<V: Vector, const P: usize>(
    g: &TapGradients<'_, V::Element>,
    first: usize,
    dots: &mut [V::Element],
    fetching: &mut Fetching<'_, V::Element>,
) {
    // SAFETY: the caller checked that all these rows are there.
    unsafe {
        let mut sums = [V::splat(V::Element::ZERO); P];
        for n in 0..g.count {
            fetching.next::<V>();
            let output = g.outputs.as_ptr().add(n * g.width);
            let row = g.rows.as_ptr().add((n + first) * g.width);
            for column in (0..g.width).step_by(V::LANES) {
                let own = V::load(output.add(column));
                for p in 0..P {
                    sums[p] = own.mul_add(V::load(row.add(p * g.width + column)), sums[p]);
                }
            }
        }
        for (to, sum) in dots.iter_mut().zip(sums) {
            *to = sum.sum();
        }
    }
}

/// Gradients of keys and values whose keys are one number: `dv = factor·sum`, `dk = factor·(sum·v − d)`.
pub(crate) struct KeyGradients<'a, 'b, T> {
    pub sums: &'a [T],
    pub width: usize,
    pub factors: &'a [T],
    pub d: &'a [T],
    pub values: Rows<'a, T>,
    pub to: &'a mut TokenGradients<'b, T>,
}

impl<T: Real> Operation for KeyGradients<'_, '_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { sums, width, factors, d, values, to } = self;
        let (count, head_dim) = (factors.len(), to.dv.width());
        assert!(width.is_multiple_of(V::LANES) && head_dim <= width && sums.len() >= count * width && d.len() >= count);
        assert!(to.dv.rows() >= count && to.dk.rows() >= count && to.dk.width() > 0);
        for (n, &factor) in factors.iter().enumerate() {
            let (value, add) = (values.row(n, head_dim), to.add);
            let dv = to.dv.row(n);
            // SAFETY: the sums have a register at every column by the assertions above.
            let dot = unsafe {
                let mut dot = V::splat(V::Element::ZERO);
                for column in (0..head_dim).step_by(V::LANES) {
                    let own = V::load(sums.as_ptr().add(n * width + column));
                    dot = own.mul_add(load_part::<V>(value, column), dot);
                    let mut own = own.mul(V::splat(factor));
                    if add {
                        own = own.add(load_part::<V>(dv, column));
                    }
                    store_part(own, dv, column);
                }
                dot.sum()
            };
            let dk = &mut to.dk.row(n)[0];
            let own = factor * (dot - d[n]);
            *dk = if add { *dk + own } else { own };
        }
    }
}

/// Every number's exponential, for numbers that are not positive.
pub(crate) struct ExpAll<'a, T> {
    pub block: &'a mut [T],
}

impl<T: Real> Operation for ExpAll<'_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { block } = self;
        assert!(block.len().is_multiple_of(V::LANES));
        for lane in (0..block.len()).step_by(V::LANES) {
            // SAFETY: the block is a whole number of registers.
            unsafe {
                let at = block.as_mut_ptr().add(lane);
                exp_nonpositive(V::load(at)).store(at);
            }
        }
    }
}

/// Calls `$body::<V, WHOLE>(column, left)` for all columns of a row.
macro_rules! by_columns {
    ($width:expr, $body:ident($($argument:expr),*), $each:expr) => {{
        let (mut column, width) = (0, $width);
        while column + V::LANES <= width {
            $each($body::<V, true>($($argument,)* column, V::LANES));
            column += V::LANES;
        }
        if column < width {
            $each($body::<V, false>($($argument,)* column, width - column));
        }
    }};
}

/// `out = σ(q) ⊙ factor·sum` for rows of sums one after the other; no `queries` are no gate.
pub(crate) struct GatedRows<'a, 'b, T> {
    pub sums: &'a [T],
    pub factors: &'a [T],
    pub queries: Option<Rows<'a, T>>,
    pub to: &'a mut Columns<'b, T>,
}

impl<T: Real> Operation for GatedRows<'_, '_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { sums, factors, queries, to } = self;
        let (count, head_dim) = (factors.len(), to.width());
        let width = sums.len() / count.max(1);
        assert!(width.is_multiple_of(V::LANES) && head_dim <= width && to.rows() >= count);
        assert!(queries.is_none_or(|queries| covers(&queries, count, head_dim)));
        for (row, (sum, &factor)) in sums.chunks_exact(width.max(1)).zip(factors).enumerate() {
            // SAFETY: sums, queries and outputs have such rows by the assertions above.
            unsafe {
                let factor = V::splat(factor);
                let q = queries.map(|queries| queries.data.as_ptr().add(row * queries.stride));
                by_columns!(head_dim, gated_register(sum, factor, q, to.at(row, 0)), |()| ());
            }
        }
    }
}

#[inline(always)]
unsafe fn gated_register<V: Vector, const WHOLE: bool>(
    sum: &[V::Element],
    factor: V,
    q: Option<*const V::Element>,
    to: *mut V::Element,
    column: usize,
    left: usize,
) {
    // SAFETY: the caller's rows have so many numbers from `column` on, and the sum a register.
    unsafe {
        let mut value = V::load(sum.as_ptr().add(column)).mul(factor);
        if let Some(q) = q {
            value = value.mul(sigmoid(get::<V, WHOLE>(q.add(column), left)).0);
        }
        put::<V, WHOLE>(value, to.add(column), left);
    }
}

/// Rows of the backward: `dq`; into `items` `factor·G ⊙ σ(q)`, one after the other; and into `sums` `factor·G·Y`. A row whose factor is 0
/// sees nothing, and all of this is 0.
pub(crate) struct GatedCotangents<'a, 'b, T> {
    pub rows: OutputRows<'a, T>,
    pub factors: &'a [T],
    pub dq: &'a mut Columns<'b, T>,
    pub items: &'a mut [T],
    pub sums: &'a mut [T],
}

impl<T: Real> Operation for GatedCotangents<'_, '_, T> {
    type Element = T;
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) {
        let Self { rows, factors, dq, items, sums } = self;
        let (count, head_dim) = (factors.len(), dq.width());
        let width = items.len() / count.max(1);
        assert!(width.is_multiple_of(V::LANES) && head_dim <= width && sums.len() >= count);
        assert!(rows.count == count && dq.rows() >= count && rows.q.is_none_or(|q| covers(&q, count, head_dim)));
        assert!(covers(&rows.d_out, count, head_dim) && covers(&rows.out, count, head_dim));
        for (row, (item, &factor)) in items.chunks_exact_mut(width.max(1)).zip(factors).enumerate() {
            if factor == V::Element::ZERO {
                dq.row(row).fill(V::Element::ZERO);
                item.fill(V::Element::ZERO);
                sums[row] = V::Element::ZERO;
                continue;
            }
            item[head_dim..].fill(V::Element::ZERO);
            // SAFETY: items, rows and gradients have such rows by the assertions above.
            unsafe {
                let start = |rows: &Rows<'_, V::Element>| rows.data.as_ptr().add(row * rows.stride);
                let from = (rows.q.as_ref().map(start), start(&rows.d_out), start(&rows.out));
                let factor = V::splat(factor);
                let mut sum = V::splat(V::Element::ZERO);
                let mut add = |product: V| sum = sum.add(product);
                by_columns!(head_dim, cotangent_register(from, factor, dq.at(row, 0), item.as_mut_ptr()), add);
                sums[row] = sum.mul(factor).sum();
            }
        }
    }
}

#[inline(always)]
unsafe fn cotangent_register<V: Vector, const WHOLE: bool>(
    (q, d_out, out): (Option<*const V::Element>, *const V::Element, *const V::Element),
    factor: V,
    dq: *mut V::Element,
    item: *mut V::Element,
    column: usize,
    left: usize,
) -> V {
    // SAFETY: the caller's rows have so many numbers from `column` on, and the item a register.
    unsafe {
        let mut g = get::<V, WHOLE>(d_out.add(column), left);
        let product = g.mul(get::<V, WHOLE>(out.add(column), left));
        let mut slope = V::splat(V::Element::ZERO);
        if let Some(q) = q {
            let (gate, rest) = sigmoid(get::<V, WHOLE>(q.add(column), left));
            g = g.mul(gate);
            slope = product.mul(rest);
        }
        put::<V, WHOLE>(slope, dq.add(column), left);
        g.mul(factor).store(item.add(column));
        product
    }
}

/// `dv += factor·sum`; returns `sum·v`.
pub(crate) struct AddRowDot<'a, T> {
    pub sum: &'a [T],
    pub factor: T,
    pub v: &'a [T],
    pub dv: &'a mut [T],
}

impl<T: Real> Operation for AddRowDot<'_, T> {
    type Element = T;
    type Output = T;

    #[inline(always)]
    unsafe fn run<V: Vector<Element = T>>(self) -> T {
        let Self { sum, factor, v, dv } = self;
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
}
