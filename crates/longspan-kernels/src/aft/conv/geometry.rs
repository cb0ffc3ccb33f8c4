//! Where taps stand, and the sums of all items on either side of windows.

use super::field::{Field, Source, Work, clear, header, join};
use crate::aft::chunks::{CHUNK, Chunks, Window, Workers};
use crate::aft::options::{Aft, Variant};
use crate::aft::problem::{Block, Problem};
use crate::call::{Arena, SharedRows};
use crate::simd::Real;

/// Where taps stand.
#[derive(Debug, Clone, Copy)]
pub(in crate::aft) struct Geometry {
    /// Rows of an image; 1 for a sequence.
    pub lines: usize,
    /// Tokens of a row of an image; 0 for a sequence, which has one line of any length.
    pub places: usize,
    taps: [usize; 2],
    /// Taps before the output's own place.
    back: [usize; 2],
}

impl Geometry {
    /// Of keys as queries see them; `None` for another variant.
    pub fn new(aft: &Aft, causal: bool) -> Option<Self> {
        match aft.variant {
            Variant::Conv { taps, .. } => {
                Some(Self { lines: 1, places: 0, taps: [1, taps], back: [0, aft.reach(causal).0] })
            }
            Variant::Conv2d { image: [lines, places], taps, .. } => {
                Some(Self { lines, places, taps, back: taps.map(|taps| (taps - 1) / 2) })
            }
            _ => None,
        }
    }

    /// Of queries as keys see them.
    pub fn turned(self) -> Self {
        Self { back: [0, 1].map(|axis| self.taps[axis] - 1 - self.back[axis]), ..self }
    }

    /// Lines and taps that a chunk's memory must have room for.
    pub fn most(&self) -> [usize; 2] {
        [self.taps[0].min(self.lines), self.taps[1]]
    }

    /// What the outputs of line `y` see.
    pub(super) fn field<'a, T>(&self, window: Window, y: usize, kernel: &'a [T]) -> Field<'a, T> {
        let first_line = y.saturating_sub(self.back[0]);
        let lines = (y + self.taps[0] - self.back[0]).min(self.lines) - first_line;
        let skipped = (first_line + self.back[0] - y) * self.taps[1];
        Field { window, first_line, lines, kernel: kernel.get(skipped..).unwrap_or(&[]), taps: self.taps[1] }
    }

    /// One window a line of each sequence of a block: on keys, or on queries if `turned`.
    pub fn windows<T: Real>(&self, problem: &Problem<'_, T>, block: &Block, turned: bool) -> Vec<Window> {
        let of = |sequence| if turned { problem.queries_of_keys(sequence) } else { problem.keys_of_queries(sequence) };
        let sequences = block.sequences(problem).iter().map(of);
        if self.places == 0 {
            return sequences.collect();
        }
        let line = |_| Window {
            outputs: self.places,
            chunk_len: CHUNK,
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

    pub fn start(&self, line: usize) -> usize {
        line % self.lines * self.places
    }
}

/// Blocks of items whose sums edges are made of: before the first chunk's window; as long as chunks; and the rest.
fn blocks(window: &Window) -> usize {
    window.chunks() + beyond(window) + 2
}

/// Blocks that a chunk's windows reach beyond its own.
pub(super) fn beyond(window: &Window) -> usize {
    ((window.back + window.ahead) as usize).div_ceil(CHUNK)
}

/// The items of one: those that come before the windows of a chunk and not before those of its predecessor have the chunk's number.
pub(super) fn block(window: &Window, index: usize) -> (isize, isize) {
    let last = window.first.max(window.end);
    let bound = |n: usize| (window.shift - window.back + (n * CHUNK) as isize).clamp(window.first, last);
    let from = if index == 0 { window.first } else { bound(index - 1) };
    (from, if index + 1 == blocks(window) { last } else { bound(index) })
}

/// Sums of all items before and of all after the windows of each chunk: of rows of one width, or of exponents alone if that is 0.
pub(super) struct Edges<'a, T> {
    before: &'a [T],
    after: &'a [T],
    /// One window a line, and which chunk comes where.
    chunks: Chunks,
    len: usize,
}

/// Memory for [`Edges`]: their own, and for images sums of all lines up to each, and from each on.
fn edges_memory<'a, T: Real>(
    geometry: &Geometry,
    windows: &[Window],
    heads: usize,
    width: usize,
    arena: &mut Arena<'a, T>,
) -> ([&'a mut [T]; 2], [&'a mut [T]; 2]) {
    let len = header::<T>() + width;
    let blocks: usize = windows.iter().map(blocks).sum();
    let lines = if geometry.lines > 1 { windows.len() } else { 0 };
    ([(); 2].map(|()| arena.take(blocks * heads * len)), [(); 2].map(|()| arena.take(lines * heads * len)))
}

