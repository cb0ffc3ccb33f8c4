//! Gradients of keys, values and biases by tiles: a task takes chunks of keys of one unit and passes over the rows.
//!
//! With `p_ij = e^{b_δ} φ(q_i)·φ(k_j)` and `E_ij = dN⁺_i·v⁺_j`: `dv_j = Σ_i p_ij dN_i`, `dk̄_j = Σ_i e^{b_δ} E_ij q̄_i`,
//! `db_δ = Σ_{j−i=δ} p_ij E_ij`.

use super::map_sums::MapSums;
use super::piecewise::{self, Sums};
use super::problem::{Block, CHUNK, Problem, Shared, TILE, Unit};
use super::state::{EXPONENT, Last, StateGradients};
use super::tiled::{Far, GradientSink, KeyBlock, Weights, add_keys, each_run, load_cotangent, scores, value_products};
use crate::call::{Arena, Cotangent, ViewMut};
use crate::feature_map::mapping::MapBuffers;
use crate::feature_map::rows::Side;
use crate::simd::block::{add_scaled, all_finite, dot, multiply, store};
use crate::simd::product::{Band, Product, zero_outside};
use crate::simd::rows::{Rows, padded};
use crate::simd::{Real, dispatch};
use crate::threads::{self, parallel};
use crate::toeplitz::weigh::WeighByDistance;

/// At most so many tasks share the keys of a unit, each with a line of biases' gradients of its own: that bounds their
/// memory, and the order of sums does not depend on the number of threads.
const SEGMENTS: usize = 8;

/// Tasks that share the keys of a unit.
pub(super) fn segments<T: Real>(problem: &Problem<'_, T>) -> usize {
    problem.most_keys().div_ceil(CHUNK).clamp(1, SEGMENTS)
}

/// Numbers of one line of biases' gradients: of each index of the line, then of the weights of the farthest keys before
/// and after where they are met by sums.
pub(super) fn line_len<T: Real>(problem: &Problem<'_, T>) -> usize {
    problem.line_width() + 2
}

/// Numbers of the biases' gradients of all tasks, `[units, segments, group, line_len]`.
pub(super) fn lines_len<T: Real>(problem: &Problem<'_, T>) -> usize {
    padded::<T>(problem.units() * segments(problem) * problem.dims.group() * line_len(problem))
}

/// Key blocks that are kept while rows pass by.
const KEPT: usize = CHUNK / TILE;

/// Working memory of a task.
pub(super) struct Buffers<'s, T> {
    pub q: &'s mut [T],
    pub q_shifts: &'s mut [T],
    d: &'s mut [T],
    c: &'s mut [T],
    tile: &'s mut [T],
    products: &'s mut [T],
    pub keys: [KeyBlock<'s, T>; KEPT],
    pub dk: [&'s mut [T]; KEPT],
    pub dv: [&'s mut [T]; KEPT],
    weights: Weights<'s, T>,
    /// A sum turned, and what a block makes of it.
    turned: &'s mut [T],
    far_tile: &'s mut [T],
    /// The gradient of the final state's sums, its rows filled up with 0.
    last: &'s mut [T],
    pub map: MapBuffers<'s, T>,
    /// Where the gradient of a learned map is summed.
    map_sums: &'s mut [T],
    /// Gradients of a chunk of rows, where they are taken in the same pass.
    pub dq: &'s mut [T],
}

/// What tasks compute beside the gradients of keys, values and biases from tiles.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Beside {
    Nothing,
    /// What sums of far rows give.
    Sums,
    /// The gradients of queries.
    Queries,
}

/// Numbers of one task's working memory.
pub(super) fn buffers_len<T: Real>(problem: &Problem<'_, T>, beside: Beside) -> usize {
    Arena::measure(|arena| Buffers::new(problem, beside, &mut [], arena))
}

impl<'s, T: Real> Buffers<'s, T> {
    pub fn new(problem: &Problem<'_, T>, beside: Beside, map_sums: &'s mut [T], arena: &mut Arena<'s, T>) -> Self {
        let sums = usize::from(beside == Beside::Sums);
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
            turned: arena.take(sums * problem.head_width * problem.value_width),
            far_tile: arena.take(sums * TILE * problem.head_width.max(problem.value_width)),
            last: arena.take(sums * problem.head_width * (problem.value_width + 1)),
            map: MapBuffers::new(&problem.mapping, TILE, arena),
            map_sums,
            dq: arena.take(if beside == Beside::Queries { CHUNK * problem.head_width } else { 0 }),
        }
    }
}

