//! Items that have one exponent for all channels, and their sums.
//!
//! Items stand on *lines*: a sequence is one line, an image has one for each of its rows. An output on line `y` has biases
//! for items of the lines in `view(y)`, and on each of these for those from `back` before to `ahead` after its own
//! place. What its window leaves out is, from left to right: all lines above; on the lines in view the items before the
//! window, a *column* of them entering with every output; those after it; all lines below.

use std::ops::Range;

use super::window::{FindReachMax, Line, ReachWeights, SumRows};
use crate::aft::chunks::{CHUNK, Window};
use crate::call::Arena;
use crate::simd::block::{Exp, add_scaled, dot, floor, scale_by};
use crate::simd::{Real, dispatch};

/// Items that the windows of a chunk reach with [`CHUNK`] taps, and more.
pub(super) const REACH: usize = 2 * CHUNK;

/// Numbers of a sum before its row: exponent in two parts, weight, and what fills a cache line.
pub(super) fn header<T>() -> usize {
    64 / size_of::<T>()
}

pub(super) trait Source<T> {
    /// Exponent in two parts and weight of the items from `from` on; −∞ where there is nothing.
    fn exponents(&self, line: usize, from: isize, x: &mut [T], b: &mut [T], d: &mut [T]);

    /// The rows of [`REACH`] items from `from` on, if they stand one after the other and the first `count` count.
    fn rows_in_place(&self, line: usize, from: isize, count: usize, width: usize) -> Option<&[T]>;

    /// The rows of `count` items from `from` on, `width` numbers each; 0 where there is nothing.
    fn rows(&self, line: usize, from: isize, count: usize, width: usize, to: &mut [T]);
}

/// What the outputs of one line see.
#[derive(Clone, Copy)]
pub(super) struct Field<'a, T> {
    /// On each line in view.
    pub window: Window,
    pub first_line: usize,
    pub lines: usize,
    /// A row of taps for each line in view.
    pub kernel: &'a [T],
    pub taps: usize,
}

/// Some taps of one line.
pub(super) struct Piece {
    pub line: usize,
    /// Which of its line it is.
    pub number: usize,
    /// The item of the first output's first tap.
    pub first: isize,
    /// The taps' places in the kernel.
    pub taps: Range<usize>,
}

pub(super) struct Work<'w, T> {
    /// Exponents of every piece of every line in view: three lines of [`REACH`] each.
    pub items: &'w mut [T],
    /// The same of the columns that enter before and after.
    pub columns: [&'w mut [T]; 2],
    pub spare: &'w mut [T],
    pub rows: &'w mut [T],
    pub column_rows: &'w mut [T],
    pub weights: &'w mut [T],
    pub running: [Running<'w, T>; 2],
    /// Exponents of every output in two parts, and its weight.
    pub x: &'w mut [T],
    pub b: &'w mut [T],
    pub d: &'w mut [T],
    /// Sums of rows, relative to the exponents.
    pub sums: &'w mut [T],
    /// Transposes of rows and sums.
    pub turned: [&'w mut [T]; 2],
}

/// What enters a running sum with every output, and how outputs read it.
pub(super) struct Running<'w, T> {
    pub x: &'w mut [T],
    pub b: &'w mut [T],
    pub d: &'w mut [T],
    pub keep: &'w mut [T],
    pub enter: &'w mut [T],
    pub share: &'w mut [T],
    pub sum: &'w mut [T],
}

impl<'w, T: Real> Work<'w, T> {
    /// For windows of so many taps on so many lines, and rows of `width`.
    pub fn new(memory: &'w mut [T], most: [usize; 2], width: usize) -> Self {
        Self::lay_out(&mut Arena::new(memory), most, width)
    }

    fn lay_out(arena: &mut Arena<'w, T>, [lines, taps]: [usize; 2], width: usize) -> Self {
        let mut running = || {
            let [x, b, d, keep, enter, share] = [(); 6].map(|()| arena.take(REACH));
            Running { x, b, d, keep, enter, share, sum: arena.take(width) }
        };
        let running = [running(), running()];
        let several = usize::from(lines > 1);
        Self {
            items: arena.take(lines * taps.div_ceil(CHUNK) * 3 * REACH),
            columns: [(); 2].map(|()| arena.take(several * 3 * REACH)),
            spare: arena.take(3 * REACH),
            rows: arena.take(REACH * width),
            column_rows: arena.take(several * REACH * width),
            weights: arena.take(CHUNK * CHUNK),
            running,
            x: arena.take(CHUNK),
            b: arena.take(CHUNK),
            d: arena.take(CHUNK),
            sums: arena.take(CHUNK * width),
            turned: [REACH, CHUNK].map(|lanes| arena.take(lanes * width)),
        }
    }

    /// Numbers of memory that [`Work::new`] takes.
    pub fn len(most: [usize; 2], width: usize) -> usize {
        Arena::measure(|arena| Work::<T>::lay_out(arena, most, width))
    }
}

/// Three lines of exponents.
pub(super) fn split<T>(items: &[T]) -> Line<'_, T> {
    let (x, rest) = items.split_at(REACH);
    let (b, d) = rest.split_at(REACH);
    Line { x, b, d: &d[..REACH] }
}

