//! Tables that end in one weight for all farther keys, in linear time: those keys enter as one sum `Σ k̄_j v⁺_jᵀ` a chunk
//! of rows, the nearer ones by tiles. Rows leave one sum `Σ q̄_i dN⁺_iᵀ` for each chunk of keys that they lie so far from.
//!
//! Sums run forward over what lies before and backward over what lies after; nothing is ever taken away from a sum.

use std::ops::Range;

use super::gradient::{self, KeyPass, KeyUnit};
use super::map_sums::{self, MapSums};
use super::problem::{Problem, Shared, TILE, Unit};
use super::state::{EXPONENT, StateGradients};
use super::tiled::{self, Far, GradientSink, KeyBlock, Sink, load_cotangent};
use crate::call::{Arena, Cotangent, Scratch, ViewMut};
use crate::feature_map::mapping::MapBuffers;
use crate::simd::Real;
use crate::simd::block::{add_column_sums, add_scaled, scale_by};
use crate::simd::product::Product;
use crate::simd::rows::padded;
use crate::threads::{self, parallel};

/// Rows or keys that share one sum. Two sums of 64 × 65 numbers for every 128 rows are as much memory as q, and a tile
/// that is 128 keys wider than the table reaches costs about what reading the sums does.
pub(super) const ROWS: usize = 128;

/// The keys that some rows meet by tiles; those before and after have one weight each.
fn range<T: Real>(problem: &Problem<'_, T>, unit: &Unit<'_, T>, rows: &Range<usize>) -> (isize, isize) {
    let bias = &problem.toeplitz.bias;
    let (first, last) = (problem.stands(rows.start), problem.stands(rows.end - 1));
    let (begin, keys) = (unit.begin(), unit.sequence.keys as isize);
    let from = if bias.far().is_some() { (first - bias.near() as isize + 1).clamp(begin, keys) } else { begin };
    let to = match bias.after() {
        _ if problem.causal => problem.end(unit, rows.end - 1),
        Some((distance, _)) => (last + distance).clamp(from, keys),
        None => keys,
    };
    (from, to)
}

/// The rows that some keys meet by tiles: those before have the weight of the farthest keys after, those from there on
/// that of the farthest keys before.
pub(super) fn near_rows<T: Real>(problem: &Problem<'_, T>, unit: &Unit<'_, T>, keys: &Range<isize>) -> Range<usize> {
    let (bias, rows) = (&problem.toeplitz.bias, unit.sequence.queries as isize);
    let end = match bias.far() {
        Some(_) => (bias.near() as isize + keys.end - 1 - problem.offset).clamp(0, rows),
        None => rows,
    };
    let start = match bias.after() {
        Some((distance, _)) if !problem.causal => (keys.start - distance - problem.offset + 1).clamp(0, end),
        _ => 0,
    };
    start as usize..end as usize
}

/// The rows of a chunk.
fn rows(chunk: usize, queries: usize) -> Range<usize> {
    chunk * ROWS..((chunk + 1) * ROWS).min(queries)
}

/// The keys of a chunk.
pub(super) fn keys<T>(unit: &Unit<'_, T>, chunk: usize) -> Range<isize>
where
    T: Real,
{
    let (first, end) = (unit.begin() + (chunk * ROWS) as isize, unit.sequence.keys as isize);
    first.min(end)..(first + ROWS as isize).min(end)
}

/// Sums on both sides of every chunk of several owners.
#[derive(Clone, Copy)]
pub(super) struct Sums<'s, T> {
    numbers: &'s [T],
    sides: usize,
    chunks: usize,
    head_width: usize,
    len: usize,
}

impl<'s, T: Real> Sums<'s, T> {
    /// One side's sum of a chunk, if there is anything in it, with the bias of its keys.
    pub fn get(&self, owner: usize, side: usize, chunk: usize, bias: Option<T>) -> Option<Far<'s, T>> {
        if side >= self.sides {
            return None;
        }
        let numbers = &self.numbers[((owner * self.sides + side) * self.chunks + chunk) * self.len..][..self.len];
        let (numbers, exponent) = numbers.split_at(self.len - padded::<T>(1));
        let (outer, features) = numbers.split_at(numbers.len() - self.head_width);
        let exponent = exponent[0];
        bias.filter(|_| exponent > T::NEG_INFINITY).map(|bias| Far { outer, features, exponent, bias })
    }
}

/// Sides on which keys may lie far from rows.
fn sides<T: Real>(problem: &Problem<'_, T>) -> usize {
    if problem.causal { 1 } else { 2 }
}

