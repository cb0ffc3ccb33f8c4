//! Sums over windows of items that have one exponent for all channels: as the walk of the other variants before, in and
//! after the window, but with exponents that are formed for a chunk of outputs at once, and one product of a band.
//!
//! Items stand on *lines*: a sequence is one line, an image has one for each of its rows. An output on line `y` has biases
//! for items of the lines in `view(y)`, and on each of these for those from `back` before to `ahead` after its own
//! place. What its window leaves out is, from left to right: all lines above; on the lines in view the items before the
//! window, a *column* of them entering with every output; those after it; all lines below.

use super::band;
use crate::aft::conv::window::{
    AddWindow, Entering, ExpAll, FindReachMax, Line, MARGIN, ReachWeights, RunRows, RunningMax, SumRows, WindowDots,
    WindowMax, WindowWeights,
};
use crate::aft::problem::{CHUNK, Chunks, Window};
use crate::call::{Arena, ViewMut};
use crate::simd::block::{Transpose, add_scaled, all_finite, dot, floor, scale_by};
use crate::simd::rows::{Ahead, Rows};
use crate::simd::{Real, dispatch};
use crate::threads::parallel;

/// Items that the windows of a chunk reach with [`CHUNK`] taps, and more.
pub(super) const REACH: usize = 2 * CHUNK;

/// Numbers of a sum before its row: exponent in two parts, weight, and what fills a cache line.
pub(super) fn header<T>() -> usize {
    64 / size_of::<T>()
}

/// What is summed.
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

impl<T> Field<'_, T> {
    /// Pieces of a line's taps, of at most [`CHUNK`].
    fn pieces(&self) -> usize {
        self.taps.div_ceil(CHUNK)
    }
}

/// Blocks of items whose sums edges are made of: before the first chunk's window; as long as chunks; and the rest.
pub(super) fn blocks(window: &Window) -> usize {
    window.chunks() + beyond(window) + 2
}

/// Blocks that a chunk's windows reach beyond its own.
fn beyond(window: &Window) -> usize {
    ((window.back + window.ahead) as usize).div_ceil(CHUNK)
}

/// The items of a block.
fn block(window: &Window, index: usize) -> (isize, isize) {
    let last = window.first.max(window.end);
    let bound = |n: usize| (window.shift - window.back + (n * CHUNK) as isize).clamp(window.first, last);
    let from = if index == 0 { window.first } else { bound(index - 1) };
    (from, if index + 1 == blocks(window) { last } else { bound(index) })
}

