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
use super::features::{Lift, PositionSink};
use super::forward::Sink;
use super::problem::{CHUNK, Problem, Table, Unit, padded};
use crate::feature_map::FeatureMap;
use crate::mechanism::Cotangent;
use crate::real::Real;
use crate::scratch::{Arena, Scratch, parallel};
use crate::shape::ViewMut;

/// Largest finite entry, if there is one: NaN and infinities say nothing of scale and spread by themselves.
fn top<T: Real>(row: &[T]) -> Option<T> {
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
        keys * problem.head_width + 2 * padded::<T>(keys) + Lift::len(problem, CHUNK)
    }

    /// The pairs of one unit, and what forms its features.
    fn new(
        problem: &'x Problem<'a, T>,
        index: usize,
        table: Option<Table<'x, T>>,
        arena: &mut Arena<'x, T>,
    ) -> (Self, Lift<'x, T>) {
        let unit = problem.unit(index);
        let keys = unit.sequence.keys;
        let (width, head_dim) = (problem.head_width, problem.dims.head_dim);
        let k = arena.take(if problem.content { keys * width } else { 0 });
        let tops = arena.take(if problem.content && problem.map == FeatureMap::Exp { keys } else { 0 });
        let powers = arena.take(if unit.gamma == 1.0 { 0 } else { keys });
        let mut lift = Lift::new(problem, CHUNK, arena);
        lift.start(problem, &unit);
        if tops.is_empty() {
            if problem.content {
                for key in (0..keys).step_by(CHUNK) {
                    let (count, to) = (CHUNK.min(keys - key), &mut k[key * width..]);
                    problem.load_keys(&unit, key, count, T::ZERO, to, &mut lift);
                }
            }
        } else {
            for (key, highest) in tops.iter_mut().enumerate().filter(|(key, _)| !unit.ignores(*key)) {
                let found = top(unit.k.row(key, head_dim));
                *highest = found.unwrap_or(T::NEG_INFINITY);
                let (shift, to) = (found.unwrap_or(T::ZERO), &mut k[key * width..]);
                problem.load_keys(&unit, key, 1, shift, to, &mut lift);
            }
        }
        powers.iter_mut().enumerate().for_each(|(n, power)| *power = unit.decay(n));
        (Self { problem, unit, table, k, tops, powers }, lift)
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

    /// Writes the features of one query and returns the exponent that was subtracted.
    fn load_query(&self, head: usize, row: usize, to: &mut [T], lift: &mut Lift<'_, T>) -> T {
        let mut shift = [T::ZERO];
        self.problem.load_queries(&self.unit, head, row, 1, &mut shift, to, lift);
        shift[0]
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
        let depth = self.problem.layout.separate().unwrap_or(q.len());
        let content = pair.key.map_or(T::ZERO, |(key, factor)| factor * ops.dot(&q[..depth], key));
        pair.position.map_or(content, |(_, position, factor)| content + factor * ops.dot(q, position))
    }

    /// What a pair adds to the denominator, given its weight.
    fn share(&self, pair: &Pair<'_, T>, weight: T, q: &[T]) -> T {
        match (self.problem.layout.separate(), pair.key) {
            (Some(from), Some((key, factor))) => factor * self.problem.ops.dot(&q[from..], &key[from..]),
            _ => weight,
        }
    }
}

