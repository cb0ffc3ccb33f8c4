//! AFT-conv: one key a head, so that a pair's weight is one number for all channels, and kernels over distances in one or
//! two dimensions.

mod backward;
mod band;
mod forward;
mod walk;
pub(crate) mod window;

pub(super) use backward::backward;
pub(super) use forward::forward;

use walk::{Edges, Field, REACH, Source, Work, header};

use super::keys::KeyItems;
use super::problem::{Bias, Block, CHUNK, Problem, Window};
use super::{Aft, Variant};
use crate::call::{Arena, ViewMut};
use crate::feature_map::FeatureMap;
use crate::feature_map::elementwise::LoadFeatures;
use crate::simd::rows::Ahead;
use crate::simd::{Real, dispatch};
use crate::threads::{self, parallel};

/// Where taps stand.
#[derive(Debug, Clone, Copy)]
pub(super) struct Geometry {
    /// Rows of an image; 1 for a sequence.
    lines: usize,
    /// Tokens of a row of an image; 0 for a sequence, which has one line of any length.
    places: usize,
    taps: [usize; 2],
    /// Taps before the output's own place.
    back: [usize; 2],
}

impl Geometry {
    /// Of keys as queries see them; `None` for another variant.
    pub fn new(aft: &Aft, causal: bool) -> Option<Self> {
        match aft.variant {
            Variant::Conv { taps, .. } => {
                let back = if causal { taps - 1 } else { (taps - 1) / 2 };
                Some(Self { lines: 1, places: 0, taps: [1, taps], back: [0, back] })
            }
            Variant::Conv2d { image: [lines, places], taps, .. } => {
                Some(Self { lines, places, taps, back: taps.map(|taps| (taps - 1) / 2) })
            }
            _ => None,
        }
    }

    /// Of queries as keys see them.
    fn turned(self) -> Self {
        Self { back: [0, 1].map(|axis| self.taps[axis] - 1 - self.back[axis]), ..self }
    }

    /// Lines and taps that a chunk's memory must have room for.
    fn most(&self) -> [usize; 2] {
        [self.taps[0].min(self.lines), self.taps[1]]
    }

