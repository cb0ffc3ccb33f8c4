//! Gradients of keys, values and biases by tiles: a task takes strips of keys of one unit and passes over the rows.
//!
//! With `p_ij = e^{b_δ} φ(q_i)·φ(k_j)` and `E_ij = dN⁺_i·v⁺_j`: `dv_j = Σ_i p_ij dN_i`, `dk̄_j = Σ_i e^{b_δ} E_ij q̄_i`,
//! `db_δ = Σ_{j−i=δ} p_ij E_ij`.

use rayon::prelude::*;

use super::problem::{Block, Problem, STRIP, Shared, TILE, Unit};
use super::tiled::{GradientSink, KeyBlock, Weights, each_run, load_cotangent, value_products};
use crate::mechanism::Cotangent;
use crate::real::Real;
use crate::scratch::{Arena, padded, parallel};
use crate::shape::ViewMut;
use crate::simd::block::{Band, Product};

/// At most so many tasks share the keys of a unit, each with a line of biases' gradients of its own: that bounds their
/// memory, and the order of sums does not depend on the number of threads.
const SEGMENTS: usize = 8;

/// Tasks that share the keys of a unit.
fn segments<T: Real>(problem: &Problem<'_, T>) -> usize {
    problem.most_keys().div_ceil(STRIP).clamp(1, SEGMENTS)
}

/// Numbers of the biases' gradients of all tasks, `[units, segments, group, line_width]`.
pub(super) fn lines_len<T: Real>(problem: &Problem<'_, T>) -> usize {
    padded::<T>(problem.units() * segments(problem) * problem.dims.group() * problem.line_width())
}

/// Key blocks that are kept while rows pass by.
const KEPT: usize = STRIP / TILE;