impl<'a, T: Real> Edges<'a, T> {
    pub fn memory(geometry: &Geometry, windows: &[Window], heads: usize, width: usize) -> usize {
        Arena::<T>::measure(|arena| edges_memory(geometry, windows, heads, width, arena))
    }

    /// `source(sequence, head)` counts sequences from the block's first on; `initial(sequence, head, sum)` writes what comes
    /// before the first item, if anything does.
    pub fn new<S: Source<T>>(
        geometry: &Geometry,
        (windows, heads, width): (&[Window], usize, usize),
        source: impl Fn(usize, usize) -> S + Sync,
        initial: impl Fn(usize, usize, &mut [T]) + Sync,
        memory: &'a mut [T],
        workers: &mut Workers<'_, T>,
    ) -> Self {
        let (most, len) = (geometry.most(), header::<T>() + width);
        let ([before, after], [above, below]) = edges_memory(geometry, windows, heads, width, &mut Arena::new(memory));
        let line = heads * len;
        if geometry.lines > 1 {
            let sums = SharedRows::new(&mut *above, [0, 0, len]);
            workers.run(windows.len() * heads, |task, work| {
                let index = task / heads;
                let first_line = index % geometry.lines;
                let field = Field { window: windows[index], first_line, lines: 1, kernel: &[], taps: 1 };
                // SAFETY: every line of every head has a place of its own.
                let to = unsafe { sums.row(0, 0, task, len) };
                let (source, range) = (source(index / geometry.lines, task % heads), (0, geometry.places as isize));
                field.sum(&source, range, &mut Work::new(work, most, width), to);
            });
            below.copy_from_slice(above);
            let image = geometry.lines * line;
            for (above, below) in above.chunks_exact_mut(image).zip(below.chunks_exact_mut(image)) {
                for at in (line..image).step_by(len) {
                    let (earlier, own) = above.split_at_mut(at);
                    join(&mut own[..len], &earlier[at - line..][..len]);
                }
                for at in (0..image - line).step_by(len).rev() {
                    let (own, later) = below.split_at_mut(at + line);
                    join(&mut own[at..at + len], &later[..len]);
                }
            }
        }
        let (above, below): (&[T], &[T]) = (above, below);
        // What comes before a line's first item (edge 0) and after its last.
        let starts = |index: usize, head: usize, edge: usize, sum: &mut [T]| {
            if geometry.lines == 1 {
                return if edge == 0 {
                    initial(index, head, sum)
                };
            }
            let (image, y) = (index - index % geometry.lines, index % geometry.lines);
            let view = geometry.field::<T>(windows[index], y, &[]);
            let (from, y) = match edge {
                0 if view.first_line > 0 => (above, view.first_line - 1),
                1 if view.first_line + view.lines < geometry.lines => (below, view.first_line + view.lines),
                _ => return,
            };
            sum.copy_from_slice(&from[(image + y) * line + head * len..][..len]);
        };

        // Blocks of every line, and then each with all before it, or after it.
        let long = |window: &Window| Window { outputs: blocks(window) * CHUNK, ..*window };
        let chunks = Chunks::new(windows.iter().map(long).collect(), heads);
        let [to_before, to_after] = [&mut *before, &mut *after].map(|sums| SharedRows::new(sums, [0, 0, len]));
        workers.run(chunks.tasks(), |task, work| {
            let (line, head, index) = chunks.task(task);
            let window = &windows[line];
            // SAFETY: every block of every line has an index of its own, and the slices end with the task that has it.
            let (own, later) = unsafe { (to_before.row(0, 0, task, len), to_after.row(0, 0, task, len)) };
            let wanted = (window.before && index < window.chunks(), window.after && index >= beyond(window) + 2);
            clear(own);
            if wanted.0 || wanted.1 {
                let field = geometry.field(*window, line % geometry.lines, &[]);
                let source = source(line / geometry.lines, head);
                field.sum(&source, block(window, index), &mut Work::new(work, most, width), own);
            }
            if wanted.1 { later.copy_from_slice(own) } else { clear(later) }
        });
        workers.run(windows.len() * heads, |task, work| {
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

    pub fn of(&self, window: &Window, line: usize, head: usize, chunk: usize) -> [&[T]; 2] {
        let at = |edges: &'a [T], block: usize| &edges[self.chunks.index(line, head, block) * self.len..][..self.len];
        [at(self.before, chunk), at(self.after, chunk + beyond(window) + 2)]
    }
}
