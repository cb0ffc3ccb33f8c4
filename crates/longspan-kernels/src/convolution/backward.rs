//! The gradient: 256 positions of a key/value head at a time, queries and keys that stand there together.

use std::ops::Range;

use super::problem::{Problem, ROWS};
use super::taps::{convolve, convolve_back, silu, tap_sums, through_gate};
use crate::call::{Arena, Cotangent, GradientSink, Scratch, Sequence, SharedRows, State, StateSink};
use crate::simd::Real;
use crate::simd::block::{add_products, add_scaled, multiply, set_products};
use crate::threads::{self, parallel};

/// What a task works on. Around its positions stand as many more, on one side or on both, as a query sees before its own.
struct Block<'s, T> {
    /// Products, from before the first position to after the last.
    products: &'s mut [T],
    /// What `a` gives of their sums, from the first position on.
    sums: &'s mut [T],
    d_sums: &'s mut [T],
    /// `a'`, then the gradients of products.
    rest: &'s mut [T],
    taps: &'s mut [T],
}

impl<'s, T: Real> Block<'s, T> {
    fn new(problem: &Problem<'_, T>, arena: &mut Arena<'s, T>) -> Self {
        let (row, before) = (problem.row, problem.convolution.before());
        Self {
            products: arena.take((ROWS + 2 * before) * row),
            sums: arena.take((ROWS + before) * row),
            d_sums: arena.take((ROWS + before) * row),
            rest: arena.take((ROWS + before) * row),
            taps: arena.take(problem.learned() * row),
        }
    }
}

/// The positions where a sequence has keys, ignored ones and those of an initial state included, or queries: in one range, or in two
/// that are apart.
fn spans(problem: &Problem<'_, impl Real>, sequence: &Sequence<'_>, past: isize) -> [Range<isize>; 2] {
    let offset = problem.call.mask.offset;
    let keys = -past..(sequence.keys + sequence.absent) as isize;
    let queries = offset..offset + sequence.queries as isize;
    if queries.is_empty() || keys.is_empty() || queries.start > keys.end || keys.start > queries.end {
        return [keys, queries];
    }
    [keys.start.min(queries.start)..keys.end.max(queries.end), 0..0]
}

/// Computes every gradient of a call; those of parameters and, where it is wanted, of the initial state go where `to` says.
pub(super) fn backward<T: Real>(
    problem: &Problem<'_, T>,
    cotangent: &Cotangent<'_, T>,
    sink: GradientSink<'_, T>,
    to: (&mut [&mut [T]], Option<&mut State<T>>),
    scratch: &mut Scratch<T>,
) {
    let (dims, row, learned) = (&problem.dims, problem.row, problem.learned());
    let (d_learned, d_initial) = to;
    let past = d_initial.as_ref().map_or(0, |_| problem.convolution.before() as isize);
    let mut pieces = Vec::new();
    for (n, sequence) in problem.sequences.iter().enumerate() {
        for span in spans(problem, sequence, past) {
            let end = span.end;
            pieces.extend(span.step_by(ROWS).map(|from| (n, from..end.min(from + ROWS as isize))));
        }
    }
    let tasks = pieces.len() * dims.kv_heads;
    let per_worker = Arena::measure(|arena| Block::new(problem, arena));
    let workers = threads::count().min(tasks);
    let (sums, blocks) = scratch.take(tasks * learned * row + workers * per_worker).split_at_mut(tasks * learned * row);
    {
        let places = Places {
            sink,
            d_initial: d_initial.map(StateSink::new),
            d_learned: SharedRows::new(sums, [learned * row, 0, 0]),
        };
        parallel(tasks, blocks, per_worker, |task, scratch| {
            let (sequence, positions) = pieces[task / dims.kv_heads].clone();
            let block = Block::new(problem, &mut Arena::new(scratch));
            let sequence = &problem.sequences[sequence];
            piece(problem, cotangent, &places, block, (sequence, task % dims.kv_heads, positions, task));
        });
    }
    d_learned.iter_mut().for_each(|to| to.fill(T::ZERO));
    let (taps, width) = (problem.convolution.width, dims.value_dim);
    for (task, sums) in sums.chunks_exact(learned * row.max(1)).take(tasks).enumerate() {
        let kv_head = task % dims.kv_heads;
        for (n, sum) in sums.chunks_exact(row).enumerate() {
            let (to, at) = if n < taps { (0, kv_head * taps + n) } else { (1, kv_head) };
            if let Some(to) = d_learned.get_mut(to) {
                add_scaled(&mut to[at * width..][..width], T::ONE, sum);
            }
        }
    }
}

