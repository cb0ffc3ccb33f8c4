//! Sums over windows of items that have one exponent for all channels: as the walk of the other variants before, in and
//! after the window, but with exponents that are formed for a chunk of outputs at once, and one product of a band.

use super::band;
use super::convolution::{Convolution, Convolve};
use super::field::{Field, Piece, REACH, Running, Source, Work, header, split};
use super::geometry::beyond;
use super::window::{Line, RunRows, WindowDots, WindowMax, WindowWeights};
use crate::aft::chunks::CHUNK;
use crate::simd::block::{Exp, Transpose, add_scaled, all_finite, dot, floor};
use crate::simd::rows::Rows;
use crate::simd::{Real, dispatch};

/// Records what every output reads of a sum that starts as `edge`, and what turns it into the next one's. Output `n` is
/// followed by item `first + n`, or by that before it if `backwards`.
fn run<T: Real>(items: Line<'_, T>, edge: &[T], first: usize, count: usize, backwards: bool, to: &mut Running<'_, T>) {
    let (mut x, mut b, mut d) = (edge[0], edge[1], edge[2]);
    let order = |n: usize| if backwards { count - 1 - n } else { n };
    for n in (0..count).map(order) {
        (to.x[n], to.b[n]) = (x, b);
        let (own_x, own_b) = (items.x[first + n], items.b[first + n]);
        let rise = (own_x - x) + (own_b - b);
        (to.keep[n], to.enter[n]) = if rise > T::ZERO { (-rise, T::ZERO) } else { (T::ZERO, rise) };
        if rise > T::ZERO {
            (x, b) = (own_x, own_b);
        }
    }
    let whole = count.next_multiple_of(header::<T>());
    dispatch(Exp { to: &mut to.keep[..whole] });
    dispatch(Exp { to: &mut to.enter[..whole] });
    for n in (0..count).map(order) {
        to.d[n] = d;
        d = d * to.keep[n] + to.enter[n] * items.d[first + n];
    }
}

/// Forms exponents and weights of the outputs of a chunk, and their sums of rows, in `work`. Returns whether all weights are
/// relative to one exponent.
pub(super) fn walk<T: Real>(
    source: &impl Source<T>,
    field: &Field<'_, T>,
    chunk: usize,
    [before, after]: [&[T]; 2],
    work: &mut Work<'_, T>,
) -> bool {
    let window = &field.window;
    let width = before.len() - header::<T>();
    let (from, to) = window.chunk(chunk);
    let count = to - from;
    let base = from as isize + window.shift - window.back;
    let (pieces, single) = (field.pieces(), field.lines == 1);
    let last = (pieces - 1) * CHUNK;
    // The sum that comes after begins with whole blocks; from there to the last window items enter one by one.
    let end = if window.after { CHUNK * (1 + beyond(window)) - (field.taps - 1) } else { count };
    let behind = field.taps - last - 1;
    let behind_all = end.max(count) + behind;
    // The items that a piece of a line reaches.
    let span = |piece: &Piece| {
        let last = single && window.after && piece.number + 1 == pieces;
        (piece.first, if last { behind_all } else { count + piece.taps.len() - 1 })
    };
    for (piece, items) in field.kernel_pieces(base).zip(work.items.chunks_exact_mut(3 * REACH)) {
        field.exponents(source, piece.line, span(&piece), items);
    }
    if single && pieces == 1 {
        let sides = [window.before.then_some(before), window.after.then_some(after)];
        let span = (base, if window.after { behind_all } else { count + field.taps - 1 });
        if band::walk(source, field, span, width, (count, end.max(count), sides), work) {
            return true;
        }
    }
    work.x.fill(floor());
    work.b.fill(T::ZERO);
    work.d.fill(T::ZERO);
    for (piece, items) in field.kernel_pieces(base).zip(work.items.chunks_exact(3 * REACH)) {
        dispatch(WindowMax { line: split(items), taps: &field.kernel[piece.taps], x: work.x, b: work.b });
    }

    // What comes before windows, and what after.
    let [early, late] = &mut work.running;
    let columns = [(base, count), (base + last as isize, behind_all)];
    if !single {
        for (span, columns) in columns.into_iter().zip(&mut work.columns) {
            field.column_exponents(source, span, work.spare, columns);
        }
    }
    let entering: [&[T]; 2] =
        if single { [work.items, &work.items[(pieces - 1) * 3 * REACH..]] } else { [work.columns[0], work.columns[1]] };
    if window.before {
        run(split(entering[0]), before, 0, count, false, early);
    }
    if window.after {
        run(split(entering[1]), after, behind, end.max(count), true, late);
    }
    let sides = [window.before, window.after];
    for side in [&*early, &*late].into_iter().zip(sides).filter_map(|(side, counts)| counts.then_some(side)) {
        for n in 0..count {
            if (side.x[n] - work.x[n]) + (side.b[n] - work.b[n]) > T::ZERO {
                (work.x[n], work.b[n]) = (side.x[n], side.b[n]);
            }
        }
    }
    for side in [&mut *early, &mut *late].into_iter().zip(sides).filter_map(|(side, counts)| counts.then_some(side)) {
        for n in 0..CHUNK {
            side.share[n] = if n < count { (side.x[n] - work.x[n]) + (side.b[n] - work.b[n]) } else { T::NEG_INFINITY };
        }
        dispatch(Exp { to: &mut side.share[..CHUNK] });
        for n in 0..count {
            work.d[n] += side.share[n] * side.d[n];
        }
    }

    work.sums[..CHUNK * width].fill(T::ZERO);
    let enter = |side: &mut Running<'_, T>, edge: &[T], rows: &[T], outputs: usize, backwards: bool, sums: &mut [T]| {
        let sum = &mut side.sum[..width];
        sum.copy_from_slice(&edge[header::<T>()..]);
        if outputs > count {
            let (keep, enter) = (&side.keep[count..outputs], &side.enter[count..outputs]);
            dispatch(RunRows { sum, keep, enter, rows: &rows[count * width..], share: &[], backwards, to: &mut [] });
        }
        let [keep, enter, share] = [&*side.keep, &*side.enter, &*side.share].map(|all| &all[..count]);
        dispatch(RunRows { sum, keep, enter, rows, share, backwards, to: sums });
    };
    if !single && width > 0 {
        for (side, span) in columns.into_iter().enumerate() {
            let spare = (&mut *work.spare, &mut *work.rows);
            field.column_rows(source, span, work.columns[side], spare, width, work.column_rows);
            if side == 0 {
                enter(early, before, work.column_rows, count, false, work.sums);
            } else {
                enter(late, after, &work.column_rows[behind * width..], end.max(count), true, work.sums);
            }
        }
    }
    for (piece, items) in field.kernel_pieces(base).zip(work.items.chunks_exact(3 * REACH)) {
        let taps = &field.kernel[piece.taps.clone()];
        let weights = &mut work.weights[..taps.len() * CHUNK];
        dispatch(WindowWeights { line: split(items), taps, max: [work.x, work.b], weights, sums: work.d });
        if width == 0 {
            continue;
        }
        let rows = field.rows(source, piece.line, span(&piece), width, count == CHUNK, work.rows);
        if single && piece.number == 0 && window.before {
            enter(early, before, rows, count, false, work.sums);
        }
        if single && piece.number + 1 == pieces && window.after {
            enter(late, after, &rows[behind * width..], end.max(count), true, work.sums);
        }
        if all_finite(Rows { data: rows, stride: width }, count + taps.len() - 1, width) {
            let convolution = Convolution {
                weights,
                taps: taps.len(),
                items: &[],
                rows,
                row_length: width,
                outputs: count,
                after: None,
                add: true,
            };
            dispatch(Convolve { c: &convolution, before: &mut [], after: &mut [], to: work.sums });
            continue;
        }
        // 0 times what an output does not see would be no number.
        for n in 0..count {
            for p in (0..taps.len()).filter(|p| items[n + p] > T::NEG_INFINITY) {
                let weight = weights[p * CHUNK + n];
                add_scaled(&mut work.sums[n * width..][..width], weight, &rows[(n + p) * width..][..width]);
            }
        }
    }
    false
}