/// Keys of the longest sequence.
fn most_keys<T: Real>(problem: &Problem<'_, T>) -> usize {
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
        let (pairs, mut lift) = Pairs::new(problem, index, table, &mut arena);
        let (q, sum) = (arena.take(head_width), arena.take(value_width));
        let unit = &pairs.unit;
        for head in problem.heads(unit) {
            for row in 0..unit.sequence.queries {
                let (batch, token) = (unit.sequence.batch, unit.sequence.query_start + row);
                // SAFETY: each (batch, head, token) belongs to one unit, so to one task.
                let out = unsafe { sink.out.row(batch, head, token, value_dim) };
                let mut denominator = T::ZERO;
                if let Some(sight) = pairs.sight(row) {
                    let q_shift = pairs.load_query(head, row, q, &mut lift);
                    sum.fill(T::ZERO);
                    for key in pairs.keys(&sight) {
                        let pair = pairs.pair(&sight, head, key);
                        let weight = pairs.weight(&pair, q);
                        problem.ops.add_scaled(&mut sum[..value_dim], weight, unit.v.row(key, value_dim));
                        denominator += pairs.share(&pair, weight, q);
                    }
                    let reciprocal = T::ONE / denominator;
                    if !problem.attention.normalizes() {
                        problem.ops.store(sum, pairs.scale(&sight, q_shift), out);
                    } else if denominator.is_finite() && !(T::from_f64(4.0) * reciprocal).is_finite() {
                        // 0, or no normal number (four times its reciprocal overflows), which is what a long decay
                        // leaves: the row gives 0 and says so, so that its gradient is 0 too instead of infinite.
                        denominator = T::ZERO;
                        out.fill(T::ZERO);
                    } else if problem.gives_nothing(denominator) {
                        problem
                            .negative
                            .see(denominator, (batch * problem.dims.heads + head) * problem.dims.queries + token);
                        out.fill(T::ZERO);
                    } else {
                        problem.ops.store(sum, reciprocal, out);
                    }
                } else {
                    out.fill(T::ZERO);
                }
                if let Some(denominators) = sink.denominators {
                    // SAFETY: as above.
                    let place = unsafe { denominators.row(batch, head, token, 1) };
                    place[0] = if problem.attention.normalizes() { denominator } else { T::ONE };
                }
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
    parameters: &mut [&mut [T]],
    scratch: &mut Scratch<T>,
) {
    let (head_width, value_width) = (problem.head_width, problem.value_width);
    let (head_dim, value_dim) = (problem.dims.head_dim, problem.dims.value_dim);
    let (sums_len, units) = (problem.sums_len(), problem.units());
    let entry = problem.table_width() * head_width + sums_len;
    let per_unit = problem.dims.group() * entry;
    let per_worker =
        Pairs::len(problem) + (most_keys(problem) + 2) * head_width + (most_keys(problem) + 1) * value_width;
    let [query_positions, key_positions] = problem.position_lens();
    let shared =
        problem.table_len() + units * (per_unit + sums_len) + query_positions + key_positions + 4 * padded::<T>(1);
    let mut arena = Arena::new(scratch.take(shared + rayon::current_num_threads() * per_worker));
    let table = problem.table(&mut arena);
    let table_gradients = arena.take(units * per_unit);
    let key_sums = arena.take(units * sums_len);
    let (query_positions, key_positions) = (arena.take(query_positions), arena.take(key_positions));
    let ops = problem.ops;
    {
        let mut positions = problem.position_views(query_positions, key_positions);
        let sink = GradientSink { positions: positions.as_mut().map(|[q, k]| PositionSink::new(q, k)), ..sink };
        let mut key_sums = ViewMut::strided(&mut *key_sums, [sums_len, 0, 0]);
        let key_sums = key_sums.shared();
        let mut gradients = ViewMut::strided(&mut *table_gradients, [per_unit, 0, 0]);
        let gradients = gradients.shared();
        parallel(problem.units(), arena.rest(), per_worker, |index, scratch| {
            let mut arena = Arena::new(scratch);
            let (pairs, mut lift) = Pairs::new(problem, index, table, &mut arena);
            let unit = &pairs.unit;
            let keys = unit.sequence.keys;
            let (q, dq, d) = (arena.take(head_width), arena.take(head_width), arena.take(value_width));
            let (dk, dv) = (arena.take(keys * head_width), arena.take(keys * value_width));
            dk.fill(T::ZERO);
            dv.fill(T::ZERO);
            // SAFETY: each unit is one task's own.
            let (d_table, key_sums) =
                unsafe { (gradients.row(index, 0, 0, per_unit), key_sums.row(index, 0, 0, sums_len)) };
            d_table.fill(T::ZERO);
            key_sums.fill(T::ZERO);
            let separate = problem.layout.separate();
            // Keys from here on are seen by no row.
            let mut end = 0;
            for (n, head) in problem.heads(unit).enumerate() {
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
                    let q_shift = pairs.load_query(head, row, q, &mut lift);
                    ops.load(FeatureMap::Identity, T::ZERO, d_out.skip(row), 1, value_dim, None, d, value_width);
                    let mut c = T::ZERO;
                    if problem.attention.normalizes() {
                        let rows = unit.sequence.batch * problem.dims.heads + head;
                        let denominator = cotangent.denominators[rows * problem.dims.queries + token];
                        if problem.gives_nothing(denominator) {
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
                        let mut d_weight = ops.dot(unit.v.row(key, value_dim), d);
                        let dk = &mut dk[key * head_width..][..head_width];
                        if let (Some((features, factor)), Some(from)) = (pair.key, separate) {
                            ops.add_scaled(&mut dq[..from], d_weight * factor, features);
                            ops.add_scaled(&mut dk[..from], d_weight * factor, q);
                            ops.add_scaled(&mut dq[from..], c * factor, &features[from..]);
                            ops.add_scaled(&mut dk[from..], c * factor, &q[from..]);
                            continue;
                        }
                        d_weight += c;
                        if let Some((features, factor)) = pair.key {
                            ops.add_scaled(dq, d_weight * factor, features);
                            ops.add_scaled(dk, d_weight * factor, q);
                        }
                        if let Some((place, features, factor)) = pair.position {
                            ops.add_scaled(dq, d_weight * factor, features);
                            ops.add_scaled(&mut d_table[place * head_width..][..head_width], d_weight * factor, q);
                        }
                    }
                    let (sums, sink) = (&mut d_table[..sums_len], sink.positions);
                    let (raw, _) = problem.pull_back_queries(unit, head, row, 1, q, dq, sums, sink, &mut lift);
                    ops.store(raw, T::ONE, to);
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
                if !problem.content {
                    ops.store(d, T::ONE, to_k);
                    continue;
                }
                // With positions, what stands between raw keys and features has been overwritten by later ones.
                let shift = pairs.tops.get(key).copied().filter(|top| top.is_finite()).unwrap_or(T::ZERO);
                if problem.rotations.is_some() {
                    problem.load_keys(unit, key, 1, shift, q, &mut lift);
                }
                let features = &pairs.k[key * head_width..][..head_width];
                let (raw, _) = problem.pull_back_keys(unit, key, 1, features, d, key_sums, sink.positions, &mut lift);
                ops.store(raw, T::ONE, to_k);
            }
        });
    }
    let query_sums = |index: usize, n: usize| vec![&table_gradients[index * per_unit + n * entry..][..sums_len]];
    let unit_sums = |index: usize| vec![&key_sums[index * sums_len..][..sums_len]];
    let positions: [&[T]; 2] = [query_positions, key_positions];
    problem.write_position_gradients(&query_sums, &unit_sums, positions, parameters);
    if let (Some(d_table), Some(table)) = (parameters.first_mut(), &table) {
        reduce_table(problem, table, table_gradients, per_unit, &|_| 1, d_table);
    }
}