/// Numbers of one sum: `head_width × value_width`, then one a feature, then the exponent subtracted from both.
fn sum_len<T: Real>(problem: &Problem<'_, T>) -> usize {
    problem.head_width * (problem.value_width + 1) + padded::<T>(1)
}

/// Brings a sum to an exponent that is at least its own.
fn raise<T: Real>(sum: &mut [T], to: T) {
    let len = sum.len() - padded::<T>(1);
    let old = sum[len];
    if old < to {
        if old > T::NEG_INFINITY {
            scale_by(&mut sum[..len], (old - to).exp());
        }
        sum[len] = to;
    }
}

/// Makes a sum one of nothing.
fn clear<T: Real>(sum: &mut [T]) {
    let len = sum.len() - padded::<T>(1);
    sum.fill(T::ZERO);
    sum[len] = T::NEG_INFINITY;
}

/// Adds `Σ x_j y_jᵀ` of some rows of a block.
fn add_outer<T: Real>(problem: &Problem<'_, T>, x: &[T], y: &[T], count: usize, sum: &mut [T]) {
    Product::of_transposed(
        (x, problem.head_width),
        (y, problem.value_width),
        (sum, problem.value_width),
        [problem.head_width, problem.value_width, count],
    )
    .accumulate(true)
    .compute();
}

/// Adds `k̄_j v⁺_jᵀ` of the keys `from..to`.
fn add_keys<T: Real>(
    problem: &Problem<'_, T>,
    unit: &Unit<'_, T>,
    (from, to): (isize, isize),
    (keys, map): (&mut KeyBlock<'_, T>, &mut MapBuffers<'_, T>),
    sum: &mut [T],
) {
    let (head_width, value_width) = (problem.head_width, problem.value_width);
    let exponent = sum.len() - padded::<T>(1);
    let mut next = from;
    while next < to {
        keys.load(problem, unit, (next, to), map);
        raise(sum, keys.exponent);
        if keys.exponent < sum[exponent] {
            scale_by(&mut keys.k[..keys.count * head_width], (keys.exponent - sum[exponent]).exp());
        }
        let (outer, features) = sum.split_at_mut(head_width * value_width);
        add_outer(problem, keys.k, keys.v, keys.count, outer);
        add_column_sums(keys.k, head_width, keys.count, &mut features[..head_width]);
        next += keys.count as isize;
    }
}

/// Adds the tokens beyond the ring of an initial state.
fn add_past<T: Real>(problem: &Problem<'_, T>, unit: &Unit<'_, T>, sum: &mut [T]) {
    let Some(past) = unit.past.filter(|past| past.head.marks[EXPONENT] > T::NEG_INFINITY) else { return };
    let (value_dim, value_width) = (problem.dims.value_dim, problem.value_width);
    let exponent = sum.len() - padded::<T>(1);
    raise(sum, past.head.marks[EXPONENT]);
    let factor = (past.head.marks[EXPONENT] - sum[exponent]).exp();
    let (outer, features) = sum.split_at_mut(problem.head_width * value_width);
    for (feature, &number) in past.head.keys.iter().enumerate() {
        let row = &past.head.sum[feature * value_dim..][..value_dim];
        add_scaled(&mut outer[feature * value_width..][..value_dim], factor, row);
        features[feature] += factor * number;
    }
}

/// Sums the keys before and after each chunk of rows.
fn key_sums<'s, T: Real>(
    problem: &Problem<'_, T>,
    numbers: &'s mut [T],
    (scratch, per_worker): (&mut [T], usize),
) -> Sums<'s, T> {
    let (len, sides, chunks) = (sum_len(problem), sides(problem), problem.most_queries().div_ceil(ROWS));
    let mut places = ViewMut::strided(&mut *numbers, [len, 0, 0]);
    let places = places.shared();
    parallel(problem.units() * sides * chunks, scratch, per_worker, |task, scratch| {
        let (unit, side, chunk) = (problem.unit(task / chunks / sides), task / chunks % sides, task % chunks);
        let queries = unit.sequence.queries;
        // SAFETY: each sum is one task's own.
        let sum = unsafe { places.row(task, 0, 0, len) };
        clear(sum);
        if chunk * ROWS >= queries {
            return;
        }
        let range = |chunk: usize| range(problem, &unit, &rows(chunk, queries));
        let own = match side {
            0 if chunk == 0 => (unit.begin(), range(0).0),
            0 => (range(chunk - 1).0, range(chunk).0),
            _ if (chunk + 1) * ROWS < queries => (range(chunk).1, range(chunk + 1).1),
            _ => (range(chunk).1, unit.sequence.keys as isize),
        };
        if side == 0 && chunk == 0 {
            add_past(problem, &unit, sum);
        }
        let mut arena = Arena::new(scratch);
        let mut keys = KeyBlock::new(problem, false, &mut arena);
        let mut map = MapBuffers::new(&problem.mapping, TILE, &mut arena);
        add_keys(problem, &unit, own, (&mut keys, &mut map), sum);
    });
    accumulate(problem, numbers, problem.units(), chunks, |side, n| match side {
        // What lies before a chunk is all that lies before the one above it, and more.
        0 => (n, n - 1),
        _ => (chunks - 1 - n, chunks - n),
    });
    Sums { numbers, sides, chunks, head_width: problem.head_width, len }
}