struct Places<'a, T> {
    sink: GradientSink<'a, T>,
    d_initial: Option<StateSink<'a, T>>,
    /// For each task its part of the gradients of taps and bias.
    d_learned: SharedRows<'a, T>,
}

/// The gradients at some positions of a key/value head.
fn piece<T: Real>(
    problem: &Problem<'_, T>,
    cotangent: &Cotangent<'_, T>,
    places: &Places<'_, T>,
    block: Block<'_, T>,
    (sequence, kv_head, positions, task): (&Sequence<'_>, usize, Range<isize>, usize),
) {
    let (dims, row, before) = (&problem.dims, problem.row, problem.convolution.before());
    let width = dims.value_dim;
    let Block { products, sums, d_sums, rest, taps } = block;
    if width == 0 {
        return;
    }
    let rows = positions.len();
    // Queries up to here see keys at these positions.
    let end = positions.end + before as isize;
    let seeing = (rows + before) * row;
    let (sums, d_sums) = (&mut sums[..seeing], &mut d_sums[..seeing]);
    problem.load_taps(kv_head, taps);
    problem.load_products(sequence, kv_head, positions.start - before as isize..end, (products, row));
    convolve(products, taps, row, sums);
    let slopes = &mut rest[..seeing];
    if problem.convolution.silu {
        silu(sums, Some(slopes));
    }
    d_sums.fill(T::ZERO);
    for head in dims.heads_of(kv_head) {
        let queries = problem.call.q.rows(sequence.batch, head).skip(sequence.query_start);
        let d_out = cotangent.d_out.rows(sequence.batch, head).skip(sequence.query_start);
        for (at, position) in (positions.start..end).enumerate() {
            let Some(query) = problem.query(sequence, position) else { continue };
            let d_out = d_out.row(query, width);
            if !problem.convolution.gated {
                add_scaled(&mut d_sums[at * row..][..width], T::ONE, d_out);
                continue;
            }
            add_products(d_out, queries.row(query, width), &mut d_sums[at * row..][..width]);
            if at < rows {
                // SAFETY: each (batch, head, token) belongs to one position, so to one task.
                let dq = unsafe { places.sink.dq.row(sequence.batch, head, sequence.query_start + query, width) };
                set_products(d_out, &sums[at * row..], dq);
            }
        }
    }
    if problem.convolution.silu {
        multiply(d_sums, slopes);
    }
    // SAFETY: each task has a place of its own.
    let sums_of_taps = unsafe { places.d_learned.row(task, 0, 0, problem.learned() * row) };
    tap_sums(&d_sums[..rows * row], products, row, sums_of_taps);

    let d_products = &mut rest[..rows * row];
    convolve_back(d_sums, taps, row, d_products);
    let d_final = cotangent.final_state.map(|state| state.head(sequence.batch, kv_head)[0]);
    let keys = problem.call.k.rows(sequence.batch, kv_head).skip(sequence.key_start);
    let values = problem.call.v.rows(sequence.batch, kv_head).skip(sequence.key_start);
    let queries = problem.call.mask.offset..problem.call.mask.offset + sequence.queries as isize;
    for (position, d) in positions.zip(d_products.chunks_exact_mut(row)) {
        let d = &mut d[..width];
        let mut matters = position < queries.end && queries.start <= position + before as isize;
        let place = usize::try_from(position + before as isize - sequence.keys as isize).ok();
        if let Some((d_final, place)) = d_final.zip(place.filter(|&place| place < before)) {
            add_scaled(d, T::ONE, &d_final[place * width..]);
            matters = true;
        }
        let Ok(key) = usize::try_from(position) else {
            let place = usize::try_from(position + before as isize).ok();
            if let Some((d_initial, place)) = places.d_initial.as_ref().zip(place) {
                let unit = sequence.batch * dims.kv_heads + kv_head;
                // SAFETY: each row of a head's state belongs to one position, so to one task.
                let to = unsafe { d_initial.part(unit, 0, place * width, width) };
                to.copy_from_slice(d);
            }
            continue;
        };
        if key >= sequence.keys + sequence.absent {
            continue;
        }
        // SAFETY: each (batch, head, token) belongs to one position, so to one task.
        let (dk, dv) = unsafe { places.sink.key([sequence.batch, kv_head, sequence.key_start + key], dims) };
        if matters && sequence.has(key) {
            set_products(d, values.row(key, width), dk);
            through_gate(keys.row(key, dims.head_dim), d, dv);
        } else {
            // Not 0 times what may be no number.
            dk.fill(T::ZERO);
            dv.fill(T::ZERO);
        }
    }
}