    /// What the outputs of line `y` see.
    fn field<'a, T>(&self, window: Window, y: usize, kernel: &'a [T]) -> Field<'a, T> {
        let first_line = y.saturating_sub(self.back[0]);
        let lines = (y + self.taps[0] - self.back[0]).min(self.lines) - first_line;
        let skipped = (first_line + self.back[0] - y) * self.taps[1];
        Field { window, first_line, lines, kernel: kernel.get(skipped..).unwrap_or(&[]), taps: self.taps[1] }
    }

    /// One window a line of each sequence of a block: on keys, or on queries if `turned`.
    fn windows<T: Real>(&self, problem: &Problem<'_, T>, block: &Block, turned: bool) -> Vec<Window> {
        let of = |sequence| if turned { problem.queries_of_keys(sequence) } else { problem.keys_of_queries(sequence) };
        let sequences = problem.sequences[block.sequences.clone()].iter().map(of);
        if self.places == 0 {
            return sequences.collect();
        }
        let line = |_| Window {
            outputs: self.places,
            shift: 0,
            back: self.back[1] as isize,
            ahead: (self.taps[1] - 1 - self.back[1]) as isize,
            before: true,
            after: true,
            first: 0,
            end: self.places as isize,
        };
        sequences.flat_map(|_| (0..self.lines).map(line)).collect()
    }

    /// The first token of a line.
    fn start(&self, line: usize) -> usize {
        line % self.lines * self.places
    }

    /// Numbers of memory for the edges of so many windows.
    fn edges_len<T: Real>(&self, windows: &[Window], heads: usize, width: usize) -> usize {
        let lines = 2 * windows.len() * heads * (header::<T>() + width) + 128;
        Edges::<T>::len(windows, heads, width) + if self.lines > 1 { lines } else { 0 }
    }

    /// The edges of every chunk: sums of rows of `width`, or of exponents alone if that is 0.
    ///
    /// `source(sequence, head)` counts sequences from the block's first on; `initial(sequence, head, sum)` writes what comes
    /// before the first item, if anything does.
    #[allow(clippy::too_many_arguments)]
    fn edges<'a, T: Real, S: Source<T>>(
        &self,
        windows: &[Window],
        heads: usize,
        width: usize,
        source: impl Fn(usize, usize) -> S + Sync,
        initial: impl Fn(usize, usize, &mut [T]) + Sync,
        memory: &'a mut [T],
        work: &mut [T],
        per_worker: usize,
    ) -> Edges<'a, T> {
        let (most, len) = (self.most(), header::<T>() + width);
        let of = |index: usize, head: usize| source(index / self.lines, head);
        if self.lines == 1 {
            let field = |index: usize, head: usize| (of(index, head), self.field(windows[index], 0, &[]));
            let starts = |index: usize, head: usize, edge: usize, sum: &mut [T]| {
                if edge == 0 {
                    initial(index, head, sum);
                }
            };
            return Edges::new(windows.to_vec(), heads, width, field, starts, memory, work, per_worker, most);
        }
        // Sums of whole lines, of all up to each and of all from each on.
        let mut arena = Arena::new(memory);
        let count = windows.len() * heads;
        let (above, below) = (arena.take(count * len), arena.take(count * len));
        let memory = arena.rest();
        let mut sums = ViewMut::strided(&mut *above, [0, 0, len]);
        let sums = sums.shared();
        parallel(count, work, per_worker, |task, work| {
            let index = task / heads;
            let line = Field { window: windows[index], first_line: index % self.lines, lines: 1, kernel: &[], taps: 1 };
            // SAFETY: every line of every head has a place of its own.
            let to = unsafe { sums.row(0, 0, task, len) };
            let range = (0, self.places as isize);
            walk::sum(&of(index, task % heads), &line, range, &mut Work::new(work, most, width), to);
        });
        below.copy_from_slice(above);
        let image = self.lines * heads * len;
        for (above, below) in above.chunks_exact_mut(image).zip(below.chunks_exact_mut(image)) {
            let line = heads * len;
            for at in (line..image).step_by(len) {
                let (earlier, own) = above.split_at_mut(at);
                walk::join(&mut own[..len], &earlier[at - line..][..len]);
            }
            for at in (0..image - line).step_by(len).rev() {
                let (own, later) = below.split_at_mut(at + line);
                walk::join(&mut own[at..at + len], &later[..len]);
            }
        }
        let (above, below): (&[T], &[T]) = (above, below);
        let field = |index: usize, head: usize| (of(index, head), self.field(windows[index], index % self.lines, &[]));
        let starts = |index: usize, head: usize, edge: usize, sum: &mut [T]| {
            let (image, y) = (index - index % self.lines, index % self.lines);
            let view = self.field::<T>(windows[index], y, &[]);
            let (from, line) = match edge {
                0 if view.first_line > 0 => (above, view.first_line - 1),
                1 if view.first_line + view.lines < self.lines => (below, view.first_line + view.lines),
                _ => return,
            };
            sum.copy_from_slice(&from[((image + line) * heads + head) * len..][..len]);
        };
        Edges::new(windows.to_vec(), heads, width, field, starts, memory, work, per_worker, most)
    }
}

/// The keys and values of one head.
struct KeySource<'a, T> {
    items: KeyItems<'a, T>,
    places: usize,
}

impl<'a, T: Real> KeySource<'a, T> {
    fn new(problem: &Problem<'a, T>, geometry: &Geometry, sequence: usize, kv_head: usize) -> Self {
        let items = KeyItems::new(problem, &problem.sequences[sequence], kv_head);
        Self { items, places: geometry.places }
    }

    fn token(&self, line: usize, at: isize) -> isize {
        (line * self.places) as isize + at
    }

    /// The values that a chunk of a sequence reads and its predecessor does not.
    fn ahead(&self, field: &Field<'_, T>, chunk: usize) -> Ahead<T> {
        let window = &field.window;
        let from = window.shift + window.ahead + (chunk * CHUNK) as isize;
        self.items.ahead(from, from + CHUNK as isize)
    }
}

