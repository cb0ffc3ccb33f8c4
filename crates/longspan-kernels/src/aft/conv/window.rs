//! Sums of rows over windows, where a row has one weight for all of its channels: `Σ_p weight_p(n)·row_{n+p}` for every
//! output `n`, and sums that a row enters with every output.
//!
//! A line of weights belongs to one tap `p` and has a lane for each output, so that exponents are formed in whole
//! registers of outputs whatever the number of taps.

use crate::simd::block::floor;
use crate::simd::operation;
use crate::simd::product::by_whole_registers;

/// Items on a line: their exponents, in two parts as for [`join`](crate::aft::log_sum::join), and their weights.
#[derive(Clone, Copy)]
pub(super) struct Line<'a, T> {
    pub x: &'a [T],
    pub b: &'a [T],
    pub d: &'a [T],
}

// Raises the largest exponent of each output, in two parts, by the items of its window, item `n + p` with a bias of `taps[p]`.
operation!(WindowMax, |line: Line<'a, T>, taps: &'a [T], x: &'a mut [T], b: &'a mut [T]| {
    let lanes = x.len();
    assert!(lanes.is_multiple_of(V::LANES) && b.len() == lanes);
    assert!(line.x.len().min(line.b.len()) >= lanes + taps.len());
    for lane in (0..lanes).step_by(V::LANES) {
        // SAFETY: every line has a register at `lane`, and for every tap one further on, by the assertions above.
        unsafe {
            let (to_x, to_b) = (x.as_mut_ptr().add(lane), b.as_mut_ptr().add(lane));
            let (mut x, mut b) = (V::load(to_x), V::load(to_b));
            for (p, &tap) in taps.iter().enumerate() {
                let own_x = V::load(line.x.as_ptr().add(lane + p));
                let own_b = V::load(line.b.as_ptr().add(lane + p)).add(V::splat(tap));
                let rise = own_x.sub(x).add(own_b.sub(b));
                (x, b) = (rise.if_positive(own_x, x), rise.if_positive(own_b, b));
            }
            x.store(to_x);
            b.store(to_b);
        }
    }
});

// Writes a line of weights `e^{x+b+tap−X−B}` for each tap, with the outputs' exponents `(X, B)`, and adds up `Σ weight·d`.
operation!(WindowWeights, |line: Line<'a, T>,
                           taps: &'a [T],
                           max: [&'a [T]; 2],
                           weights: &'a mut [T],
                           sums: &'a mut [T]| {
    let [x, b] = max;
    let lanes = x.len();
    assert!(lanes.is_multiple_of(V::LANES) && b.len() == lanes && sums.len() == lanes);
    assert!(line.x.len().min(line.b.len()).min(line.d.len()) >= lanes + taps.len());
    assert!(weights.len() >= taps.len() * lanes);
    for lane in (0..lanes).step_by(V::LANES) {
        // SAFETY: as for the largest exponents.
        unsafe {
            let (x, b) = (V::load(x.as_ptr().add(lane)), V::load(b.as_ptr().add(lane)));
            let mut sum = V::load(sums.as_ptr().add(lane));
            for (p, &tap) in taps.iter().enumerate() {
                let own_x = V::load(line.x.as_ptr().add(lane + p));
                let own_b = V::load(line.b.as_ptr().add(lane + p)).add(V::splat(tap));
                let weight = own_x.sub(x).add(own_b.sub(b)).exp_nonpositive();
                weight.store(weights.as_mut_ptr().add(p * lanes + lane));
                sum = weight.mul_add(V::load(line.d.as_ptr().add(lane + p)), sum);
            }
            sum.store(sums.as_mut_ptr().add(lane));
        }
    }
});

// Takes rows into `sum` in order, or from the last to the first: `keep[n]` of it stays and `enter[n]` of row `n` is added. Output `n` gets
// `share[n]` of the sum before that added, for as many outputs as there are shares.
operation!(RunRows, |sum: &'a mut [T],
                     keep: &'a [T],
                     enter: &'a [T],
                     rows: &'a [T],
                     share: &'a [T],
                     backwards: bool,
                     to: &'a mut [T]| {
    let (width, count) = (sum.len(), keep.len());
    assert!(width.is_multiple_of(V::LANES) && enter.len() == count && rows.len() >= count * width);
    assert!((share.is_empty() || share.len() == count) && to.len() >= share.len() * width);
    // SAFETY: rows are whole registers, and as many as the assertions say.
    unsafe {
        by_whole_registers!(0, width, 4, N, |column| {
            let at = sum.as_mut_ptr().add(column);
            let mut sums = [V::splat(T::ZERO); N];
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
                let (keep, enter) = (V::splat(keep[index]), V::splat(enter[index]));
                let row = rows.as_ptr().add(index * width + column);
                for n in 0..N {
                    sums[n] = sums[n].mul_add(keep, enter.mul(V::load(row.add(n * V::LANES))));
                }
            }
            for n in 0..N {
                sums[n].store(at.add(n * V::LANES));
            }
        })
    };
});