/// The pass over the keys: gradients of keys, values and biases, and that of an initial state.
pub(super) struct KeyPass<'x, 'a, T: 'static> {
    pub problem: &'x Problem<'a, T>,
    pub shared: &'x Shared<'x, T>,
    pub cotangent: &'x Cotangent<'x, T>,
    pub sink: GradientSink<'x, T>,
    /// The rows that lie far from each chunk of keys; without them all rows are met by tiles.
    pub rows: Option<&'x Sums<'x, T>>,
    pub states: StateGradients<'x, T>,
    pub sums: MapSums<'x, T>,
}

/// A unit of the pass, and what of it is wanted if not all.
pub(super) struct KeyUnit {
    pub index: usize,
    pub left: Option<Left>,
}

impl KeyUnit {
    /// All of a unit.
    pub fn whole(index: usize) -> Self {
        Self { index, left: None }
    }
}

/// The keys and distances of a unit whose gradients transforms leave to tiles. Not for images.
pub(super) struct Left {
    keys: Counts,
    /// By head, indices of its line.
    distances: Vec<Counts>,
}

/// How many of the first `n` are marked, for each `n`.
struct Counts(Vec<u32>);

impl Counts {
    fn new(marks: impl Iterator<Item = bool>) -> Self {
        let mut count = 0;
        Self(
            std::iter::once(0)
                .chain(marks.map(|mark| {
                    count += u32::from(mark);
                    count
                }))
                .collect(),
        )
    }

    fn any(&self, from: usize, len: usize) -> bool {
        let last = self.0.len() - 1;
        self.0[(from + len).min(last)] > self.0[from.min(last)]
    }
}

impl Left {
    /// From marks for each key, and for each index of the line of each head.
    pub fn new(keys: &[bool], distances: &[Vec<bool>]) -> Self {
        let distances = distances.iter().map(|marks| Counts::new(marks.iter().copied())).collect();
        Self { keys: Counts::new(keys.iter().copied()), distances }
    }

    /// Whether there is anything to do.
    pub fn any(&self) -> bool {
        std::iter::once(&self.keys).chain(&self.distances).any(|counts| counts.any(0, counts.0.len()))
    }

    /// Whether an index of the `n`-th head's line is left.
    pub fn distance(&self, n: usize, index: usize) -> bool {
        self.distances[n].any(index, 1)
    }

    /// Whether any of `count` keys from `first` on is left: tiles then take the whole block.
    pub fn keys(&self, first: usize, count: usize) -> bool {
        self.keys.any(first, count)
    }

    fn keys_of<T>(&self, block: &KeyBlock<'_, T>) -> bool {
        self.keys(block.from as usize, block.count)
    }

    /// Whether any distance between a block of keys and of rows is left.
    fn distances_of<T: Real>(
        &self,
        problem: &Problem<'_, T>,
        n: usize,
        keys: &KeyBlock<'_, T>,
        (stands, rows): (isize, usize),
    ) -> bool {
        let first = problem.line_index(keys.from - (stands + rows as isize - 1)).max(0);
        self.distances[n].any(first as usize, keys.count + rows - 1)
    }
}

/// Where a task stands.
pub(super) struct Chunk<'x, 'a, T> {
    pub unit: Unit<'a, T>,
    pub left: Option<&'x Left>,
    /// The chunk of the unit's keys.
    pub index: usize,
    pub keys: std::ops::Range<isize>,
    /// What the final state gives.
    pub last: Option<Last<'x, T>>,
}

