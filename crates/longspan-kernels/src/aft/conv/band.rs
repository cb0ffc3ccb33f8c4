//! Chunks whose weights are all relative to one exponent: the weight of a pair is then that of its item times that of its tap, so
//! that a chunk takes one exponential for each item and tap, sums outside of windows are plain, and no maximum runs along.
//! [`common_max`] says where that keeps every sum; other chunks are walked with an exponent for each output.

use super::convolution::{AddTapGradients, BandWeights, Convolution, Convolve, TapGradients};
use super::field::{Field, REACH, Source, Work, header, present, split};
use super::window::{FindReachMax, ReachMax, ReachWeights};
use crate::aft::chunks::CHUNK;
use crate::aft::tokens::DEEPEST;
use crate::simd::block::{Exp, scale_by};
use crate::simd::{Real, dispatch};

/// What comes before the windows of a chunk and what after, if they count.
type Sides<'a, T> = [Option<&'a [T]>; 2];

/// The least and the largest of the taps and of what stands outside of windows, 0.
fn range<T: Real>(kernel: &[T]) -> (T, T) {
    kernel.iter().fold((T::ZERO, T::ZERO), |(least, most), &tap| {
        (if tap < least { tap } else { least }, if tap > most { tap } else { most })
    })
}

/// The exponent that all items of a chunk of one line and one piece may be relative to: no output's largest exponent may be more
/// than [`DEEPEST`] below it, taps included. All of the items `low..high` must be there.
fn common_max<T: Real>(
    kernel: &[T],
    count: usize,
    (low, high): (usize, usize),
    sides: Sides<'_, T>,
    items: &[T],
) -> Option<ReachMax<T>> {
    let deepest = T::from_f64(DEEPEST);
    let (least, most) = range(kernel);
    let mut max = dispatch(FindReachMax { line: split(items) });
    // What stands beside an exponent of −∞ counts for nothing and must not be multiplied; a largest one of ∞ has no differences.
    let all = low < high && max.count == high - low && (max.x + max.b).is_finite();
    let fits = |depth: T| depth + (most - least) <= deepest;
    if !all || !fits(T::ZERO) {
        return None;
    }
    for side in sides.into_iter().flatten() {
        let rise = (side[0] - max.x) + (side[1] - max.b);
        if rise > T::ZERO {
            (max.x, max.b, max.depth) = (side[0], side[1], max.depth + rise);
        }
    }
    // Every window holds an item.
    if low < kernel.len() && count <= high && fits(max.depth) {
        return Some(max);
    }
    // The output that sees least, if not all of them see everything.
    let (side, first) = match sides {
        [Some(_), Some(_)] => return Some(max),
        [Some(before), None] => (before, 0),
        [None, Some(after)] => (after, count - 1),
        [None, None] => return None,
    };
    let mut depth = (max.x - side[0]) + (max.b - side[1]);
    for n in (first..first + kernel.len()).filter(|n| (low..high).contains(n)) {
        let own = (max.x - items[n]) + (max.b - items[REACH + n]);
        if own < depth {
            depth = own;
        }
    }
    fits(depth).then_some(max)
}

/// Forms exponents and weights of `count` outputs, and the sums of the rows of a span of items, if all can have one exponent; returns
/// whether they do. So many items behind the first output's window, up to `end`, enter what comes after one by one.
pub(super) fn walk<T: Real>(
    source: &impl Source<T>,
    field: &Field<'_, T>,
    span: (isize, usize),
    width: usize,
    (count, end, sides): (usize, usize, Sides<'_, T>),
    work: &mut Work<'_, T>,
) -> bool {
    let kernel = &field.kernel[..field.taps];
    let Some(max) = common_max(kernel, count, present(&field.window, span), sides, work.items) else { return false };
    let Work { items, rows: memory, weights, running, x, b, d, sums, turned, .. } = work;
    let [early, late] = running;
    let (taps, behind) = (kernel.len(), kernel.len() - 1);
    let (_, most) = range(kernel);
    let factors = &mut late.share[..taps.next_multiple_of(header::<T>())];
    factors[taps..].fill(T::ZERO);
    factors.iter_mut().zip(kernel).for_each(|(to, &tap)| *to = tap - most);
    dispatch(Exp { to: factors });
    let outside = (-most).exp();
    let (item_weights, products) = (&mut *early.keep, &mut *early.enter);
    dispatch(ReachWeights { line: split(items), max: &max, weights: item_weights, products });
    let share = |side: &[T]| outside * ((side[0] - max.x) + (side[1] - max.b)).exp();

    x.fill(max.x);
    b.fill(max.b + most);
    d.fill(T::ZERO);
    if let Some(before) = sides[0] {
        let mut sum = before[2] * share(before);
        for (d, &product) in d.iter_mut().zip(&*products) {
            *d = sum;
            sum += outside * product;
        }
    }
    if let Some(after) = sides[1] {
        let mut sum = after[2] * share(after);
        for &product in &products[behind + count..behind + end] {
            sum += outside * product;
        }
        for (d, &product) in d.iter_mut().zip(&products[behind..]).take(count).rev() {
            *d += sum;
            sum += outside * product;
        }
    }
    dispatch(BandWeights { kernel: &factors[..taps], items: item_weights, products, weights, sums: d });

    if width == 0 {
        return true;
    }
    let rows = field.rows(source, field.first_line, span, width, count == CHUNK, memory);
    let outside_weights = &mut *early.x;
    for (to, &weight) in outside_weights.iter_mut().zip(&*item_weights) {
        *to = outside * weight;
    }
    let after = &mut *turned[1];
    for (side, to) in sides.iter().zip([&mut early.sum[..width], &mut after[..width]]) {
        if let Some(side) = side {
            to.copy_from_slice(&side[header::<T>()..]);
            scale_by(to, share(side));
        }
    }
    let convolution = Convolution {
        weights,
        taps,
        items: outside_weights,
        rows,
        row_length: width,
        outputs: count,
        after: sides[1].map(|_| end),
        add: false,
    };
    let before = if sides[0].is_some() { &mut early.sum[..width] } else { &mut [] };
    dispatch(Convolve { c: &convolution, before, after, to: sums });
    true
}

/// Adds the gradients of the taps, `Σ_n p_n·(row_n·item_{n+p} − c_n)`, for the chunk that [`walk`] has just gone through without rows;
/// `c` is 0 beyond the last output.
#[allow(clippy::too_many_arguments)]
pub(super) fn add_tap_gradients<T: Real>(
    source: &impl Source<T>,
    field: &Field<'_, T>,
    base: isize,
    outputs: &[T],
    c: &[T],
    width: usize,
    work: &mut Work<'_, T>,
    d_taps: &mut [T],
) {
    let count = outputs.len() / width.max(1);
    let reach = count + field.taps - 1;
    let Work { rows: memory, running: [early, late], turned, .. } = work;
    let items = &*early.keep;
    let rows = field.rows(source, field.first_line, (base, reach), width, count == CHUNK, memory);
    let kernel = &late.share[..field.taps];
    let gradients = TapGradients { outputs, c, count, items, rows, width, kernel };
    dispatch(AddTapGradients { g: &gradients, scaled: turned[0], to: d_taps });
}
