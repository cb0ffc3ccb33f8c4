//! Tables that end in one weight for all farther keys, in linear time: those keys enter as one sum `Σ k̄_j v⁺_jᵀ` a strip
//! of rows, the nearer ones by tiles.
//!
//! Sums run forward over the keys before and backward over the keys after; nothing is ever taken away from a sum.

use super::problem::{Problem, Unit};
use super::tiled::{self, Far, KeyBlock, Sink};
use crate::real::Real;
use crate::scratch::{Arena, Scratch, padded, parallel};
use crate::shape::ViewMut;
use crate::simd::block::{Band, Product};

/// Rows that share one sum. Two sums of 64 × 65 numbers for every 128 rows are as much memory as q, and a tile that is
/// 128 keys wider than the table reaches costs about what reading the sums does.
pub(super) const ROWS: usize = 128;

/// The keys `from..to` that rows meet by tiles; those before and after have one weight each.
fn span<T: Real>(problem: &Problem<'_, T>, unit: &Unit<'_, T>, rows: &std::ops::Range<usize>) -> (isize, isize) {
    let bias = &problem.toeplitz.bias;
    let (first, last) = (problem.stands(rows.start), problem.stands(rows.end - 1));
    let keys = unit.sequence.keys as isize;
    let from = if bias.far().is_some() { (first - bias.near() as isize + 1).clamp(0, keys) } else { 0 };
    let to = match bias.after() {
        _ if problem.causal => problem.end(unit, rows.end - 1),
        Some((distance, _)) => (last + distance).clamp(from, keys),
        None => keys,
    };
    (from, to)
}

/// The rows of a strip.
fn rows(strip: usize, queries: usize) -> std::ops::Range<usize> {
    strip * ROWS..((strip + 1) * ROWS).min(queries)
}

/// Numbers of one sum: `head_width × value_width`, then `Σ k̄_j`, then the exponent subtracted from both.
fn sum_len<T: Real>(problem: &Problem<'_, T>) -> usize {
    problem.head_width * (problem.value_width + 1) + padded::<T>(1)
}

/// Adds what is relative to `exponent` and stands in `add` to a sum.
fn merge<T: Real>(problem: &Problem<'_, T>, sum: &mut [T], add: &[T]) {
    let len = problem.head_width * (problem.value_width + 1);
    let (old, new) = (sum[len], add[len]);
    if new == T::NEG_INFINITY {
        return;
    }
    if old < new {
        if old > T::NEG_INFINITY {
            problem.ops.scale(&mut sum[..len], (old - new).exp());
        }
        sum[len] = new;
    }
    let factor = if new < old { (new - old).exp() } else { T::ONE };
    problem.ops.add_scaled(&mut sum[..len], factor, &add[..len]);
}

/// Sums `k̄_j v⁺_jᵀ` over the keys `from..to`.
fn add_keys<T: Real>(
    problem: &Problem<'_, T>,
    unit: &Unit<'_, T>,
    (from, to): (isize, isize),
    keys: &mut KeyBlock<'_, T>,
    sum: &mut [T],
) {
    let (head_width, value_width) = (problem.head_width, problem.value_width);
    let len = head_width * (value_width + 1);
    sum.fill(T::ZERO);
    sum[len] = T::NEG_INFINITY;
    let mut next = from;
    while next < to {
        keys.load(problem, unit, next, to);
        let (old, new) = (sum[len], keys.exponent);
        if old < new {
            if old > T::NEG_INFINITY {
                problem.ops.scale(&mut sum[..len], (old - new).exp());
            }
            sum[len] = new;
        } else if new < old {
            problem.ops.scale(&mut keys.k[..keys.count * head_width], (new - old).exp());
        }
        let (outer, features) = sum.split_at_mut(head_width * value_width);
        problem.ops.product(&mut Product {
            a: keys.k,
            a_row: 1,
            a_column: head_width,
            b: keys.v,
            b_row: value_width,
            c: outer,
            c_row: value_width,
            rows: head_width,
            columns: value_width,
            depth: keys.count,
            accumulate: true,
            a_band: Band::ALL,
            c_band: Band::ALL,
        });
        problem.ops.add_column_sums(keys.k, head_width, keys.count, &mut features[..head_width]);
        next += keys.count as isize;
    }
}

