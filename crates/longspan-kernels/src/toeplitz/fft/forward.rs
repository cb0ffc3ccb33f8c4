//! Outputs by transforms, and by tiles where a certificate fails.

use super::super::chunks::{RowChunk, push_chunks, push_unit};
use super::super::exponents::Shared;
use super::super::forward;
use super::super::problem::{CHUNK, Problem, TILE, Unit};
use super::columns::{Columns, Keys, block, load_queries};
use super::line::{Kernel, Line, Work, lines, most};
use super::{allowed, clear, lost, norm, norm_of, transforms};
use crate::call::{Arena, Scratch, SharedRows, Sink};
use crate::simd::Real;
use crate::threads::{self, parallel};

/// What one unit takes beside the memory of tasks.
struct Buffers<'s> {
    work: Work<'s>,
    keys: Keys<'s>,
    /// Of each head that reads the keys.
    heads: Vec<HeadColumns<'s>>,
    /// `[values + 1, group, queries]`
    sums: &'s mut [f64],
}

struct HeadColumns<'s> {
    kernel: Kernel<'s>,
    q: Columns<'s>,
    q_norms: &'s mut [f64],
}

impl<'s> Buffers<'s> {
    fn new<T: Real>(problem: &Problem<'_, T>, line: &Line, arena: &mut Arena<'s, f64>) -> Self {
        let (group, queries) = (problem.dims.group(), line.queries.count);
        let mut head = |_| HeadColumns {
            kernel: Kernel::new(line, arena),
            q: Columns::new(problem.features, queries, arena),
            q_norms: arena.take(queries),
        };
        let heads = (0..group).map(&mut head).collect();
        Self {
            heads,
            work: line.work(arena),
            keys: Keys::new(problem, line, arena),
            sums: arena.take((problem.dims.value_dim + 1) * group * queries),
        }
    }
}

/// The transforms of a task: one of keys, and, if it is multiplied by the kernels of several heads, one of its products.
fn works<'s, T: Real>(
    problem: &Problem<'_, T>,
    line: &Line,
    arena: &mut Arena<'s, f64>,
) -> (Work<'s>, Option<Work<'s>>) {
    (line.work(arena), (problem.dims.group() > 1).then(|| line.work(arena)))
}

pub(in super::super) fn forward<T: Real>(problem: &Problem<'_, T>, sink: Sink<'_, T>, scratch: &mut Scratch<T>) {
    let (per_worker, workers) = (forward::worker_len(problem), threads::count());
    let lines = lines(problem);
    let per_transform = most(&lines, |line, arena| works(problem, line, arena));
    let unit_len = most(&lines, |line, arena| Buffers::new(problem, line, arena));
    let numbers = problem.shared_len() + workers * per_worker;
    let (numbers, numbers_f64) = scratch.take_with_f64(numbers, unit_len + workers * per_transform);
    let mut arena = Arena::new(numbers);
    let shared = problem.shared(&mut arena);
    let rest = arena.rest();
    let mut left = Vec::new();
    for unit in (0..problem.units()).map(|index| problem.unit(index)) {
        match &lines[unit.index / problem.dims.kv_heads] {
            Some(line) if transforms(problem, &unit) => {
                let whole = Whole { problem, shared: &shared, unit, line, sink };
                whole.compute((&mut *rest, &mut *numbers_f64, per_transform), &mut left);
            }
            _ => push_unit(problem, &mut left, &unit, CHUNK),
        }
    }
    forward::run(problem, &shared, &left, None, sink, (rest, per_worker));
}

struct Whole<'x, 'a, T: 'static> {
    problem: &'x Problem<'a, T>,
    shared: &'x Shared<'x, T>,
    unit: Unit<'a, T>,
    line: &'x Line,
    sink: Sink<'x, T>,
}