/// Parts that the numbers of a sum are dealt to: a running sum has an order along the chunks and none across a sum.
const PARTS: usize = 8;

/// Adds to the sum of one chunk after the other that of its neighbour: `order(side, n)` says which, `1 ≤ n < chunks`.
fn accumulate<T: Real>(
    problem: &Problem<'_, T>,
    numbers: &mut [T],
    owners: usize,
    chunks: usize,
    order: impl Fn(usize, usize) -> (usize, usize) + Sync,
) {
    let (sides, len) = (sides(problem), sum_len(problem));
    let (end, all) = (len - padded::<T>(1), owners * sides);
    let part = padded::<T>(end.div_ceil(PARTS));
    let own: Vec<T> = numbers.chunks_exact(len).map(|sum| sum[end]).collect();
    let mut places = ViewMut::strided(&mut *numbers, [chunks * len, len, 1]);
    let places = places.shared();
    threads::share(0..all * PARTS, |task| {
        let (owner, from) = (task / PARTS, (task % PARTS * part).min(end));
        let width = part.min(end - from);
        // SAFETY: these numbers of an owner's sums are one task's own, and no two rows are the same.
        let row = |chunk: usize| unsafe { places.row(owner, chunk, from, width) };
        let mut running = None;
        for n in 1..chunks {
            let (to, before) = order(owner % sides, n);
            let old = running.unwrap_or(own[owner * chunks + before]);
            let new = own[owner * chunks + to];
            let highest = old.max(new);
            if new < highest {
                scale_by(row(to), factor(new, highest));
            }
            if old > T::NEG_INFINITY {
                add_scaled(row(to), factor(old, highest), row(before));
            }
            running = Some(highest);
        }
    });
    for owner in 0..all {
        for n in 1..chunks {
            let (to, before) = order(owner % sides, n);
            let sum = |chunk: usize| (owner * chunks + chunk) * len + end;
            numbers[sum(to)] = numbers[sum(to)].max(numbers[sum(before)]);
        }
    }
}

/// `e^{from − to}` for `from ≤ to`.
fn factor<T: Real>(from: T, to: T) -> T {
    if from == to { T::ONE } else { (from - to).exp() }
}

/// Numbers of all sums over keys.
fn key_sums_len<T: Real>(problem: &Problem<'_, T>) -> usize {
    problem.units() * sides(problem) * problem.most_queries().div_ceil(ROWS) * sum_len(problem)
}

/// The sums before and after one chunk of rows of a head.
fn fars<'s, T: Real>(
    problem: &Problem<'_, T>,
    sums: &Sums<'s, T>,
    owner: usize,
    head: usize,
    chunk: usize,
) -> [Option<Far<'s, T>>; 2] {
    [(0, problem.toeplitz.bias.far()), (1, problem.toeplitz.bias.after().map(|(_, entry)| entry))]
        .map(|(side, entry)| sums.get(owner, side, chunk, entry.map(|entry| problem.table(head)[entry])))
}