fn split_mut<T>(items: &mut [T]) -> [&mut [T]; 3] {
    let (x, rest) = items.split_at_mut(REACH);
    let (b, d) = rest.split_at_mut(REACH);
    [x, b, &mut d[..REACH]]
}

/// Which of the items `from..from + count` there are, counted from `from` on.
pub(super) fn present(window: &Window, (from, count): (isize, usize)) -> (usize, usize) {
    let low = (window.first - from).clamp(0, count as isize) as usize;
    let high = (window.end - from).clamp(low as isize, count as isize) as usize;
    (low, high)
}

/// Items are named by the first and their count.
impl<T: Real> Field<'_, T> {
    /// Pieces of a line's taps, of at most [`CHUNK`].
    pub fn pieces(&self) -> usize {
        self.taps.div_ceil(CHUNK)
    }

    /// The pieces of the kernel on all lines in view, for outputs of which the first one's window begins at item `base`.
    pub fn kernel_pieces(&self, base: isize) -> impl Iterator<Item = Piece> + use<T> {
        let (taps, first_line, pieces) = (self.taps, self.first_line, self.pieces());
        (0..self.lines * pieces).map(move |index| {
            let (line, number) = (index / pieces, index % pieces);
            let own = line * taps + number * CHUNK..line * taps + ((number + 1) * CHUNK).min(taps);
            Piece { line: first_line + line, number, first: base + (number * CHUNK) as isize, taps: own }
        })
    }

    fn all_lines(&self) -> Range<usize> {
        self.first_line..self.first_line + self.lines
    }

    /// Reads exponents of the items of a line, nothing where there are none.
    pub fn exponents(&self, source: &impl Source<T>, line: usize, span: (isize, usize), items: &mut [T]) {
        let [x, b, d] = split_mut(items);
        let (low, high) = present(&self.window, span);
        for (to, nothing) in [(&mut *x, T::NEG_INFINITY), (&mut *b, T::ZERO), (&mut *d, T::ZERO)] {
            to[..low].fill(nothing);
            to[high..].fill(nothing);
        }
        if low < high {
            source.exponents(line, span.0 + low as isize, &mut x[low..high], &mut b[low..high], &mut d[low..high]);
        }
    }

    /// The rows of the same items, [`REACH`] of them; none of width 0. Those behind the last are 0, or of any contents if none of them is
    /// multiplied (`whole`): then rows that stand one after the other are not copied to `to`.
    pub fn rows<'r>(
        &self,
        source: &'r impl Source<T>,
        line: usize,
        span: (isize, usize),
        width: usize,
        whole: bool,
        to: &'r mut [T],
    ) -> &'r [T] {
        if width == 0 {
            return &[];
        }
        let (low, high) = present(&self.window, span);
        let (from, count) = span;
        let all = whole && low == 0 && high == count;
        if let Some(rows) = all.then(|| source.rows_in_place(line, from, count, width)).flatten() {
            return rows;
        }
        to[..low * width].fill(T::ZERO);
        to[high * width..REACH * width].fill(T::ZERO);
        if low < high {
            source.rows(line, from + low as isize, high - low, width, &mut to[low * width..high * width]);
        }
        to
    }

    /// Exponents of columns: the items at one place of all lines in view as one.
    pub fn column_exponents(&self, source: &impl Source<T>, span: (isize, usize), spare: &mut [T], columns: &mut [T]) {
        let [x, b, d] = split_mut(columns);
        x.fill(floor());
        b.fill(T::ZERO);
        d.fill(T::ZERO);
        for line in self.all_lines() {
            self.exponents(source, line, span, spare);
            for n in 0..REACH {
                let rise = (spare[n] - x[n]) + (spare[REACH + n] - b[n]);
                if rise > T::ZERO {
                    (x[n], b[n]) = (spare[n], spare[REACH + n]);
                }
            }
        }
        for line in self.all_lines() {
            self.exponents(source, line, span, spare);
            weigh(spare, (&*x, &*b));
            for n in 0..REACH {
                d[n] += spare[n] * spare[2 * REACH + n];
            }
        }
    }

    /// Rows of columns, relative to their exponents.
    pub fn column_rows(
        &self,
        source: &impl Source<T>,
        span: (isize, usize),
        columns: &[T],
        (spare, block): (&mut [T], &mut [T]),
        width: usize,
        to: &mut [T],
    ) {
        to[..REACH * width].fill(T::ZERO);
        if width == 0 {
            return;
        }
        let (low, high) = present(&self.window, span);
        for line in self.all_lines() {
            self.exponents(source, line, span, spare);
            weigh(spare, (&columns[..REACH], &columns[REACH..]));
            let block = self.rows(source, line, span, width, true, block);
            for n in low..high {
                add_scaled(&mut to[n * width..][..width], spare[n], &block[n * width..][..width]);
            }
        }
    }

    /// The sum of the items (or columns) `from..to`.
    pub fn sum(&self, source: &impl Source<T>, (from, to): (isize, isize), work: &mut Work<'_, T>, sum: &mut [T]) {
        clear(sum);
        let width = sum.len() - header::<T>();
        for at in (from..to).step_by(REACH) {
            let span = (at, ((to - at) as usize).min(REACH));
            let (items, rows) = if self.lines == 1 {
                self.exponents(source, self.first_line, span, work.spare);
                (&*work.spare, self.rows(source, self.first_line, span, width, true, work.rows))
            } else {
                let columns = &mut *work.columns[0];
                self.column_exponents(source, span, work.spare, columns);
                let spare = (&mut *work.spare, &mut *work.column_rows);
                self.column_rows(source, span, columns, spare, width, work.rows);
                (&*columns, &*work.rows)
            };
            let max = dispatch(FindReachMax { line: split(items) });
            let Running { keep: weights, enter: products, sum: part, .. } = &mut work.running[0];
            dispatch(ReachWeights { line: split(items), max: &max, weights, products });
            let part = &mut part[..width];
            dispatch(SumRows { weights: &weights[..span.1], rows, to: part });
            join_parts(sum, [max.x, max.b, dot(weights, &items[2 * REACH..3 * REACH])], part);
        }
    }
}

