//! Every pair of query and key, forward and backward: O(queries · keys) work, memory linear in the keys.
//!
//! A task takes one key/value head of one sequence with all its query heads, so that the gradients of keys and values
//! have one writer. Sums run over the keys in order, whatever the number of threads.
//!
//! Under [`FeatureMap::Exp`] a key is stored relative to its own largest entry, and every row counts its weights from
//! the largest entry among the keys that it sees and the table: no weight exceeds the head's width, and keys that a row
//! does not see have no influence on its rounding. Denominators are relative to that exponent and the query's own, and
//! [`backward`] forms the same exponents anew.

use super::backward::{GradientSink, reduce_table};
use super::forward::Sink;
use super::problem::{Problem, Table, Unit, padded};
use crate::feature_map::FeatureMap;
use crate::mechanism::Cotangent;
use crate::real::Real;
use crate::scratch::{Arena, Scratch, parallel};
use crate::shape::{Rows, ViewMut};

/// Largest finite entry, if there is one: NaN and infinities say nothing of scale and spread by themselves.
pub(super) fn top<T: Real>(row: &[T]) -> Option<T> {
    let top = row.iter().copied().fold(T::NEG_INFINITY, T::max);
    top.is_finite().then_some(top)
}

/// Whence the weights of a unit's pairs come.
struct Pairs<'x, 'a, T: 'static> {
    problem: &'x Problem<'a, T>,
    unit: Unit<'a, T>,
    table: Option<Table<'x, T>>,
    /// `φ(k)`, keys × head_width.
    k: &'x [T],
    /// The exponent subtracted from each key, −∞ for none; under [`FeatureMap::Exp`] only.
    tops: &'x [T],
    /// `γⁿ`, if there is decay.
    powers: &'x [T],
}

/// What one row sees.
#[derive(Clone, Copy)]
struct Sight<T> {
    /// The key that the row stands at.
    stands: isize,
    /// Keys before this one, but for those ignored.
    end: usize,
    /// Decay since the last of them.
    decay: T,
    /// The exponent that all weights are relative to, the query's own aside.
    shift: T,
    /// What brings the table's terms to that exponent.
    position_factor: T,
    /// What all weights are multiplied by.
    gain: T,
}