impl<T: Real> KeyPass<'_, '_, T> {
    /// Computes the gradients of all keys and values of some units, and adds those of the biases to `lines`.
    pub fn run(&self, units: &[KeyUnit], lines: &mut [T], (scratch, per_worker): (&mut [T], usize)) {
        let problem = self.problem;
        let segments = segments(problem);
        let per_task = problem.dims.group() * line_len(problem);
        let mut lines = ViewMut::strided(lines, [per_task, 0, 0]);
        let lines = lines.shared();
        let mut lasts: Vec<Option<Last<'_, T>>> = vec![None; units.len()];
        if let Some(state) = self.states.last {
            threads::share(lasts.iter_mut().zip(units), |(last, unit)| {
                *last = Some(Last::new(problem, &problem.unit(unit.index), state));
            });
        }
        let (chunk_len, beside) = match self.rows {
            Some(_) => (piecewise::ROWS, Beside::Sums),
            None => (CHUNK, Beside::Nothing),
        };
        parallel(units.len() * segments, scratch, per_worker, |task, scratch| {
            let KeyUnit { index, left } = &units[task / segments];
            let (unit, left, segment) = (problem.unit(*index), left.as_ref(), task % segments);
            // SAFETY: each task has lines of its own.
            let lines = unsafe { lines.row(unit.index * segments + segment, 0, 0, per_task) };
            // SAFETY: so is its sum.
            let map_sums = unsafe { self.sums.of_keys(unit.index, segment) };
            let mut buffers = Buffers::new(problem, beside, map_sums, &mut Arena::new(scratch));
            let last = lasts[task / segments];
            if let Some(last) = &last {
                self.load_last(last, &mut buffers);
            }
            let (begin, keys) = (unit.begin(), unit.sequence.keys as isize);
            // Chunks by turns, because later keys are seen by fewer rows.
            for index in (segment..((keys - begin) as usize).div_ceil(chunk_len)).step_by(segments) {
                let from = begin + (index * chunk_len) as isize;
                let chunk = Chunk { unit, left, index, keys: from..(from + chunk_len as isize).min(keys), last };
                // What is beyond the final ring does not share a block, and so an exponent, with what is not.
                let ring_from = last.map_or(begin, |last| last.ring_from);
                let mut from = from;
                while from < chunk.keys.end {
                    let end = if from < ring_from { ring_from.min(chunk.keys.end) } else { chunk.keys.end };
                    from = self.key_blocks(&chunk, (from, end), lines, &mut buffers);
                }
            }
            if segment == 0 && left.is_none() {
                self.past(&unit, last.as_ref(), lines);
                for key in unit.sequence.keys..unit.sequence.keys + unit.sequence.absent {
                    write(problem, &unit, key, self.sink, None);
                }
            }
        });
    }

    /// Lays out the gradient of the final state's sums as sums of rows are.
    fn load_last(&self, last: &Last<'_, T>, buffers: &mut Buffers<'_, T>) {
        let (problem, value_dim) = (self.problem, self.problem.dims.value_dim);
        let (outer, features) = match buffers.last.len() {
            // A bias without a far end has no sums.
            0 => return,
            _ => buffers.last.split_at_mut(problem.head_width * problem.value_width),
        };
        outer.fill(T::ZERO);
        features.fill(T::ZERO);
        features[..last.head.keys.len()].copy_from_slice(last.head.keys);
        for feature in 0..last.head.keys.len() {
            outer[feature * problem.value_width..][..value_dim]
                .copy_from_slice(&last.head.sum[feature * value_dim..][..value_dim]);
        }
    }