/// Adds the gradient of the taps, `Σ_n p_n·(row_n·item_{n+p} − c_n)`, for the chunk that `work` has just walked without rows:
/// its sums hold the outputs' rows instead, and `c` their `c`; both are 0 beyond the last output.
#[allow(clippy::too_many_arguments)]
pub(super) fn add_tap_gradients<T: Real>(
    source: &impl Source<T>,
    field: &Field<'_, T>,
    chunk: usize,
    width: usize,
    c: &[T],
    work: &mut Work<'_, T>,
    d_taps: &mut [T],
) {
    let window = &field.window;
    let (from, to) = window.chunk(chunk);
    let count = to - from;
    let base = from as isize + window.shift - window.back;
    let [turned_rows, turned_own] = &mut work.turned;
    let turn = |from: &[T], rows: usize, to: &mut [T]| {
        dispatch(Transpose { from, from_row: width, rows, columns: width, to, to_row: rows });
    };
    turn(work.sums, CHUNK, turned_own);
    for (piece, items) in field.kernel_pieces(base).zip(work.items.chunks_exact(3 * REACH)) {
        let taps = &field.kernel[piece.taps.clone()];
        // The sums of weights are known.
        let unused = &mut work.running[0].share[..CHUNK];
        unused.fill(T::ZERO);
        let weights = &mut *work.weights;
        dispatch(WindowWeights { line: split(items), taps, max: [work.x, work.b], weights, sums: unused });
        for weights in work.weights.chunks_exact_mut(CHUNK).take(taps.len()) {
            weights[count..].fill(T::ZERO);
        }
        let reach = count + taps.len() - 1;
        let rows = field.rows(source, piece.line, (piece.first, reach), width, count == CHUNK, work.rows);
        let to = &mut d_taps[piece.taps];
        if all_finite(Rows { data: rows, stride: width }, reach, width) {
            turn(rows, REACH, turned_rows);
            let (weights, outputs, rows) = (&*work.weights, &**turned_own, &**turned_rows);
            dispatch(WindowDots { weights, outputs, rows, items: REACH, width, c, d_taps: to });
            continue;
        }
        // 0 times what an output does not see would be no number.
        for n in 0..count {
            for (p, to) in to.iter_mut().enumerate().filter(|(p, _)| items[n + p] > T::NEG_INFINITY) {
                let own = &work.sums[n * width..][..width];
                let dot = dot(own, &rows[(n + p) * width..][..width]);
                *to += work.weights[p * CHUNK + n] * (dot - c[n]);
            }
        }
    }
}