/// Working memory of one task.
pub(super) struct Work<'w, T> {
    /// Exponents of every piece of every line in view: three lines of [`REACH`] each.
    pub(super) items: &'w mut [T],
    /// The same of the columns that enter before and after.
    columns: [&'w mut [T]; 2],
    spare: &'w mut [T],
    pub(super) rows: &'w mut [T],
    column_rows: &'w mut [T],
    pub(super) weights: &'w mut [T],
    pub(super) running: [Running<'w, T>; 2],
    /// Exponents of every output in two parts, and its weight.
    pub x: &'w mut [T],
    pub b: &'w mut [T],
    pub d: &'w mut [T],
    /// Sums of rows, relative to the exponents.
    pub sums: &'w mut [T],
    /// Rows and sums turned round.
    pub(super) turned: [&'w mut [T]; 2],
}

/// What enters a running sum with every output, and how outputs read it.
pub(super) struct Running<'w, T> {
    pub(super) x: &'w mut [T],
    pub(super) b: &'w mut [T],
    pub(super) d: &'w mut [T],
    pub(super) keep: &'w mut [T],
    pub(super) enter: &'w mut [T],
    pub(super) share: &'w mut [T],
    pub(super) sum: &'w mut [T],
}

impl<'w, T: Real> Work<'w, T> {
    /// For windows of so many taps on so many lines, and rows of `width`.
    pub fn new(memory: &'w mut [T], most: [usize; 2], width: usize) -> Self {
        Self::lay_out(&mut Arena::new(memory), most, width)
    }

    fn lay_out(arena: &mut Arena<'w, T>, [lines, taps]: [usize; 2], width: usize) -> Self {
        let mut running = || Running {
            x: arena.take(REACH),
            b: arena.take(REACH),
            d: arena.take(REACH),
            keep: arena.take(REACH),
            enter: arena.take(REACH),
            share: arena.take(REACH),
            sum: arena.take(width),
        };
        let running = [running(), running()];
        let several = usize::from(lines > 1);
        Self {
            items: arena.take(lines * taps.div_ceil(CHUNK) * 3 * REACH),
            columns: [(); 2].map(|()| arena.take(several * 3 * REACH)),
            spare: arena.take(3 * REACH),
            rows: arena.take(REACH * width),
            column_rows: arena.take(several * REACH * width),
            weights: arena.take((CHUNK + 2 * MARGIN) * CHUNK),
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

/// Reads exponents of the items `from..from + count` of a line, nothing where there are none.
fn exponents<T: Real>(
    source: &impl Source<T>,
    window: &Window,
    line: usize,
    from: isize,
    count: usize,
    items: &mut [T],
) {
    let (x, rest) = items[..3 * REACH].split_at_mut(REACH);
    let (b, d) = rest.split_at_mut(REACH);
    let (low, high) = present(window, from, count);
    x[..low].fill(T::NEG_INFINITY);
    x[high..].fill(T::NEG_INFINITY);
    for line in [&mut *b, &mut *d] {
        line[..low].fill(T::ZERO);
        line[high..].fill(T::ZERO);
    }
    if low < high {
        source.exponents(line, from + low as isize, &mut x[low..high], &mut b[low..high], &mut d[low..high]);
    }
}

/// Which of the items `from..from + count` there are, counted from `from` on.
pub(super) fn present(window: &Window, from: isize, count: usize) -> (usize, usize) {
    let low = (window.first - from).clamp(0, count as isize) as usize;
    let high = (window.end - from).clamp(low as isize, count as isize) as usize;
    (low, high)
}

/// The rows of the same items, [`REACH`] of them; none of width 0. Those from `count` on are 0, or of any contents if none of them is
/// multiplied (`whole`): then rows that stand one after the other are not copied to `to`.
#[allow(clippy::too_many_arguments)]
pub(super) fn rows<'a, T: Real>(
    source: &'a impl Source<T>,
    window: &Window,
    line: usize,
    from: isize,
    count: usize,
    width: usize,
    whole: bool,
    to: &'a mut [T],
) -> &'a [T] {
    if width == 0 {
        return &[];
    }
    let (low, high) = present(window, from, count);
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
fn column_exponents<T: Real>(
    source: &impl Source<T>,
    field: &Field<'_, T>,
    from: isize,
    count: usize,
    spare: &mut [T],
    columns: &mut [T],
) {
    let (x, rest) = columns[..3 * REACH].split_at_mut(REACH);
    let (b, d) = rest.split_at_mut(REACH);
    x.fill(floor());
    b.fill(T::ZERO);
    d.fill(T::ZERO);
    let lines = || field.first_line..field.first_line + field.lines;
    for line in lines() {
        exponents(source, &field.window, line, from, count, spare);
        for n in 0..REACH {
            let rise = (spare[n] - x[n]) + (spare[REACH + n] - b[n]);
            if rise > T::ZERO {
                (x[n], b[n]) = (spare[n], spare[REACH + n]);
            }
        }
    }
    for line in lines() {
        exponents(source, &field.window, line, from, count, spare);
        weigh(spare, &|n| (x[n], b[n]));
        for n in 0..REACH {
            d[n] += spare[n] * spare[2 * REACH + n];
        }
    }
}

/// Turns exponents into weights relative to `top`.
fn weigh<T: Real>(items: &mut [T], top: &impl Fn(usize) -> (T, T)) {
    let (weights, b) = items.split_at_mut(REACH);
    for (n, (x, &mut b)) in weights.iter_mut().zip(b).enumerate() {
        let (top_x, top_b) = top(n);
        *x = (*x - top_x) + (b - top_b);
    }
    dispatch(ExpAll { block: weights });
}

/// Rows of columns, relative to their exponents.
#[allow(clippy::too_many_arguments)]
fn column_rows<T: Real>(
    source: &impl Source<T>,
    field: &Field<'_, T>,
    from: isize,
    count: usize,
    columns: &[T],
    (spare, block): (&mut [T], &mut [T]),
    width: usize,
    to: &mut [T],
) {
    to[..REACH * width].fill(T::ZERO);
    if width == 0 {
        return;
    }
    for line in field.first_line..field.first_line + field.lines {
        exponents(source, &field.window, line, from, count, spare);
        weigh(spare, &|n| (columns[n], columns[REACH + n]));
        let block = rows(source, &field.window, line, from, count, width, true, block);
        let (low, high) = present(&field.window, from, count);
        for n in low..high {
            add_scaled(&mut to[n * width..][..width], spare[n], &block[n * width..][..width]);
        }
    }
}

/// Joins `item`, a sum, to `sum`.
pub(super) fn join<T: Real>(sum: &mut [T], item: &[T]) {
    let rise = (item[0] - sum[0]) + (item[1] - sum[1]);
    let small = (-rise.abs()).exp();
    let (own, other) = if rise > T::ZERO { (small, T::ONE) } else { (T::ONE, small) };
    if rise > T::ZERO {
        sum[..2].copy_from_slice(&item[..2]);
    }
    sum[2] = sum[2] * own + item[2] * other;
    let (sum, item) = (&mut sum[header::<T>()..], &item[header::<T>()..]);
    scale_by(sum, own);
    add_scaled(sum, other, item);
}

/// Makes a sum that of nothing.
pub(super) fn clear<T: Real>(sum: &mut [T]) {
    sum.fill(T::ZERO);
    sum[0] = floor();
}

/// The sum of the items (or columns) `from..to`.
pub(super) fn sum<T: Real>(
    source: &impl Source<T>,
    field: &Field<'_, T>,
    (from, to): (isize, isize),
    work: &mut Work<'_, T>,
    sum: &mut [T],
) {
    clear(sum);
    let width = sum.len() - header::<T>();
    for at in (from..to).step_by(REACH) {
        let count = ((to - at) as usize).min(REACH);
        let (items, rows) = if field.lines == 1 {
            exponents(source, &field.window, field.first_line, at, count, work.spare);
            let rows = rows(source, &field.window, field.first_line, at, count, width, true, work.rows);
            (&mut *work.spare, rows)
        } else {
            let columns = &mut *work.columns[0];
            column_exponents(source, field, at, count, work.spare, columns);
            let spare = (&mut *work.spare, &mut *work.column_rows);
            column_rows(source, field, at, count, columns, spare, width, work.rows);
            (columns, &*work.rows)
        };
        let top = dispatch(FindReachMax { line: split(items) });
        let Running { keep: weights, enter: products, sum: part, .. } = &mut work.running[0];
        dispatch(ReachWeights { line: split(items), top: &top, weights, products });
        let part = &mut part[..width];
        dispatch(SumRows { weights: &weights[..count], rows, to: part });
        let (weight, top) = (dot(weights, &items[2 * REACH..3 * REACH]), (top.x, top.b));
        // As `join`, of parts that lie apart.
        let rise = (top.0 - sum[0]) + (top.1 - sum[1]);
        let small = (-rise.abs()).exp();
        let (own, other) = if rise > T::ZERO { (small, T::ONE) } else { (T::ONE, small) };
        if rise > T::ZERO {
            (sum[0], sum[1]) = top;
        }
        sum[2] = sum[2] * own + weight * other;
        scale_by(&mut sum[header::<T>()..], own);
        add_scaled(&mut sum[header::<T>()..], other, part);
    }
}

/// Sums of all items before and of all after the windows of each chunk.
pub(super) struct Edges<'a, T> {
    pub before: &'a [T],
    pub after: &'a [T],
    /// One window a line, and which chunk comes where.
    chunks: Chunks,
    /// Numbers in a sum.
    len: usize,
}

impl<'a, T: Real> Edges<'a, T> {
    /// Numbers of memory for the edges of these lines.
    pub fn len(windows: &[Window], heads: usize, width: usize) -> usize {
        let blocks: usize = windows.iter().map(blocks).sum();
        (2 * blocks * heads * (header::<T>() + width)).next_multiple_of(64) + 128
    }

    /// Adds up the blocks of every line and then each with all before it, or after it. `starts(line, head, edge)` is what
    /// comes before a line's first item (edge 0) and after its last.
    #[allow(clippy::too_many_arguments)]
    pub fn new<'f, S: Source<T>>(
        windows: Vec<Window>,
        heads: usize,
        width: usize,
        field: impl Fn(usize, usize) -> (S, Field<'f, T>) + Sync,
        starts: impl Fn(usize, usize, usize, &mut [T]) + Sync,
        memory: &'a mut [T],
        work: &mut [T],
        per_worker: usize,
        most: [usize; 2],
    ) -> Self
    where
        T: 'f,
    {
        let long = |window: &Window| Window { outputs: blocks(window) * CHUNK, ..*window };
        let chunks = Chunks::new(windows.iter().map(long).collect(), heads);
        let len = header::<T>() + width;
        let mut arena = Arena::new(memory);
        let (before, after) = (arena.take(chunks.tasks() * len), arena.take(chunks.tasks() * len));
        let (mut by_before, mut by_after) =
            (ViewMut::strided(&mut *before, [0, 0, len]), ViewMut::strided(&mut *after, [0, 0, len]));
        let (to_before, to_after) = (by_before.shared(), by_after.shared());
        parallel(chunks.tasks(), work, per_worker, |task, work| {
            let (line, head, index) = chunks.task(task);
            let window = &windows[line];
            // SAFETY: every block of every line has an index of its own, and the slices end with the task that has it.
            let (own, later) = unsafe { (to_before.row(0, 0, task, len), to_after.row(0, 0, task, len)) };
            let wanted = (window.before && index < window.chunks(), window.after && index >= beyond(window) + 2);
            clear(own);
            if wanted.0 || wanted.1 {
                let (source, field) = field(line, head);
                sum(&source, &field, block(window, index), &mut Work::new(work, most, width), own);
            }
            if wanted.1 { later.copy_from_slice(own) } else { clear(later) }
        });
        parallel(windows.len() * heads, work, len, |task, work| {
            let (line, head) = (task / heads, task % heads);
            let (count, first) = (blocks(&windows[line]), chunks.index(line, head, 0));
            // SAFETY: the blocks of one line are adjacent, and no other task has them.
            let (before, after) =
                unsafe { (to_before.row(0, 0, first, count * len), to_after.row(0, 0, first, count * len)) };
            let sum = &mut work[..len];
            clear(sum);
            starts(line, head, 0, sum);
            for block in before.chunks_exact_mut(len) {
                join(sum, block);
                block.copy_from_slice(sum);
            }
            clear(sum);
            starts(line, head, 1, sum);
            for block in after.chunks_exact_mut(len).rev() {
                join(sum, block);
                block.copy_from_slice(sum);
            }
        });
        Self { before, after, chunks, len }
    }

    /// The edges of one chunk.
    pub fn of(&self, window: &Window, line: usize, head: usize, chunk: usize) -> [&[T]; 2] {
        let at = |edges: &'a [T], block: usize| &edges[self.chunks.index(line, head, block) * self.len..][..self.len];
        [at(self.before, chunk), at(self.after, chunk + beyond(window) + 2)]
    }
}

/// The sum before the windows of one chunk after the other: what [`Edges`] hold, for a line that one task walks from its start and
/// whose windows leave out nothing that comes after them.
pub(super) struct Before<'a, T> {
    sum: &'a mut [T],
    item: &'a mut [T],
}

impl<'a, T: Real> Before<'a, T> {
    /// Numbers of memory.
    pub fn len(width: usize) -> usize {
        2 * (header::<T>() + width)
    }

    /// What `start` writes comes before the first item.
    pub fn new(width: usize, start: impl FnOnce(&mut [T]), memory: &'a mut [T]) -> Self {
        let (sum, item) = memory[..Self::len(width)].split_at_mut(Self::len(width) / 2);
        clear(sum);
        start(sum);
        Self { sum, item }
    }

    /// That of a chunk, after that of the chunk before it.
    pub fn next(
        &mut self,
        source: &impl Source<T>,
        field: &Field<'_, T>,
        chunk: usize,
        work: &mut Work<'_, T>,
    ) -> &[T] {
        if field.window.before {
            sum(source, field, block(&field.window, chunk), work, self.item);
            join(self.sum, self.item);
        }
        self.sum
    }
}

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
    dispatch(ExpAll { block: &mut to.keep[..whole] });
    dispatch(ExpAll { block: &mut to.enter[..whole] });
    for n in (0..count).map(order) {
        to.d[n] = d;
        d = d * to.keep[n] + to.enter[n] * items.d[first + n];
    }
}