impl<T: Real> Whole<'_, '_, T> {
    /// Computes the outputs of the unit but for the rows that are `left` to tiles.
    fn compute(&self, (memory, memory_f64, per_transform): (&mut [T], &mut [f64], usize), left: &mut Vec<RowChunk>) {
        let Self { problem, shared, unit, line, .. } = self;
        let (group, queries) = (problem.dims.group(), unit.sequence.queries);
        let mut arena = Arena::new(memory_f64);
        let Buffers { mut work, mut keys, mut heads, sums } = Buffers::new(problem, line, &mut arena);
        keys.load(problem, unit, memory);
        for (head, HeadColumns { kernel, q, q_norms }) in problem.heads(unit).zip(&mut heads) {
            kernel.load(problem, line, shared.line(head), &mut work);
            load_queries(problem, (unit, head), memory, q);
            q.norms(q_norms);
        }
        let places = SharedRows::new(&mut *sums, [group * queries, queries, 0]);
        parallel(problem.dims.value_dim + 1, arena.rest(), per_transform, |value, memory| {
            let (mut work, mut other) = works(problem, line, &mut Arena::new(memory));
            // SAFETY: each column of values is one task's own.
            let sums = unsafe { places.row(value, 0, 0, group * queries) };
            sums.fill(0.0);
            for feature in 0..problem.features {
                line.transform(&line.keys, keys.k.column(feature), Some(keys.v.column(value)), &mut work);
                for (HeadColumns { kernel, q, .. }, to) in heads.iter().zip(sums.chunks_exact_mut(queries)) {
                    let work = match &mut other {
                        None => &mut work,
                        Some(other) => {
                            other.spectrum.copy_from_slice(work.spectrum);
                            other
                        }
                    };
                    line.convolve(kernel, false, work);
                    line.queries.add(Some(q.column(feature)), work.signal, to);
                }
            }
        });
        for (n, (head, HeadColumns { kernel, q_norms, .. })) in problem.heads(unit).zip(&heads).enumerate() {
            let lost = lost(line, kernel);
            for (value, sums) in sums.chunks_exact_mut(group * queries).enumerate() {
                let bound = lost * norm_of(keys.norms.first, keys.v.column(value));
                let sums = &mut sums[n * queries..][..queries];
                sums.iter_mut().zip(&**q_norms).for_each(|(sum, q)| clear(sum, bound * q));
            }
            let column = |value: usize| &sums[(value * group + n) * queries..][..queries];
            let bound = lost * norm(keys.norms.products) / allowed::<T>(line);
            // A NaN does not fail.
            let fails = |row: usize, denominator: f64| bound * q_norms[row] > denominator.abs();
            self.write(head, kernel.largest + keys.exponent, column, fails, left, memory);
        }
    }

    /// Writes the rows of a head that keep their digits, from sums relative to `exponent`, the last of the columns being the
    /// denominators; the others are left.
    fn write<'c>(
        &self,
        head: usize,
        exponent: f64,
        column: impl Fn(usize) -> &'c [f64],
        fails: impl Fn(usize, f64) -> bool,
        left: &mut Vec<RowChunk>,
        memory: &mut [T],
    ) {
        let Self { problem, shared, unit, sink, .. } = self;
        let (queries, value_dim) = (unit.sequence.queries, problem.dims.value_dim);
        let denominators = column(value_dim);
        let fails = |row: &usize| problem.sees(unit, *row) && fails(*row, denominators[*row]);
        for first in (0..queries).step_by(TILE) {
            let rows = first..(first + TILE).min(queries);
            // Rows that fail are computed by tiles, in runs; other rows are not touched.
            let mut row = rows.start;
            while row < rows.end {
                let run = (row..rows.end).take_while(&fails).count();
                if run > 0 {
                    push_chunks(left, (unit.index, head), row..row + run, CHUNK);
                }
                row += run.max(1);
            }
            // A row's own exponent, which cancels but without normalisation.
            let mut q_shift = [T::ZERO; TILE];
            if problem.mapping.exponential && !problem.toeplitz.normalize {
                let queries = problem.queries(unit, head).skip(first);
                let (_, map) = block(problem, memory);
                problem.mapping.query_shifts(head, queries, rows.len(), &mut q_shift, map.work);
            }
            for row in rows.filter(|row| !fails(row)) {
                let (batch, token) = (unit.sequence.batch, unit.sequence.query_start + row);
                // SAFETY: each (batch, head, token) is written once, here or by the tiles of rows that fail.
                let out = unsafe { sink.out.row(batch, head, token, value_dim) };
                let level = shared.level(unit, head, row).to_f64();
                let mut denominator = T::from_f64(denominators[row] * (exponent - level).exp());
                let mut factor = 1.0 / denominators[row];
                if !problem.toeplitz.normalize {
                    (factor, denominator) = ((exponent + q_shift[row - first].to_f64()).exp(), T::ONE);
                }
                if !problem.sees(unit, row) || denominator.vanishes() {
                    out.fill(T::ZERO);
                    denominator = if problem.toeplitz.normalize { T::ZERO } else { T::ONE };
                } else {
                    for (value, out) in out.iter_mut().enumerate() {
                        *out = T::from_f64(column(value)[row] * factor);
                    }
                }
                // SAFETY: as above.
                unsafe { sink.set_denominator([batch, head, token], &[denominator]) };
            }
        }
    }
}