impl<T: Real> Source<T> for KeySource<'_, T> {
    fn exponents(&self, line: usize, from: isize, x: &mut [T], b: &mut [T], d: &mut [T]) {
        b.fill(T::ZERO);
        d.fill(T::ONE);
        let from = self.token(line, from);
        if let Some(tokens) = self.items.tokens(from, x.len()) {
            if tokens.keys.stride == 1 {
                x.copy_from_slice(&tokens.keys.data[..x.len()]);
            } else {
                x.iter_mut().enumerate().for_each(|(n, x)| *x = tokens.keys.row(n, 1)[0]);
            }
            return;
        }
        for (x, key) in x.iter_mut().zip(from..) {
            *x = self.items.token(key).map_or(T::NEG_INFINITY, |(key, _)| key[0]);
        }
    }

    fn rows_in_place(&self, line: usize, from: isize, count: usize, width: usize) -> Option<&[T]> {
        let tokens = self.items.tokens(self.token(line, from), count)?;
        let adjacent = tokens.values.stride == width && tokens.head_dim == width;
        tokens.values.data.get(..REACH * width).filter(|_| adjacent)
    }

    fn rows(&self, line: usize, from: isize, count: usize, width: usize, to: &mut [T]) {
        let from = self.token(line, from);
        if let Some(tokens) = self.items.tokens(from, count) {
            dispatch(LoadFeatures {
                map: FeatureMap::Identity,
                shift: T::ZERO,
                from: tokens.values,
                count,
                width: tokens.head_dim,
                ignored: None,
                to,
                to_row: width,
            });
            return;
        }
        for (to, key) in to.chunks_exact_mut(width).zip(from..) {
            to.fill(T::ZERO);
            // Whatever stands beside a key of −∞ counts for nothing.
            if let Some((_, value)) = self.items.token(key).filter(|(key, _)| key[0] > T::NEG_INFINITY) {
                to[..value.len()].copy_from_slice(value);
            }
        }
    }
}

/// Rows of outputs as keys see them: exponents `−x − b` in two parts, weights `G·Y/d` and rows `g/d`.
#[derive(Clone, Copy)]
struct RowSource<'a, T> {
    x: &'a [T],
    b: &'a [T],
    d: &'a [T],
    rows: &'a [T],
    places: usize,
}

impl<T: Real> Source<T> for RowSource<'_, T> {
    fn exponents(&self, line: usize, from: isize, x: &mut [T], b: &mut [T], d: &mut [T]) {
        let from = line * self.places + from as usize;
        for (to, own) in [(x, self.x), (b, self.b), (d, self.d)] {
            to.copy_from_slice(&own[from..from + to.len()]);
        }
    }

    fn rows_in_place(&self, line: usize, from: isize, _: usize, width: usize) -> Option<&[T]> {
        self.rows[(line * self.places + from as usize) * width..].get(..REACH * width)
    }

    fn rows(&self, line: usize, from: isize, count: usize, width: usize, to: &mut [T]) {
        let from = line * self.places + from as usize;
        to.copy_from_slice(&self.rows[from * width..(from + count) * width]);
    }
}

/// Runs `body(chunk, work)` for every chunk, on each thread some one after the other, so that what the next one reads can be asked for
/// meanwhile: so many that few have no next one, and so few that no thread waits long for the last of another.
fn parallel_chunks<T: Real>(chunks: usize, work: &mut [T], per_worker: usize, body: impl Fn(usize, &mut [T]) + Sync) {
    let run = (chunks / (8 * threads::count())).clamp(1, 16);
    parallel(chunks.div_ceil(run), work, per_worker, |task, work| {
        (task * run..((task + 1) * run).min(chunks)).for_each(|chunk| body(chunk, work));
    });
}

/// The taps of one head of queries.
fn kernel<'p, T: Real>(problem: &'p Problem<'_, T>, head: usize) -> &'p [T] {
    match &problem.bias {
        Bias::Kernel { kernels, taps } => &kernels[head * taps..][..*taps],
        _ => &[],
    }
}