/// One pair's vectors and what multiplies their products with `φ(q)`.
struct Pair<'x, T> {
    key: Option<(&'x [T], T)>,
    /// The table's row, by number too.
    position: Option<(usize, &'x [T], T)>,
}

impl<'x, 'a, T: Real> Pairs<'x, 'a, T> {
    /// Numbers of scratch for the longest unit.
    fn len(problem: &Problem<'_, T>) -> usize {
        let keys = most_keys(problem);
        keys * problem.head_width + 2 * padded::<T>(keys)
    }

    fn new(problem: &'x Problem<'a, T>, index: usize, table: Option<Table<'x, T>>, arena: &mut Arena<'x, T>) -> Self {
        let unit = problem.unit(index);
        let keys = unit.sequence.keys;
        let (width, head_dim) = (problem.head_width, problem.dims.head_dim);
        let k = arena.take(if problem.content { keys * width } else { 0 });
        let tops = arena.take(if problem.content && problem.map == FeatureMap::Exp { keys } else { 0 });
        let powers = arena.take(if unit.gamma == 1.0 { 0 } else { keys });
        if tops.is_empty() {
            if problem.content {
                problem.ops.load(problem.map, T::ZERO, unit.k, keys, head_dim, unit.sequence.padding, k, width);
            }
        } else {
            for (key, highest) in tops.iter_mut().enumerate().filter(|(key, _)| !unit.ignores(*key)) {
                let found = top(unit.k.row(key, head_dim));
                *highest = found.unwrap_or(T::NEG_INFINITY);
                let (shift, to) = (found.unwrap_or(T::ZERO), &mut k[key * width..]);
                problem.ops.load(problem.map, shift, unit.k.skip(key), 1, head_dim, None, to, width);
            }
        }
        powers.iter_mut().enumerate().for_each(|(n, power)| *power = unit.decay(n));
        Self { problem, unit, table, k, tops, powers }
    }

    /// The keys that a row sees.
    fn keys(&self, sight: &Sight<T>) -> impl Iterator<Item = usize> {
        (0..sight.end).filter(|&key| !self.unit.ignores(key))
    }

    /// What row `row` sees, or none if it sees nothing.
    fn sight(&self, row: usize) -> Option<Sight<T>> {
        let problem = self.problem;
        let stands = row as isize + problem.offset;
        let end = if problem.causal { self.unit.clamp(stands + 1) } else { self.unit.sequence.keys };
        let mut sight = Sight { stands, end, decay: T::ONE, shift: T::ZERO, position_factor: T::ONE, gain: T::ONE };
        self.keys(&sight).next()?;
        if self.unit.gamma != 1.0 {
            // Decay comes with a causal mask alone, so the row stands at the last key that it sees or later.
            sight.decay = self.unit.decay((stands + 1 - end as isize) as usize);
        }
        if problem.map == FeatureMap::Exp {
            let mut shift = self.table.map_or(T::NEG_INFINITY, |table| table.shift);
            if problem.content {
                shift = self.keys(&sight).fold(shift, |shift, key| shift.max(self.tops[key]));
            }
            sight.shift = if shift.is_finite() { shift } else { T::ZERO };
            if let Some(table) = &self.table {
                sight.position_factor = (table.shift - sight.shift).exp();
            }
        }
        Some(sight)
    }

    /// The pair of a row and a key that it sees.
    fn pair(&self, sight: &Sight<T>, head: usize, key: usize) -> Pair<'x, T> {
        let problem = self.problem;
        let width = problem.head_width;
        let mut gain = sight.gain;
        if !self.powers.is_empty() {
            gain *= self.powers[sight.end - 1 - key] * sight.decay;
        }
        let features = problem.content.then(|| {
            let exponent = self.tops.get(key).copied().filter(|top| top.is_finite());
            let factor = exponent.map_or(gain, |top| gain * (top - sight.shift).exp());
            (&self.k[key * width..][..width], factor)
        });
        let position = self.table.zip(problem.radius).map(|(table, radius)| {
            let radius = radius as isize;
            let row = ((key as isize - sight.stands).clamp(-radius, radius) + radius) as usize;
            (row, &table.rows(head)[row * width..][..width], gain * sight.position_factor)
        });
        Pair { key: features, position }
    }

    /// What the exponents leave to be multiplied where nothing is divided.
    fn scale(&self, sight: &Sight<T>, q_shift: T) -> T {
        if self.problem.map == FeatureMap::Exp { (sight.shift + q_shift).exp() } else { T::ONE }
    }

    fn weight(&self, pair: &Pair<'_, T>, q: &[T]) -> T {
        let ops = self.problem.ops;
        let content = pair.key.map_or(T::ZERO, |(key, factor)| factor * ops.dot(q, key));
        pair.position.map_or(content, |(_, position, factor)| content + factor * ops.dot(q, position))
    }
}

/// Writes `φ(q)` of one row and returns the exponent that was subtracted.
pub(super) fn load_query<T: Real>(problem: &Problem<'_, T>, query: Rows<'_, T>, to: &mut [T]) -> T {
    let mut shift = T::ZERO;
    if problem.map == FeatureMap::Exp {
        // Any number cancels in the division; the row's largest entry keeps the features in (0, 1].
        shift = top(query.row(0, problem.dims.head_dim)).unwrap_or(T::ZERO);
    }
    problem.ops.load(problem.map, shift, query, 1, problem.dims.head_dim, None, to, problem.head_width);
    shift
}

/// Writes one row of a unit from its weighted sum of values and of ones, and the exponent that both are relative to.
pub(super) fn write_row<T: Real>(
    problem: &Problem<'_, T>,
    unit: &Unit<'_, T>,
    sink: &Sink<'_, T>,
    (head, row): (usize, usize),
    (sum, denominator, exponent): (&[T], T, T),
) {
    let (batch, token) = (unit.sequence.batch, unit.sequence.query_start + row);
    // SAFETY: each (batch, head, token) belongs to one unit, so to one task, which holds no other slice of it.
    let out = unsafe { sink.out.row(batch, head, token, problem.dims.value_dim) };
    // A denominator that is no normal number is what a long decay leaves: the row gives 0 and says so, so that its
    // gradient is 0 too instead of infinite.
    let denominator = if denominator.vanishes() { T::ZERO } else { denominator };
    if !problem.attention.normalize {
        let factor = if problem.map == FeatureMap::Exp { exponent.exp() } else { T::ONE };
        problem.ops.store(sum, factor, out);
    } else if denominator == T::ZERO {
        out.fill(T::ZERO);
    } else {
        problem.ops.store(sum, T::ONE / denominator, out);
    }
    if let Some(denominators) = sink.denominators {
        // SAFETY: as above.
        let place = unsafe { denominators.row(batch, head, token, 1) };
        place[0] = if problem.attention.normalize { denominator } else { T::ONE };
    }
}