/// Turns exponents into weights relative to others.
fn weigh<T: Real>(items: &mut [T], (max_x, max_b): (&[T], &[T])) {
    let (weights, b) = items.split_at_mut(REACH);
    for ((x, &mut b), (&max_x, &max_b)) in weights.iter_mut().zip(b).zip(max_x.iter().zip(max_b)) {
        *x = (*x - max_x) + (b - max_b);
    }
    dispatch(Exp { to: weights });
}

/// Empties a sum.
pub(super) fn clear<T: Real>(sum: &mut [T]) {
    sum.fill(T::ZERO);
    sum[0] = floor();
}

/// Joins `item`, a sum, to `sum`.
pub(super) fn join<T: Real>(sum: &mut [T], item: &[T]) {
    join_parts(sum, [item[0], item[1], item[2]], &item[header::<T>()..]);
}

/// Joins a sum's exponent, weight and row to `sum`.
fn join_parts<T: Real>(sum: &mut [T], [x, b, weight]: [T; 3], row: &[T]) {
    let rise = (x - sum[0]) + (b - sum[1]);
    let small = (-rise.abs()).exp();
    let (own, other) = if rise > T::ZERO { (small, T::ONE) } else { (T::ONE, small) };
    if rise > T::ZERO {
        (sum[0], sum[1]) = (x, b);
    }
    sum[2] = sum[2] * own + weight * other;
    let sum = &mut sum[header::<T>()..];
    scale_by(sum, own);
    add_scaled(sum, other, row);
}