    /// The sum of the rows far on one side of a chunk of keys (chunk 0 is what lies before all keys).
    fn far(&self, unit: &Unit<'_, T>, head: usize, side: usize, chunk: usize) -> Option<Far<'_, T>> {
        let (problem, group) = (self.problem, self.problem.dims.group());
        let bias = &problem.toeplitz.bias;
        let entry = if side == 0 { bias.far() } else { bias.after().map(|(_, entry)| entry) };
        let bias = entry.map(|entry| problem.table(head)[entry]);
        self.rows?.get(unit.index * group + head % group, side, chunk, bias)
    }

    /// The gradient of the initial state's sums, and what they add to that of their bias.
    fn past(&self, unit: &Unit<'_, T>, last: Option<&Last<'_, T>>, lines: &mut [T]) {
        let problem = self.problem;
        let Some(past) = unit.past.filter(|past| past.head.marks[EXPONENT] > T::NEG_INFINITY) else { return };
        let (value_dim, value_width) = (problem.dims.value_dim, problem.value_width);
        let features = past.head.keys.len();
        // SAFETY: one task a unit comes here.
        let mut parts = self.states.first.as_ref().map(|first| unsafe {
            (first.part(unit.index, 0, 0, features * value_dim), first.part(unit.index, 1, 0, features))
        });
        if let (Some((sum, keys)), Some(last)) = (&mut parts, last) {
            let factor = (past.head.marks[EXPONENT] - last.exponent).exp();
            store(last.head.sum, factor, sum);
            store(last.head.keys, factor, keys);
        }
        for (n, head) in problem.heads(unit).enumerate() {
            let Some(far) = self.far(unit, head, 0, 0) else { continue };
            let weight = ((far.exponent + past.head.marks[EXPONENT]) + far.bias).exp();
            let mut dots = T::ZERO;
            for feature in 0..features {
                let outer = &far.outer[feature * value_width..][..value_dim];
                dots += dot(&past.head.sum[feature * value_dim..][..value_dim], outer);
                dots += past.head.keys[feature] * far.features[feature];
                if let Some((sum, keys)) = &mut parts {
                    add_scaled(&mut sum[feature * value_dim..][..value_dim], weight, outer);
                    keys[feature] += weight * far.features[feature];
                }
            }
            lines[n * line_len(problem) + problem.line_width()] += weight * dots;
        }
    }

    /// Adds to the gradients of a block of keys and of the biases what far rows give, and then what the final state does.
    fn add_fars(&self, chunk: &Chunk<'_, '_, T>, which: usize, lines: &mut [T], buffers: &mut Buffers<'_, T>) {
        let (problem, unit) = (self.problem, &chunk.unit);
        let Buffers { keys, dk, dv, turned, far_tile, last, .. } = buffers;
        let (keys, dk, dv) = (&keys[which], &mut *dk[which], &mut *dv[which]);
        let mut add = |far: Far<'_, T>| {
            // At most a little above 0: each of these rows counts from at least what it sees here.
            let weight = ((far.exponent + keys.exponent) + far.bias).exp();
            let memory = (&mut **turned, &mut **far_tile);
            let d_bias = far.add_features(problem, weight, (keys.v, None), keys.count, keys.k, dk, memory);
            far.add_values(problem, weight, keys.k, keys.count, dv, far_tile);
            d_bias
        };
        for (n, head) in problem.heads(unit).enumerate() {
            for side in 0..2 {
                if let Some(far) = self.far(unit, head, side, chunk.index + 1) {
                    lines[n * line_len(problem) + problem.line_width() + side] += add(far);
                }
            }
        }
        if let Some(ends) = chunk.last.filter(|ends| keys.from < ends.ring_from && ends.exponent > T::NEG_INFINITY) {
            let (outer, features) = last.split_at(problem.head_width * problem.value_width);
            add(Far { outer, features, exponent: -ends.exponent, bias: T::ZERO });
        }
    }

    /// Computes the gradients of the next few blocks of keys from `from` on and before `end`; returns where they end.
    fn key_blocks(
        &self,
        chunk: &Chunk<'_, '_, T>,
        (from, end): (isize, isize),
        lines: &mut [T],
        buffers: &mut Buffers<'_, T>,
    ) -> isize {
        let problem = self.problem;
        let unit = &chunk.unit;
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        let rows = unit.sequence.queries;
        let mut loaded = 0;
        let mut next = from;
        while next < end && loaded < KEPT {
            buffers.keys[loaded].load(problem, unit, (next, end), &mut buffers.map);
            buffers.dk[loaded].fill(T::ZERO);
            buffers.dv[loaded].fill(T::ZERO);
            next += buffers.keys[loaded].count as isize;
            loaded += 1;
        }
        // Rows before the first see none of the keys.
        let first = if problem.causal { (from - problem.offset).clamp(0, rows as isize) as usize } else { 0 };
        let near = if self.rows.is_some() { piecewise::near_rows(problem, unit, &chunk.keys) } else { 0..rows };
        let near = first.max(near.start)..near.end;
        for (n, head) in problem.heads(unit).enumerate() {
            let d_line = &mut lines[n * line_len(problem)..][..problem.line_width()];
            self.tiles(chunk, (n, head), near.clone(), loaded, (d_line, 0), buffers);
        }
        let seen = if rows == 0 { unit.begin() } else { problem.end(unit, rows - 1) };
        for which in 0..loaded {
            if chunk.left.is_some_and(|left| !left.keys_of(&buffers.keys[which])) {
                continue;
            }
            for row in (0..buffers.keys[which].count).filter(|&row| buffers.keys[which].from + row as isize >= seen) {
                // No row has given anything but what stood in memory.
                buffers.dk[which][row * head_width..][..head_width].fill(T::ZERO);
                buffers.dv[which][row * value_width..][..value_width].fill(T::ZERO);
            }
            if self.rows.is_some() {
                self.add_fars(chunk, which, lines, buffers);
            }
            self.write_block(chunk, which, seen, buffers);
        }
        next
    }