// `d_taps[p] += Σ_n weights_p(n)·(output_n·row_{n+p} − c_n)`. Outputs and rows stand turned round, a line of `lanes` or
// `items` numbers for each channel.
operation!(WindowDots, |weights: &'a [T],
                        outputs: &'a [T],
                        rows: &'a [T],
                        items: usize,
                        width: usize,
                        c: &'a [T],
                        d_taps: &'a mut [T]| {
    /// Taps at once: with four registers of outputs sixteen sums.
    const TAPS: usize = 4;
    let (lanes, taps) = (c.len(), d_taps.len());
    assert!(lanes.is_multiple_of(4 * V::LANES) && weights.len() >= taps * lanes);
    assert!(outputs.len() >= width * lanes && items >= lanes + taps && rows.len() >= width * items);
    macro_rules! dots {
        ($first:expr, $lane:expr, $count:literal) => {{
            let mut dots = [[V::splat(T::ZERO); 4]; $count];
            for channel in 0..width {
                let output = outputs.as_ptr().add(channel * lanes + $lane);
                let row = rows.as_ptr().add(channel * items + $lane + $first);
                let output: [V; 4] = std::array::from_fn(|n| V::load(output.add(n * V::LANES)));
                for (p, dots) in dots.iter_mut().enumerate() {
                    for (n, dot) in dots.iter_mut().enumerate() {
                        *dot = output[n].mul_add(V::load(row.add(p + n * V::LANES)), *dot);
                    }
                }
            }
            for (p, dots) in dots.iter().enumerate() {
                let mut sum = V::splat(T::ZERO);
                for (n, dot) in dots.iter().enumerate() {
                    let at = $lane + n * V::LANES;
                    let weight = V::load(weights.as_ptr().add(($first + p) * lanes + at));
                    sum = weight.mul_add(dot.sub(V::load(c.as_ptr().add(at))), sum);
                }
                d_taps[$first + p] += sum.sum();
            }
        }};
    }
    for first in (0..taps).step_by(TAPS) {
        for lane in (0..lanes).step_by(4 * V::LANES) {
            // SAFETY: every line has four registers at `lane`, and one tap further on, by the assertions above.
            unsafe {
                match taps - first {
                    1 => dots!(first, lane, 1),
                    2 => dots!(first, lane, 2),
                    3 => dots!(first, lane, 3),
                    _ => dots!(first, lane, 4),
                }
            }
        }
    }
});

/// What the exponents of a range of items may be relative to.
#[derive(Debug, Clone, Copy)]
pub struct ReachMax<T> {
    /// The largest exponent, in two parts; the floor if there is nothing.
    pub x: T,
    pub b: T,
    /// How far below it the least is, among those above the floor.
    pub depth: T,
    /// How many are above the floor.
    pub count: usize,
}

// The largest exponent of a line.
operation!(FindReachMax, |line: Line<'a, T>| -> ReachMax<T> {
    let len = line.x.len();
    assert!(len.is_multiple_of(V::LANES) && line.b.len() >= len);
    // SAFETY: both lines are whole registers by the assertion above; the lanes have room for one.
    unsafe {
        let (zero, one, bottom) = (V::splat(T::ZERO), V::splat(T::ONE), V::splat(floor()));
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
        let none = V::splat(T::NEG_INFINITY);
        let max_x = less.if_positive(none, x).largest();
        let less = V::splat(max_x).sub(x).if_positive(one, less);
        let max = (max_x, less.if_positive(none, b).largest());
        let mut depth = zero;
        for lane in (0..len).step_by(V::LANES) {
            let (own_x, own_b) = at(lane);
            let own = V::splat(max.0).sub(own_x).add(V::splat(max.1).sub(own_b));
            depth = own_x.sub(bottom).if_positive(own, zero).max(depth);
        }
        ReachMax { x: max.0, b: max.1, depth: depth.largest(), count: count.sum().to_f64() as usize }
    }
});

// Writes the weight `e^{x+b−max}` of each item, and its product with `d`.
operation!(ReachWeights, |line: Line<'a, T>, max: &'a ReachMax<T>, weights: &'a mut [T], products: &'a mut [T]| {
    let len = line.x.len();
    assert!(len.is_multiple_of(V::LANES) && line.b.len().min(line.d.len()) >= len);
    assert!(weights.len().min(products.len()) >= len);
    for lane in (0..len).step_by(V::LANES) {
        // SAFETY: every line has a register at `lane` by the assertions above.
        unsafe {
            let at = |line: &[T]| V::load(line.as_ptr().add(lane));
            let exponent = at(line.x).sub(V::splat(max.x)).add(at(line.b).sub(V::splat(max.b)));
            let weight = exponent.exp_nonpositive();
            weight.store(weights.as_mut_ptr().add(lane));
            weight.mul(at(line.d)).store(products.as_mut_ptr().add(lane));
        }
    }
});

// `to = Σ_j weights[j]·row_j`.
operation!(SumRows, |weights: &'a [T], rows: &'a [T], to: &'a mut [T]| {
    let width = to.len();
    assert!(width.is_multiple_of(V::LANES) && rows.len() >= weights.len() * width);
    // SAFETY: rows are whole registers, and as many as the assertion says.
    unsafe {
        by_whole_registers!(0, width, 4, N, |column| {
            // Two sums for each register.
            let mut sums = [[V::splat(T::ZERO); N]; 2];
            let row = |j: usize| rows.as_ptr().add(j * width + column);
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
        })
    };
});