/// Keys of the longest sequence.
pub(super) fn most_keys<T: Real>(problem: &Problem<'_, T>) -> usize {
    problem.sequences.iter().map(|sequence| sequence.keys).max().unwrap_or(0)
}

/// Computes every output of a call.
pub(super) fn forward<T: Real>(problem: &Problem<'_, T>, sink: Sink<'_, T>, scratch: &mut Scratch<T>) {
    let (head_width, value_width, value_dim) = (problem.head_width, problem.value_width, problem.dims.value_dim);
    let per_worker = Pairs::len(problem) + head_width + value_width;
    let workers = rayon::current_num_threads();
    let mut arena = Arena::new(scratch.take(problem.table_len() + workers * per_worker));
    let table = problem.table(&mut arena);
    parallel(problem.units(), arena.rest(), per_worker, |index, scratch| {
        let mut arena = Arena::new(scratch);
        let pairs = Pairs::new(problem, index, table, &mut arena);
        let (q, sum) = (arena.take(head_width), arena.take(value_width));
        let unit = &pairs.unit;
        for head in problem.heads(unit) {
            let queries = problem.queries(unit, head);
            for row in 0..unit.sequence.queries {
                let mut denominator = T::ZERO;
                let mut exponent = T::ZERO;
                sum.fill(T::ZERO);
                if let Some(sight) = pairs.sight(row) {
                    exponent = sight.shift + load_query(problem, queries.skip(row), q);
                    for key in pairs.keys(&sight) {
                        let weight = pairs.weight(&pairs.pair(&sight, head, key), q);
                        problem.ops.add_scaled(&mut sum[..value_dim], weight, unit.v.row(key, value_dim));
                        denominator += weight;
                    }
                }
                write_row(problem, unit, &sink, (head, row), (sum, denominator, exponent));
            }
        }
    });
}