    /// Adds what the tiles between the rows `near` of a unit's `n`-th head and the blocks of keys that are loaded give to
    /// the gradients of these, to those of the biases in a line from its index `first` on, and, where there is memory for
    /// them, to those of the rows.
    pub fn tiles(
        &self,
        chunk: &Chunk<'_, '_, T>,
        (n, head): (usize, usize),
        near: std::ops::Range<usize>,
        loaded: usize,
        (d_line, first): (&mut [T], usize),
        buffers: &mut Buffers<'_, T>,
    ) {
        let Self { problem, shared, cotangent, .. } = *self;
        let (unit, line) = (&chunk.unit, shared.line(head));
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        for row in (near.start / TILE * TILE..near.end).step_by(TILE) {
            let Buffers { q, q_shifts, d, c, tile, products, keys, dk, dv, weights, map, dq, .. } = &mut *buffers;
            let range = row.max(near.start)..(row + TILE).min(near.end);
            let row = range.start;
            let wanted = |keys: &KeyBlock<'_, T>| {
                let rows = (problem.stands(row), range.len());
                chunk.left.is_none_or(|left| left.keys_of(keys) || left.distances_of(problem, n, keys, rows))
            };
            if !keys[..loaded].iter().any(wanted) {
                continue;
            }
            problem.load_queries(unit, head, row, range.len(), q, q_shifts, map);
            load_cotangent(problem, shared, cotangent, unit, head, range.clone(), q_shifts, d, c);
            let finite = all_finite(Rows { data: q, stride: head_width }, range.len(), head_width)
                && all_finite(Rows { data: d, stride: value_width }, range.len(), value_width)
                && c[..range.len()].iter().all(|c| c.is_finite());
            let mut tile_of = |block: Block<T>, which: usize| {
                let keys = &keys[which];
                let visible = keys.visible(&block);
                if visible == 0 {
                    return;
                }
                let keys_wanted = chunk.left.is_none_or(|left| left.keys_of(keys));
                let rows = (block.stands, block.rows);
                let bias_wanted = chunk.left.is_none_or(|left| left.distances_of(problem, n, keys, rows));
                if !keys_wanted && !bias_wanted {
                    return;
                }
                let at = block.row - row;
                let band = keys.band(problem, &block);
                let transposed = if problem.causal { Band::starting_at(keys.from - block.stands) } else { Band::ALL };
                let (q, d) = (&q[at * head_width..], &d[at * value_width..]);
                scores(problem, q, keys, (block.rows, visible, band), tile);
                value_products(problem, d, &c[at..], keys, (block.rows, visible, band), products);
                let mut unused = [T::ZERO; TILE];
                let unused = &mut unused[..block.rows];
                let factors = weights.form(problem, unit, line, &block, keys);
                dispatch(WeighByDistance { tile, row_length: TILE, columns: visible, factors, band, sums: unused });
                if keys_wanted {
                    Product::of_transposed(
                        (tile, TILE),
                        (d, value_width),
                        (dv[which], value_width),
                        [visible, value_width, block.rows],
                    )
                    .accumulate(true)
                    .a_band(transposed)
                    .compute();
                }
                // Unseen elements of the tile are 0, but those of the products may be anything.
                zero_outside((products, TILE), (block.rows, visible), band);
                for r in 0..block.rows {
                    let weights = &mut tile[r * TILE..][..visible];
                    multiply(weights, &products[r * TILE..][..visible]);
                    each_run(problem, unit, block.row + r, keys.from, visible, |column, index, len| {
                        let (to, from) = (&mut d_line[index - first..][..len], &weights[column..][..len]);
                        match chunk.left {
                            None => add_scaled(to, T::ONE, from),
                            Some(left) => (0..len).for_each(|at| {
                                if left.distance(n, index + at) {
                                    to[at] += from[at];
                                }
                            }),
                        }
                    });
                }
                if !keys_wanted {
                    return;
                }
                dispatch(WeighByDistance {
                    tile: products,
                    row_length: TILE,
                    columns: visible,
                    factors,
                    band,
                    sums: unused,
                });
                if !dq.is_empty() {
                    let dq = &mut dq[(block.row - near.start) * head_width..];
                    add_keys(problem, products, keys, (block.rows, visible, band), dq);
                }
                Product::of_transposed(
                    (products, TILE),
                    (q, head_width),
                    (dk[which], head_width),
                    [visible, head_width, block.rows],
                )
                .accumulate(true)
                .a_band(transposed)
                .compute();
            };
            shared.blocks(problem, unit, head, range, |block| {
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

    /// Writes the gradients of a block of keys and values, those of an initial state to its ring.
    fn write_block(&self, chunk: &Chunk<'_, '_, T>, which: usize, seen: isize, buffers: &mut Buffers<'_, T>) {
        let (problem, unit) = (self.problem, &chunk.unit);
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        let (features, value_dim) = (problem.features, problem.dims.value_dim);
        let Buffers { q, keys, dk, dv, map, map_sums, .. } = buffers;
        let (block, dk, dv) = (&mut keys[which], &mut *dk[which], &*dv[which]);
        let ring = |key: isize| chunk.last.filter(|last| key >= last.ring_from).map(|last| last.ring_row(problem, key));
        let kept = ((-block.from).max(0) as usize).min(block.count);
        for row in 0..kept {
            let key = block.from + row as isize;
            let (Some(first), Some(past)) = (&self.states.first, &unit.past) else { break };
            if past.ignores(key) {
                continue;
            }
            let slot = past.ring_slot(key);
            // SAFETY: each key belongs to one task.
            let (to_k, to_v) = unsafe {
                (
                    first.part(unit.index, 3, slot * features, features),
                    first.part(unit.index, 5, slot * (value_dim + 1), value_dim),
                )
            };
            // Rows of the ring of an initial state are features already.
            let factor = past.head.ring_exponents.get(slot).map_or(T::ONE, |&own| (own - block.exponent).exp());
            store(&dk[row * head_width..], factor, to_k);
            store(&dv[row * value_width..], T::ONE, to_v);
            if let Some((d_keys, d_values)) = ring(key) {
                add_scaled(to_k, T::ONE, d_keys);
                add_scaled(to_v, T::ONE, &d_values[..value_dim]);
            }
        }
        let (start, rows) = ((block.from + kept as isize) as usize, block.count - kept);
        let counts = |row: usize| {
            let key = start + row;
            !unit.ignores(key) && ((key as isize) < seen || chunk.last.is_some())
        };
        let (own, phi) = (&mut dk[kept * head_width..], &mut block.k[kept * head_width..]);
        let (side, raw) = (Side::Key(unit.kv_head), unit.k.skip(start));
        let (dk, width) = problem.pull_back(side, raw, rows, counts, phi, own, map_sums, map);
        for row in 0..rows {
            let of_row = (&dk[row * width..], &dv[(kept + row) * value_width..]);
            write(problem, unit, start + row, self.sink, counts(row).then_some(of_row));
        }
        for key in (start..start + rows).filter(|&key| !unit.ignores(key)) {
            let Some((d_keys, d_values)) = ring(key as isize) else { continue };
            // The ring's key counts from an exponent of its own.
            let (phi, d_phi) = q.split_at_mut(head_width);
            let d_phi = &mut d_phi[..head_width];
            let (exponent, raw) = (problem.key_block(unit, key as isize, key as isize + 1).1, unit.k.skip(key));
            problem.load_keys(unit, (key, 1), exponent, phi, map);
            d_phi.fill(T::ZERO);
            d_phi[..features].copy_from_slice(d_keys);
            let (d_raw, _) = problem.pull_back(side, raw, 1, |_| true, phi, d_phi, map_sums, map);
            // SAFETY: each key belongs to one task.
            let (to_k, to_v) = unsafe { places(problem, unit, key, &self.sink) };
            add_scaled(to_k, T::ONE, d_raw);
            add_scaled(to_v, T::ONE, &d_values[..value_dim]);
        }
    }
}

/// Numbers of the lines of a unit, those of its heads in the first of its segments before others.
pub(super) fn unit_lines_len<T: Real>(problem: &Problem<'_, T>) -> usize {
    segments(problem) * problem.dims.group() * line_len(problem)
}

/// The lines of a unit's heads in the first of its segments.
pub(super) fn unit_lines<'l, T: Real>(problem: &Problem<'_, T>, lines: &'l mut [T], unit: usize) -> &'l mut [T] {
    &mut lines[unit * unit_lines_len(problem)..][..problem.dims.group() * line_len(problem)]
}

/// Where the gradients of one key go.
///
/// # Safety
/// While they live no other slices of that key's may exist, in this thread or another.
#[allow(clippy::mut_from_ref)]
pub(super) unsafe fn places<'s, T: Real>(
    problem: &Problem<'_, T>,
    unit: &Unit<'_, T>,
    key: usize,
    sink: &'s GradientSink<'_, T>,
) -> (&'s mut [T], &'s mut [T]) {
    let (batch, token) = (unit.sequence.batch, unit.sequence.key_start + key);
    // SAFETY: forwarded to the caller.
    unsafe {
        (
            sink.dk.row(batch, unit.kv_head, token, problem.dims.head_dim),
            sink.dv.row(batch, unit.kv_head, token, problem.dims.value_dim),
        )
    }
}

/// Writes the gradients of one key, 0 for none.
pub(super) fn write<T: Real>(
    problem: &Problem<'_, T>,
    unit: &Unit<'_, T>,
    key: usize,
    sink: GradientSink<'_, T>,
    rows: Option<(&[T], &[T])>,
) {
    // SAFETY: each key belongs to one task.
    let (to_k, to_v) = unsafe { places(problem, unit, key, &sink) };
    match rows {
        Some((dk, dv)) => {
            store(dk, T::ONE, to_k);
            store(dv, T::ONE, to_v);
        }
        None => {
            to_k.fill(T::ZERO);
            to_v.fill(T::ZERO);
        }
    }
}

/// Sums the lines of all tasks into the gradient of the tables.
pub(super) fn reduce<T: Real>(problem: &Problem<'_, T>, lines: &[T], d_bias: &mut [T]) {
    let (bias, len, group) = (&problem.toeplitz.bias, line_len(problem), problem.dims.group());
    let segments = segments(problem);
    let entry = |index: usize| match index.checked_sub(problem.line_width()) {
        None => problem.line_difference(index).and_then(|difference| bias.entry(difference)),
        Some(0) => bias.far(),
        Some(_) => bias.after().map(|(_, entry)| entry),
    };
    threads::share(d_bias.chunks_exact_mut(bias.entries()).enumerate(), |(head, to)| {
        to.fill(T::ZERO);
        let mut run = (None, 0.0);
        for index in 0..len {
            let Some(entry) = entry(index) else { continue };
            if run.0 != Some(entry) {
                if let (Some(entry), sum) = run {
                    to[entry] += T::from_f64(sum);
                }
                run = (Some(entry), 0.0);
            }
            for sequence in 0..problem.sequences.len() {
                let unit = sequence * problem.dims.kv_heads + head / group;
                for segment in 0..segments {
                    run.1 += lines[((unit * segments + segment) * group + head % group) * len + index].to_f64();
                }
            }
        }
        if let (Some(entry), sum) = run {
            to[entry] += T::from_f64(sum);
        }
    });
}