/// Working memory of a task.
struct Buffers<'s, T> {
    q: &'s mut [T],
    q_shifts: &'s mut [T],
    d: &'s mut [T],
    c: &'s mut [T],
    tile: &'s mut [T],
    products: &'s mut [T],
    keys: [KeyBlock<'s, T>; KEPT],
    dk: [&'s mut [T]; KEPT],
    dv: [&'s mut [T]; KEPT],
    weights: Weights<'s, T>,
}

/// Numbers of one task's working memory.
pub(super) fn buffers_len<T: Real>(problem: &Problem<'_, T>) -> usize {
    let widths = problem.head_width + problem.value_width;
    TILE * (widths + 2)
        + 2 * TILE * TILE
        + KEPT * (KeyBlock::len(problem, true) + TILE * widths)
        + Weights::len(problem)
}

impl<'s, T: Real> Buffers<'s, T> {
    fn new(problem: &Problem<'_, T>, arena: &mut Arena<'s, T>) -> Self {
        Self {
            q: arena.take(TILE * problem.head_width),
            q_shifts: arena.take(TILE),
            d: arena.take(TILE * problem.value_width),
            c: arena.take(TILE),
            tile: arena.take(TILE * TILE),
            products: arena.take(TILE * TILE),
            keys: std::array::from_fn(|_| KeyBlock::new(problem, true, arena)),
            dk: std::array::from_fn(|_| arena.take(TILE * problem.head_width)),
            dv: std::array::from_fn(|_| arena.take(TILE * problem.value_width)),
            weights: Weights::new(problem, arena),
        }
    }
}

/// Computes the gradients of all keys and values of some units, and adds those of the biases to `lines`.
pub(super) fn keys<T: Real>(
    problem: &Problem<'_, T>,
    shared: &Shared<'_, T>,
    cotangent: &Cotangent<'_, T>,
    units: &[usize],
    sink: GradientSink<'_, T>,
    lines: &mut [T],
    (scratch, per_worker): (&mut [T], usize),
) {
    let segments = segments(problem);
    let per_task = problem.dims.group() * problem.line_width();
    let mut lines = ViewMut::strided(lines, [per_task, 0, 0]);
    let lines = lines.shared();
    parallel(units.len() * segments, scratch, per_worker, |task, scratch| {
        let (unit, segment) = (problem.unit(units[task / segments]), task % segments);
        // SAFETY: each task has lines of its own.
        let lines = unsafe { lines.row(unit.index * segments + segment, 0, 0, per_task) };
        let mut buffers = Buffers::new(problem, &mut Arena::new(scratch));
        let keys = unit.sequence.keys;
        // Strips by turns, because later keys are seen by fewer rows.
        for strip in (segment * STRIP..keys).step_by(segments * STRIP) {
            let end = (strip + STRIP).min(keys) as isize;
            let mut from = strip as isize;
            while from < end {
                from = key_blocks(problem, shared, cotangent, &unit, (from, end), sink, lines, &mut buffers);
            }
        }
        if segment == 0 {
            for key in keys..keys + unit.sequence.absent {
                write(problem, &unit, key, sink, None);
            }
        }
    });
}

/// Computes the gradients of the next few blocks of keys from `from` on and before `end`; returns where they end.
#[allow(clippy::too_many_arguments)]
fn key_blocks<T: Real>(
    problem: &Problem<'_, T>,
    shared: &Shared<'_, T>,
    cotangent: &Cotangent<'_, T>,
    unit: &Unit<'_, T>,
    (from, end): (isize, isize),
    sink: GradientSink<'_, T>,
    lines: &mut [T],
    buffers: &mut Buffers<'_, T>,
) -> isize {
    let (head_width, value_width) = (problem.head_width, problem.value_width);
    let head_dim = problem.dims.head_dim;
    let (ops, rows) = (problem.ops, unit.sequence.queries);
    let mut loaded = 0;
    let mut next = from;
    while next < end && loaded < KEPT {
        buffers.keys[loaded].load(problem, unit, next, end);
        buffers.dk[loaded].fill(T::ZERO);
        buffers.dv[loaded].fill(T::ZERO);
        next += buffers.keys[loaded].count as isize;
        loaded += 1;
    }
    // Rows before this one see none of the keys.
    let first = if problem.causal { (from - problem.offset).clamp(0, rows as isize) as usize / TILE * TILE } else { 0 };
    for (n, head) in problem.heads(unit).enumerate() {
        let line = shared.line(head);
        let d_line = &mut lines[n * problem.line_width()..][..problem.line_width()];
        let queries = problem.queries(unit, head);
        for row in (first..rows).step_by(TILE) {
            let Buffers { q, q_shifts, d, c, tile, products, keys, dk, dv, weights } = &mut *buffers;
            let span = row..(row + TILE).min(rows);
            problem.load_queries(queries, row, span.len(), q, q_shifts);
            load_cotangent(problem, shared, cotangent, unit, head, span.clone(), q_shifts, d, c);
            let finite = ops.all_finite(crate::shape::Rows { data: q, stride: head_width }, span.len(), head_width)
                && ops.all_finite(crate::shape::Rows { data: d, stride: value_width }, span.len(), value_width)
                && c[..span.len()].iter().all(|c| c.is_finite());
            let mut tile_of = |block: Block<T>, which: usize| {
                let keys = &keys[which];
                let visible = keys.visible(&block);
                if visible == 0 {
                    return;
                }
                let at = block.row - row;
                let band = keys.band(problem, &block);
                let transposed = if problem.causal { Band::starting_at(keys.from - block.stands) } else { Band::ALL };
                let (q, d) = (&q[at * head_width..], &d[at * value_width..]);
                ops.product(&mut Product {
                    a: q,
                    a_row: head_width,
                    a_column: 1,
                    b: keys.k_columns,
                    b_row: TILE,
                    c: tile,
                    c_row: TILE,
                    rows: block.rows,
                    columns: visible,
                    depth: head_dim,
                    accumulate: false,
                    a_band: Band::ALL,
                    c_band: band,
                });
                value_products(problem, d, &c[at..], keys, (block.rows, visible, band), products);
                let mut unused = [T::ZERO; TILE];
                let unused = &mut unused[..block.rows];
                let factors = weights.form(problem, unit, line, &block, keys);
                ops.weigh(tile, TILE, visible, factors, band, unused);
                ops.product(&mut Product {
                    a: tile,
                    a_row: 1,
                    a_column: TILE,
                    b: d,
                    b_row: value_width,
                    c: dv[which],
                    c_row: value_width,
                    rows: visible,
                    columns: value_width,
                    depth: block.rows,
                    accumulate: true,
                    a_band: transposed,
                    c_band: Band::ALL,
                });
                // Unseen elements of the tile are 0, but those of the products may be anything.
                ops.mask(products, TILE, block.rows, visible, band);
                for r in 0..block.rows {
                    let weights = &mut tile[r * TILE..][..visible];
                    ops.multiply(weights, &products[r * TILE..][..visible]);
                    each_run(problem, unit, block.row + r, keys.from, visible, |column, index, len| {
                        ops.add_scaled(&mut d_line[index..][..len], T::ONE, &weights[column..][..len]);
                    });
                }
                ops.weigh(products, TILE, visible, factors, band, unused);
                ops.product(&mut Product {
                    a: products,
                    a_row: 1,
                    a_column: TILE,
                    b: q,
                    b_row: head_width,
                    c: dk[which],
                    c_row: head_width,
                    rows: visible,
                    columns: head_width,
                    depth: block.rows,
                    accumulate: true,
                    a_band: transposed,
                    c_band: Band::ALL,
                });
            };
            shared.blocks(problem, unit, head, span, |block| {
                if finite || !problem.causal {
                    (0..loaded).for_each(|which| tile_of(block, which));
                    return;
                }
                // A product of 0 and NaN would reach keys that a row which is NaN does not see.
                for row in block.row..block.row + block.rows {
                    let stands = problem.stands(row);
                    let block = Block { row, rows: 1, stands, end: problem.end(unit, row), ..block };
                    (0..loaded).for_each(|which| tile_of(block, which));
                }
            });
        }
    }
    let seen = if rows == 0 { unit.begin() } else { problem.end(unit, rows - 1) };
    for which in 0..loaded {
        let block = &buffers.keys[which];
        let (start, count) = (block.from as usize, block.count);
        let dk = &mut *buffers.dk[which];
        ops.pull_back(problem.map, unit.k.skip(start), block.k, dk, count, head_dim, head_width);
        for row in 0..count {
            let key = start + row;
            let there = (key as isize) < seen && !unit.ignores(key);
            let rows = (&dk[row * head_width..], &buffers.dv[which][row * value_width..]);
            write(problem, unit, key, sink, there.then_some(rows));
        }
    }
    next
}

/// The lines of a unit's heads in the first of its segments.
pub(super) fn unit_lines<'l, T: Real>(problem: &Problem<'_, T>, lines: &'l mut [T], unit: usize) -> &'l mut [T] {
    let per_task = problem.dims.group() * problem.line_width();
    &mut lines[unit * segments(problem) * per_task..][..per_task]
}

/// Writes the gradients of one key, 0 for none.
pub(super) fn write<T: Real>(
    problem: &Problem<'_, T>,
    unit: &Unit<'_, T>,
    key: usize,
    sink: GradientSink<'_, T>,
    rows: Option<(&[T], &[T])>,
) {
    let (batch, token) = (unit.sequence.batch, unit.sequence.key_start + key);
    // SAFETY: each key belongs to one task.
    let (to_k, to_v) = unsafe {
        (
            sink.dk.row(batch, unit.kv_head, token, problem.dims.head_dim),
            sink.dv.row(batch, unit.kv_head, token, problem.dims.value_dim),
        )
    };
    match rows {
        Some((dk, dv)) => {
            problem.ops.store(dk, T::ONE, to_k);
            problem.ops.store(dv, T::ONE, to_v);
        }
        None => {
            to_k.fill(T::ZERO);
            to_v.fill(T::ZERO);
        }
    }
}

/// Sums the lines of all tasks into the gradient of the tables.
pub(super) fn reduce<T: Real>(problem: &Problem<'_, T>, lines: &[T], d_bias: &mut [T]) {
    let (entries, width, group) = (problem.toeplitz.bias.entries(), problem.line_width(), problem.dims.group());
    let segments = segments(problem);
    d_bias.par_chunks_exact_mut(entries).enumerate().for_each(|(head, to)| {
        to.fill(T::ZERO);
        let mut run = (None, 0.0);
        for index in 0..width {
            let Some(entry) = problem.line_difference(index).and_then(|d| problem.toeplitz.bias.entry(d)) else {
                continue;
            };
            if run.0 != Some(entry) {
                if let (Some(entry), sum) = run {
                    to[entry] += T::from_f64(sum);
                }
                run = (Some(entry), 0.0);
            }
            for sequence in 0..problem.sequences.len() {
                let unit = sequence * problem.dims.kv_heads + head / group;
                for segment in 0..segments {
                    run.1 += lines[((unit * segments + segment) * group + head % group) * width + index].to_f64();
                }
            }
        }
        if let (Some(entry), sum) = run {
            to[entry] += T::from_f64(sum);
        }
    });
}