/// Calls `body` for every chunk of rows of every head, for those of a lane one after the other.
fn each_chunk<T: Real>(
    problem: &Problem<'_, T>,
    lanes: impl Fn(usize) -> usize,
    (scratch, per_worker): (&mut [T], usize),
    body: impl Fn(Unit<'_, T>, usize, usize, Range<usize>, &mut [T]) + Sync,
) {
    let (group, chunks) = (problem.dims.group(), problem.most_queries().div_ceil(ROWS));
    let lanes = lanes(chunks);
    parallel(problem.units() * group * lanes, scratch, per_worker, |task, scratch| {
        let unit = problem.unit(task / (group * lanes));
        let head = unit.kv_head * group + task / lanes % group;
        for chunk in (task % lanes..chunks).step_by(lanes) {
            let rows = rows(chunk, unit.sequence.queries);
            if !rows.is_empty() {
                body(unit, head, chunk, rows, scratch);
            }
        }
    });
}

/// Computes every output of a call.
pub(super) fn forward<T: Real>(problem: &Problem<'_, T>, sink: Sink<'_, T>, scratch: &mut Scratch<T>) {
    let per_worker = tiled::forward_len(problem);
    let workers = threads::count();
    let sums_len = key_sums_len(problem);
    let mut arena = Arena::new(scratch.take(problem.shared_len() + sums_len + workers * per_worker));
    let shared = problem.shared(&mut arena);
    let sums = arena.take(sums_len);
    let rest = arena.rest();
    let sums = key_sums(problem, sums, (&mut *rest, per_worker));
    each_chunk(
        problem,
        |chunks| chunks,
        (rest, per_worker),
        |unit, head, chunk, rows, scratch| {
            let range = range(problem, &unit, &rows);
            let fars = fars(problem, &sums, unit.index, head, chunk);
            tiled::far_chunk(problem, &shared, &unit, head, rows, range, fars, sink, scratch);
        },
    );
}

/// Working memory of a task that sums rows.
struct RowBlock<'s, T> {
    q: &'s mut [T],
    q_shifts: &'s mut [T],
    d: &'s mut [T],
    c: &'s mut [T],
    map: MapBuffers<'s, T>,
}

impl<'s, T: Real> RowBlock<'s, T> {
    fn new(problem: &Problem<'_, T>, arena: &mut Arena<'s, T>) -> Self {
        Self {
            q: arena.take(TILE * problem.head_width),
            q_shifts: arena.take(TILE),
            d: arena.take(TILE * problem.value_width),
            c: arena.take(TILE),
            map: MapBuffers::new(&problem.mapping, TILE, arena),
        }
    }
}

/// Adds `q̄_i dN⁺_iᵀ e^{−s_i}` of some rows of a head.
fn add_rows<T: Real>(
    problem: &Problem<'_, T>,
    shared: &Shared<'_, T>,
    cotangent: &Cotangent<'_, T>,
    (unit, head): (&Unit<'_, T>, usize),
    rows: Range<usize>,
    block: &mut RowBlock<'_, T>,
    sum: &mut [T],
) {
    let (head_width, value_width) = (problem.head_width, problem.value_width);
    let exponents = rows.clone().filter(|&row| problem.sees(unit, row)).map(|row| -shared.level(unit, head, row));
    let highest = exponents.fold(T::NEG_INFINITY, T::max);
    if highest == T::NEG_INFINITY {
        return;
    }
    raise(sum, highest);
    let exponent = sum[sum.len() - padded::<T>(1)];
    let (outer, features) = sum.split_at_mut(head_width * value_width);
    for first in rows.clone().step_by(TILE) {
        let range = first..(first + TILE).min(rows.end);
        let RowBlock { q, q_shifts, d, c, map } = &mut *block;
        problem.load_queries(unit, head, first, range.len(), q, q_shifts, map);
        load_cotangent(problem, shared, cotangent, unit, head, range.clone(), q_shifts, d, c);
        for (at, row) in range.clone().enumerate() {
            // A row that sees nothing has gradients of 0, whatever it counts from.
            let factor =
                if problem.sees(unit, row) { (-shared.level(unit, head, row) - exponent).exp() } else { T::ZERO };
            if factor != T::ONE {
                scale_by(&mut d[at * value_width..][..value_width], factor);
                c[at] *= factor;
            }
            add_scaled(&mut features[..head_width], c[at], &q[at * head_width..][..head_width]);
        }
        add_outer(problem, q, d, range.len(), outer);
    }
}

/// Chunks of sums over rows: one for each chunk of keys, and before them one of all rows, for the tokens beyond the ring
/// of an initial state.
fn row_chunks<T: Real>(problem: &Problem<'_, T>) -> usize {
    problem.most_keys().div_ceil(ROWS) + 1
}

/// Numbers of all sums over rows.
fn row_sums_len<T: Real>(problem: &Problem<'_, T>) -> usize {
    problem.units() * problem.dims.group() * sides(problem) * row_chunks(problem) * sum_len(problem)
}

/// Sums the rows that each chunk of keys is far from: chunk `n` of keys finds them in chunk `n + 1`.
fn row_sums<'s, T: Real>(
    problem: &Problem<'_, T>,
    shared: &Shared<'_, T>,
    cotangent: &Cotangent<'_, T>,
    numbers: &'s mut [T],
    (scratch, per_worker): (&mut [T], usize),
) -> Sums<'s, T> {
    let (len, sides, chunks, group) = (sum_len(problem), sides(problem), row_chunks(problem), problem.dims.group());
    let mut places = ViewMut::strided(&mut *numbers, [len, 0, 0]);
    let places = places.shared();
    let owners = problem.units() * group;
    parallel(owners * sides * chunks, scratch, per_worker, |task, scratch| {
        let (owner, side, chunk) = (task / chunks / sides, task / chunks % sides, task % chunks);
        let unit = problem.unit(owner / group);
        let near = |chunk: usize| match chunk {
            0 => 0..0,
            _ => near_rows(problem, &unit, &keys(&unit, chunk - 1)),
        };
        // SAFETY: each sum is one task's own.
        let sum = unsafe { places.row(task, 0, 0, len) };
        clear(sum);
        // Chunks beyond the last key are no one's.
        let used = (unit.sequence.keys as isize - unit.begin()) as usize;
        let used = used.div_ceil(ROWS) + 1;
        let own = match side {
            _ if chunk >= used || (chunk == 0 && !unit.has_far()) => 0..0,
            0 if chunk + 1 < used => near(chunk).end..near(chunk + 1).end,
            0 => near(chunk).end..unit.sequence.queries,
            _ if chunk == 0 => 0..0,
            _ => near(chunk - 1).start..near(chunk).start,
        };
        let head = unit.kv_head * group + owner % group;
        let mut block = RowBlock::new(problem, &mut Arena::new(scratch));
        add_rows(problem, shared, cotangent, (&unit, head), own, &mut block, sum);
    });
    accumulate(problem, numbers, owners, chunks, |side, n| match side {
        0 => (chunks - 1 - n, chunks - n),
        _ => (n, n - 1),
    });
    Sums { numbers, sides, chunks, head_width: problem.head_width, len }
}