/// Forms exponents and weights of the outputs of a chunk, and their sums of rows, in `work`. Returns whether all weights are
/// relative to one exponent. Rows of `ahead` are asked for meanwhile.
pub(super) fn walk<T: Real>(
    source: &impl Source<T>,
    field: &Field<'_, T>,
    chunk: usize,
    [before, after]: [&[T]; 2],
    work: &mut Work<'_, T>,
    ahead: &[Ahead<T>],
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
    let reach = |piece: usize| {
        let taps = (field.taps - piece * CHUNK).min(CHUNK);
        if single && window.after && piece + 1 == pieces { end.max(count) + behind } else { count + taps - 1 }
    };
    let place = |piece: usize| base + (piece * CHUNK) as isize;

    for (index, items) in work.items.chunks_exact_mut(3 * REACH).take(field.lines * pieces).enumerate() {
        let piece = index % pieces;
        exponents(source, window, field.first_line + index / pieces, place(piece), reach(piece), items);
    }
    if single && pieces == 1 {
        let sides = [window.before.then_some(before), window.after.then_some(after)];
        let there = present(window, base, reach(0));
        let kernel = &field.kernel[..field.taps];
        if let Some(top) = band::common_max(kernel, count, there, sides, work.items) {
            let chunk = band::Chunk { top, kernel, count, sides, end: end.max(count) };
            band::walk(source, window, field.first_line, (base, reach(0)), width, &chunk, work, ahead);
            return true;
        }
    }
    work.x.fill(floor());
    work.b.fill(T::ZERO);
    work.d.fill(T::ZERO);
    let taps = |index: usize| {
        let (line, piece) = (index / pieces, index % pieces);
        let own = &field.kernel[line * field.taps..][..field.taps];
        &own[piece * CHUNK..((piece + 1) * CHUNK).min(field.taps)]
    };
    for (index, items) in work.items.chunks_exact(3 * REACH).take(field.lines * pieces).enumerate() {
        dispatch(WindowMax {
            line: split(items),
            taps: taps(index),
            running_max: &mut RunningMax { x: work.x, b: work.b },
        });
    }

    // What comes before windows, and what after.
    let [early, late] = &mut work.running;
    if !single {
        column_exponents(source, field, base, count, work.spare, work.columns[0]);
        column_exponents(source, field, place(pieces - 1), end.max(count) + behind, work.spare, work.columns[1]);
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
        dispatch(ExpAll { block: &mut side.share[..CHUNK] });
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
            let own = Entering { keep, enter, rows: &rows[count * width..] };
            dispatch(RunRows { sum, run: own, share: &[], backwards, to: &mut [] });
        }
        let own = Entering { keep: &side.keep[..count], enter: &side.enter[..count], rows };
        dispatch(RunRows { sum, run: own, share: &side.share[..count], backwards, to: sums });
    };
    if !single && width > 0 {
        for (side, (columns, place, reach)) in
            [(0, (0, base, count)), (1, (1, place(pieces - 1), end.max(count) + behind))]
        {
            let spare = (&mut *work.spare, &mut *work.rows);
            column_rows(source, field, place, reach, work.columns[columns], spare, width, work.column_rows);
            if side == 0 {
                enter(early, before, work.column_rows, count, false, work.sums);
            } else {
                enter(late, after, &work.column_rows[behind * width..], end.max(count), true, work.sums);
            }
        }
    }
    for (index, items) in work.items.chunks_exact(3 * REACH).take(field.lines * pieces).enumerate() {
        let (taps, piece) = (taps(index), index % pieces);
        let weights = &mut work.weights[..(taps.len() + 2 * MARGIN) * CHUNK];
        let own = MARGIN * CHUNK..(MARGIN + taps.len()) * CHUNK;
        let running_max = RunningMax { x: &mut *work.x, b: &mut *work.b };
        dispatch(WindowWeights {
            line: split(items),
            taps,
            running_max: &running_max,
            weights: &mut weights[own.clone()],
            sums: work.d,
        });
        if width == 0 {
            continue;
        }
        let (line, reach) = (field.first_line + index / pieces, reach(piece));
        let rows = rows(source, window, line, place(piece), reach, width, count == CHUNK, work.rows);
        if single && piece == 0 && window.before {
            enter(early, before, rows, count, false, work.sums);
        }
        if single && piece + 1 == pieces && window.after {
            enter(late, after, &rows[behind * width..], end.max(count), true, work.sums);
        }
        let (above, below) = weights.split_at_mut(own.end);
        above[..own.start].fill(T::ZERO);
        below.fill(T::ZERO);
        if all_finite(Rows { data: rows, stride: width }, count + taps.len() - 1, width) {
            dispatch(AddWindow { weights, lanes: CHUNK, rows, row_length: width, outputs: count, to: work.sums });
            continue;
        }
        // 0 times what an output does not see would be no number.
        for n in 0..count {
            for p in (0..taps.len()).filter(|p| items[n + p] > T::NEG_INFINITY) {
                let weight = weights[own.start + p * CHUNK + n];
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
    let pieces = field.pieces();
    let [turned_rows, turned_own] = &mut work.turned;
    dispatch(Transpose {
        from: work.sums,
        from_row: width,
        rows: CHUNK,
        columns: width,
        to: turned_own,
        to_row: CHUNK,
    });
    for (index, items) in work.items.chunks_exact(3 * REACH).take(field.lines * pieces).enumerate() {
        let (line, piece) = (index / pieces, index % pieces);
        let taps = piece * CHUNK..((piece + 1) * CHUNK).min(field.taps);
        let place = base + (piece * CHUNK) as isize;
        let own_taps = &field.kernel[line * field.taps..][taps.clone()];
        let running_max = RunningMax { x: &mut *work.x, b: &mut *work.b };
        // The sums of weights are known.
        let unused = &mut work.running[0].share[..CHUNK];
        unused.fill(T::ZERO);
        dispatch(WindowWeights {
            line: split(items),
            taps: own_taps,
            running_max: &running_max,
            weights: work.weights,
            sums: unused,
        });
        for weights in work.weights.chunks_exact_mut(CHUNK).take(taps.len()) {
            weights[count..].fill(T::ZERO);
        }
        let (first, reach) = (field.first_line + line, count + taps.len() - 1);
        let rows = rows(source, window, first, place, reach, width, count == CHUNK, work.rows);
        let to = &mut d_taps[line * field.taps..][taps.clone()];
        if all_finite(Rows { data: rows, stride: width }, reach, width) {
            dispatch(Transpose {
                from: rows,
                from_row: width,
                rows: REACH,
                columns: width,
                to: turned_rows,
                to_row: REACH,
            });
            dispatch(WindowDots {
                weights: work.weights,
                outputs: turned_own,
                rows: turned_rows,
                items: REACH,
                width,
                c,
                d_taps: to,
            });
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