/// Computes every gradient of a call. With the weights `p_ij = w_ij / D_i` of the normalised row and `c_i = −G_i·A_i`,
/// `dv_j = Σ_i p_ij G_i`, and what multiplies `φ(q_i)·φ(k_j)` in `p_ij` also multiplies `G_i·v_j + c_i` in the gradients
/// of both vectors. Dividing the weights rather than `G` keeps a small denominator from overflowing on its own.
pub(super) fn backward<T: Real>(
    problem: &Problem<'_, T>,
    cotangent: &Cotangent<'_, T>,
    sink: GradientSink<'_, T>,
    d_table: Option<&mut [T]>,
    scratch: &mut Scratch<T>,
) {
    let (head_width, value_width) = (problem.head_width, problem.value_width);
    let (head_dim, value_dim) = (problem.dims.head_dim, problem.dims.value_dim);
    let entry = problem.table_width() * head_width;
    let per_unit = problem.dims.group() * entry;
    let per_worker =
        Pairs::len(problem) + (most_keys(problem) + 2) * head_width + (most_keys(problem) + 1) * value_width;
    let shared = problem.table_len() + problem.units() * per_unit;
    let mut arena = Arena::new(scratch.take(shared + rayon::current_num_threads() * per_worker));
    let table = problem.table(&mut arena);
    let table_gradients = arena.take(problem.units() * per_unit);
    let ops = problem.ops;
    {
        let mut gradients = ViewMut::strided(&mut *table_gradients, [per_unit, 0, 0]);
        let gradients = gradients.shared();
        parallel(problem.units(), arena.rest(), per_worker, |index, scratch| {
            let mut arena = Arena::new(scratch);
            let pairs = Pairs::new(problem, index, table, &mut arena);
            let unit = &pairs.unit;
            let keys = unit.sequence.keys;
            let (q, dq, d) = (arena.take(head_width), arena.take(head_width), arena.take(value_width));
            let (dk, dv) = (arena.take(keys * head_width), arena.take(keys * value_width));
            dk.fill(T::ZERO);
            dv.fill(T::ZERO);
            // SAFETY: each unit is one task's own.
            let d_table = unsafe { gradients.row(index, 0, 0, per_unit) };
            d_table.fill(T::ZERO);
            // Keys from here on are seen by no row.
            let mut end = 0;
            for (n, head) in problem.heads(unit).enumerate() {
                let queries = problem.queries(unit, head);
                let [out, d_out] = [cotangent.out, cotangent.d_out]
                    .map(|view| view.rows(unit.sequence.batch, head).skip(unit.sequence.query_start));
                let d_table = &mut d_table[n * entry..][..entry];
                for row in 0..unit.sequence.queries {
                    let token = unit.sequence.query_start + row;
                    // SAFETY: each (batch, head, token) belongs to one unit, so to one task.
                    let to = unsafe { sink.dq.row(unit.sequence.batch, head, token, head_dim) };
                    let Some(mut sight) = pairs.sight(row) else {
                        to.fill(T::ZERO);
                        continue;
                    };
                    end = end.max(sight.end);
                    let q_shift = load_query(problem, queries.skip(row), q);
                    ops.load(FeatureMap::Identity, T::ZERO, d_out.skip(row), 1, value_dim, None, d, value_width);
                    let mut c = T::ZERO;
                    if problem.attention.normalize {
                        let rows = unit.sequence.batch * problem.dims.heads + head;
                        let denominator = cotangent.denominators[rows * problem.dims.queries + token];
                        if denominator.vanishes() {
                            // The row gave 0 whatever the inputs were.
                            to.fill(T::ZERO);
                            continue;
                        }
                        sight.gain = T::ONE / denominator;
                        c = -ops.dot(out.row(row, value_dim), d);
                    } else {
                        ops.scale(d, pairs.scale(&sight, q_shift));
                    }
                    dq.fill(T::ZERO);
                    for key in pairs.keys(&sight) {
                        let pair = pairs.pair(&sight, head, key);
                        ops.add_scaled(&mut dv[key * value_width..][..value_width], pairs.weight(&pair, q), d);
                        let d_weight = c + ops.dot(unit.v.row(key, value_dim), d);
                        if let Some((features, factor)) = pair.key {
                            ops.add_scaled(dq, d_weight * factor, features);
                            ops.add_scaled(&mut dk[key * head_width..][..head_width], d_weight * factor, q);
                        }
                        if let Some((place, features, factor)) = pair.position {
                            ops.add_scaled(dq, d_weight * factor, features);
                            ops.add_scaled(&mut d_table[place * head_width..][..head_width], d_weight * factor, q);
                        }
                    }
                    ops.pull_back(problem.map, queries.skip(row), q, dq, 1, head_dim, head_width);
                    ops.store(dq, T::ONE, to);
                }
            }
            for key in 0..keys + unit.sequence.absent {
                let token = unit.sequence.key_start + key;
                // SAFETY: all of a unit's keys belong to its task.
                let (to_k, to_v) = unsafe {
                    let (batch, head) = (unit.sequence.batch, unit.kv_head);
                    (sink.dk.row(batch, head, token, head_dim), sink.dv.row(batch, head, token, value_dim))
                };
                if key >= end || unit.ignores(key) {
                    // What stands in such a key may be NaN, which no slope of 0 would hold back.
                    to_k.fill(T::ZERO);
                    to_v.fill(T::ZERO);
                    continue;
                }
                ops.store(&dv[key * value_width..], T::ONE, to_v);
                let d = &mut dk[key * head_width..][..head_width];
                if problem.content {
                    let features = &pairs.k[key * head_width..][..head_width];
                    ops.pull_back(problem.map, unit.k.skip(key), features, d, 1, head_dim, head_width);
                }
                ops.store(d, T::ONE, to_k);
            }
        });
    }
    if let (Some(d_table), Some(table)) = (d_table, &table) {
        reduce_table(problem, table, table_gradients, per_unit, &|_| 1, d_table);
    }
}