/// Computes every gradient of a call.
pub(super) fn backward<T: Real>(
    problem: &Problem<'_, T>,
    cotangent: &Cotangent<'_, T>,
    sink: GradientSink<'_, T>,
    parameters: &mut [&mut [T]],
    states: StateGradients<'_, T>,
    scratch: &mut Scratch<T>,
) {
    let per_worker = tiled::query_len(problem)
        .max(gradient::buffers_len(problem, gradient::Beside::Sums))
        .max(Arena::measure(|arena| RowBlock::new(problem, arena)));
    let workers = threads::count();
    // Sums over keys are done with before those over rows begin.
    let sums_len = key_sums_len(problem).max(row_sums_len(problem));
    let lines = gradient::lines_len(problem);
    let map_len = padded::<T>(MapSums::len(problem));
    let len = problem.shared_len() + lines + map_len + sums_len + workers * per_worker;
    let mut arena = Arena::new(scratch.take(len));
    let shared = problem.shared(&mut arena);
    let (d_lines, map_numbers) = (arena.take(lines), arena.take(MapSums::len(problem)));
    d_lines.fill(T::ZERO);
    let mut view = MapSums::view(problem, &mut *map_numbers);
    let map_sums = MapSums::new(problem, view.shared());
    let numbers = arena.take(sums_len);
    let rest = arena.rest();
    let sums = key_sums(problem, &mut *numbers, (&mut *rest, per_worker));
    let lanes = |chunks| map_sums.lanes(chunks);
    each_chunk(problem, lanes, (&mut *rest, per_worker), |unit, head, chunk, rows, scratch| {
        let range = range(problem, &unit, &rows);
        let fars = fars(problem, &sums, unit.index, head, chunk);
        // SAFETY: the chunks of a lane are one task's.
        let memory = (unsafe { map_sums.of_queries(unit.index, head, chunk) }, scratch);
        tiled::far_query_chunk(problem, &shared, cotangent, &unit, head, rows, range, fars, sink, memory);
    });
    let sums = row_sums(problem, &shared, cotangent, &mut *numbers, (&mut *rest, per_worker));
    let units: Vec<KeyUnit> = (0..problem.units()).map(KeyUnit::whole).collect();
    let pass = KeyPass { problem, shared: &shared, cotangent, sink, rows: Some(&sums), states, sums: map_sums };
    pass.run(&units, d_lines, (rest, per_worker));
    let [d_bias, of_map @ ..] = parameters else { return };
    gradient::reduce(problem, d_lines, d_bias);
    map_sums::write(problem, map_numbers, of_map);
}