/// Computes every output of a call.
pub(super) fn forward<T: Real>(problem: &Problem<'_, T>, sink: Sink<'_, T>, scratch: &mut Scratch<T>) {
    let per_worker = tiled::forward_len(problem).max(KeyBlock::len(problem, false));
    let workers = rayon::current_num_threads();
    let (strips, sum_len) = (problem.most_queries().div_ceil(ROWS), sum_len(problem));
    let sides = if problem.causal { 1 } else { 2 };
    let units = problem.units();
    let sums_len = units * sides * strips * sum_len;
    let mut arena = Arena::new(scratch.take(problem.shared_len() + sums_len + workers * per_worker));
    let shared = problem.shared(&mut arena);
    let sums = arena.take(sums_len);
    let rest = arena.rest();

    {
        let mut places = ViewMut::strided(&mut *sums, [sum_len, 0, 0]);
        let places = places.shared();
        parallel(units * sides * strips, rest, per_worker, |task, scratch| {
            let (unit, side, strip) = (problem.unit(task / strips / sides), task / strips % sides, task % strips);
            let queries = unit.sequence.queries;
            // SAFETY: each sum is one task's own.
            let sum = unsafe { places.row(task, 0, 0, sum_len) };
            let keys = &mut KeyBlock::new(problem, false, &mut Arena::new(scratch));
            if strip * ROWS >= queries {
                return add_keys(problem, &unit, (0, 0), keys, sum);
            }
            let span = |strip: usize| span(problem, &unit, &rows(strip, queries));
            let own = match side {
                0 => (if strip == 0 { 0 } else { span(strip - 1).0 }, span(strip).0),
                _ if (strip + 1) * ROWS < queries => (span(strip).1, span(strip + 1).1),
                _ => (span(strip).1, unit.sequence.keys as isize),
            };
            add_keys(problem, &unit, own, keys, sum);
        });
        // What lies before a strip is all that lies before the one above it, and more.
        parallel(units * sides, rest, padded::<T>(1), |task, _| {
            // SAFETY: each side of a unit is one task's own, and no two rows are the same.
            let sum = |strip: usize| unsafe { places.row(task * strips + strip, 0, 0, sum_len) };
            for n in 1..strips {
                let (to, from) = if task % sides == 0 { (n, n - 1) } else { (strips - 1 - n, strips - n) };
                merge(problem, sum(to), sum(from));
            }
        });
    }

    let (sums, group) = (&*sums, problem.dims.group());
    parallel(units * group * strips, rest, per_worker, |task, scratch| {
        let unit = problem.unit(task / (group * strips));
        let (head, strip) = (unit.kv_head * group + task / strips % group, task % strips);
        let rows = rows(strip, unit.sequence.queries);
        if rows.is_empty() {
            return;
        }
        let table = &problem.call.parameters[0][head * problem.toeplitz.bias.entries()..];
        let far = |side: usize, entry: Option<usize>| {
            let numbers = &sums[((unit.index * sides + side) * strips + strip) * sum_len..][..sum_len];
            let (sum, rest) = numbers.split_at(problem.head_width * problem.value_width);
            let exponent = rest[problem.head_width];
            entry.filter(|_| exponent > T::NEG_INFINITY).map(|entry| Far {
                sum,
                keys: &rest[..problem.head_width],
                exponent,
                bias: table[entry],
            })
        };
        let before = far(0, problem.toeplitz.bias.far());
        let after = if sides == 2 { far(1, problem.toeplitz.bias.after().map(|(_, entry)| entry)) } else { None };
        let span = span(problem, &unit, &rows);
        tiled::far_strip(problem, &shared, &unit, head, rows, span, [before, after], sink, scratch);
    });
}
