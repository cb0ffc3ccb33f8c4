//! Tiles of scores, weighed by distance: O(queries · keys) work at the rate of the matrix product, O(tile²) memory for
//! each thread.

use super::gradient::{KeyPass, KeyUnit};
use super::map_sums::{self, MapSums};
use super::one_pass;
use super::problem::{Block, CHUNK, Problem, Shared, TILE, Unit};
use super::state::{Head, StateGradients, Writer};
use crate::call::{Arena, Cotangent, Scratch, SharedRows, State};
use crate::feature_map::FeatureMap;
use crate::feature_map::elementwise::{copy_rows, load_exponentials, load_features};
use crate::feature_map::mapping::MapBuffers;
use crate::feature_map::rows::Side;
use crate::simd::block::{add_scaled, dot, scale_by, store, transpose};
use crate::simd::product::{Band, Product};
use crate::simd::rows::{Rows, padded};
use crate::simd::{Real, dispatch};
use crate::threads::{self, parallel};
use crate::toeplitz::weigh::{Factors, WeighByDistance};

/// Where the forward pass writes.
#[derive(Clone, Copy)]
pub(super) struct Sink<'a, T> {
    pub out: SharedRows<'a, T>,
    pub denominators: Option<SharedRows<'a, T>>,
}

/// A block of keys and values.
pub(super) struct KeyBlock<'s, T> {
    pub from: isize,
    pub count: usize,
    /// The exponent subtracted from the keys.
    pub exponent: T,
    /// `φ(k)`, `TILE × head_width`, and its transpose.
    pub k: &'s mut [T],
    pub k_columns: &'s mut [T],
    /// Values, `TILE × value_width`, and, for gradients, their transpose.
    pub v: &'s mut [T],
    pub v_columns: &'s mut [T],
}

impl<'s, T: Real> KeyBlock<'s, T> {
    pub fn new(problem: &Problem<'_, T>, gradients: bool, arena: &mut Arena<'s, T>) -> Self {
        Self {
            from: 0,
            count: 0,
            exponent: T::ZERO,
            k: arena.take(TILE * problem.head_width),
            k_columns: arena.take(TILE * problem.head_width),
            v: arena.take(TILE * problem.value_width),
            v_columns: arena.take(if gradients { TILE * problem.value_width } else { 0 }),
        }
    }

    /// Loads the next block of the keys from `from` on and before `end`.
    pub fn load(
        &mut self,
        problem: &Problem<'_, T>,
        unit: &Unit<'_, T>,
        (from, end): (isize, isize),
        map: &mut MapBuffers<'_, T>,
    ) {
        let (count, exponent) = problem.key_block(unit, from, end);
        (self.from, self.count, self.exponent) = (from, count, exponent);
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        let (features, value_dim) = (problem.features, problem.dims.value_dim);
        let kept = ((-from).max(0) as usize).min(count);
        if let Some(past) = &unit.past {
            for row in 0..kept {
                let slot = past.ring_slot(from + row as isize);
                let k = &mut self.k[row * head_width..][..head_width];
                k[..features].copy_from_slice(&past.head.ring_keys[slot * features..][..features]);
                k[features..].fill(T::ZERO);
                if let Some(&own) = past.head.ring_exponents.get(slot) {
                    scale_by(k, (own - exponent).exp());
                }
                let v = &mut self.v[row * value_width..][..value_width];
                v[..value_dim].copy_from_slice(&past.head.ring_values[slot * (value_dim + 1)..][..value_dim]);
                v[value_dim..].fill(T::ZERO);
            }
        }
        if kept < count {
            let (first, rows) = ((from + kept as isize) as usize, count - kept);
            let padding = unit.sequence.padding.map(|padding| &padding[first..first + rows]);
            problem.load_keys(unit, (first, rows), exponent, &mut self.k[kept * head_width..], map);
            let v = &mut self.v[kept * value_width..];
            copy_rows(unit.v.skip(first), (rows, value_dim), padding, (v, value_width));
        }
        // Products and transposes take whole registers of rows.
        let whole = padded::<T>(count).min(TILE);
        self.k[count * head_width..whole * head_width].fill(T::ZERO);
        self.v[count * value_width..whole * value_width].fill(T::ZERO);
        transpose((self.k, head_width), (whole, head_width), (self.k_columns, TILE));
        if !self.v_columns.is_empty() {
            transpose((self.v, value_width), (whole, value_width), (self.v_columns, TILE));
        }
    }

    /// How many of its keys the last row of a block sees.
    pub fn visible(&self, block: &Block<T>) -> usize {
        (block.end - self.from).clamp(0, self.count as isize) as usize
    }

    /// The elements of a block's tile that are seen.
    pub fn band(&self, problem: &Problem<'_, T>, block: &Block<T>) -> Band {
        if problem.causal { Band::up_to(block.stands - self.from) } else { Band::ALL }
    }
}

/// The numbers that the weights of a tile are made of.
pub(super) struct Weights<'s, T> {
    values: &'s mut [T],
    /// The exponents of a grid's tile, gathered from the line.
    raw: &'s mut [T],
}

impl<'s, T: Real> Weights<'s, T> {
    pub fn new(problem: &Problem<'_, T>, arena: &mut Arena<'s, T>) -> Self {
        let (values, raw) = if problem.is_grid() { (TILE * TILE, TILE * TILE) } else { (2 * TILE, 0) };
        Self { values: arena.take(values), raw: arena.take(raw) }
    }

    /// Forms `e^{b_δ}` for a tile, times what brings the keys' exponent to the block's level.
    pub fn form(
        &mut self,
        problem: &Problem<'_, T>,
        unit: &Unit<'_, T>,
        line: &[T],
        block: &Block<T>,
        keys: &KeyBlock<'_, T>,
    ) -> Factors<'_, T> {
        let visible = keys.visible(block);
        let shift = block.level - keys.exponent;
        if problem.is_grid() {
            for row in 0..block.rows {
                each_run(problem, unit, block.row + row, keys.from, visible, |column, index, len| {
                    self.raw[row * TILE + column..][..len].copy_from_slice(&line[index..][..len]);
                });
            }
            let (raw, sizes) = (Rows { data: &*self.raw, stride: TILE }, (block.rows, visible));
            load_features((FeatureMap::Exp, shift), raw, sizes, None, (self.values, TILE));
            return Factors { values: self.values, start: 0, step: TILE as isize };
        }
        // Row r and column c need the difference from + c − (stands + r).
        let first = problem.line_index(keys.from - (block.stands + block.rows as isize - 1)) as usize;
        load_exponentials(&line[first..][..block.rows + visible - 1], shift, self.values);
        Factors { values: self.values, start: block.rows - 1, step: -1 }
    }
}

/// Calls `body(column, index, len)` for the runs of keys of a grid that lie side by side in the line of biases.
pub(super) fn each_run<T: Real>(
    problem: &Problem<'_, T>,
    unit: &Unit<'_, T>,
    row: usize,
    from: isize,
    count: usize,
    mut body: impl FnMut(usize, usize, usize),
) {
    let super::Bias::Grid { width, .. } = problem.toeplitz.bias else {
        body(0, problem.bias_index(unit, from, row), count);
        return;
    };
    let mut column = 0;
    while column < count {
        let key = from + column as isize;
        let left = width - (key - unit.begin()).rem_euclid(width as isize) as usize;
        let len = left.min(count - column);
        body(column, problem.bias_index(unit, key, row), len);
        column += len;
    }
}

/// Rows of one head that one task computes: at most a [`CHUNK`].
pub(super) struct Task {
    unit: usize,
    head: usize,
    rows: std::ops::Range<usize>,
}

/// Adds the tasks for some rows of one head.
pub(super) fn push_chunks(tasks: &mut Vec<Task>, unit: usize, head: usize, rows: std::ops::Range<usize>) {
    let end = rows.end;
    tasks.extend(rows.step_by(CHUNK).map(|row| Task { unit, head, rows: row..(row + CHUNK).min(end) }));
}

/// The tasks for all rows of some units.
fn chunks<T: Real>(problem: &Problem<'_, T>, units: impl Iterator<Item = usize>) -> Vec<Task> {
    let mut tasks = Vec::new();
    for unit in units.map(|index| problem.unit(index)) {
        for head in problem.heads(&unit) {
            push_chunks(&mut tasks, unit.index, head, 0..unit.sequence.queries);
        }
    }
    tasks
}

/// Working memory of a task of the forward pass.
struct Buffers<'s, T> {
    q: &'s mut [T],
    q_shifts: &'s mut [T],
    o: &'s mut [T],
    sums: &'s mut [T],
    tile: &'s mut [T],
    keys: KeyBlock<'s, T>,
    weights: Weights<'s, T>,
    map: MapBuffers<'s, T>,
}

impl<'s, T: Real> Buffers<'s, T> {
    fn new(problem: &Problem<'_, T>, arena: &mut Arena<'s, T>) -> Self {
        Self {
            q: arena.take(CHUNK * problem.head_width),
            q_shifts: arena.take(CHUNK),
            o: arena.take(CHUNK * problem.value_width),
            sums: arena.take(CHUNK),
            tile: arena.take(TILE * TILE.max(problem.value_width)),
            keys: KeyBlock::new(problem, false, arena),
            weights: Weights::new(problem, arena),
            map: MapBuffers::new(&problem.mapping, TILE, arena),
        }
    }
}

/// Numbers of working memory of a worker of the forward pass.
pub(super) fn forward_len<T: Real>(problem: &Problem<'_, T>) -> usize {
    Arena::measure(|arena| Buffers::new(problem, arena))
}

/// Computes every output of a call.
pub(super) fn forward<T: Real>(problem: &Problem<'_, T>, sink: Sink<'_, T>, scratch: &mut Scratch<T>) {
    let per_worker = forward_len(problem);
    let workers = threads::count();
    let mut arena = Arena::new(scratch.take(problem.shared_len() + workers * per_worker));
    let shared = problem.shared(&mut arena);
    run(problem, &shared, &chunks(problem, 0..problem.units()), sink, (arena.rest(), per_worker));
}

/// Computes the outputs of some chunks.
pub(super) fn run<T: Real>(
    problem: &Problem<'_, T>,
    shared: &Shared<'_, T>,
    tasks: &[Task],
    sink: Sink<'_, T>,
    (scratch, per_worker): (&mut [T], usize),
) {
    parallel(tasks.len(), scratch, per_worker, |task, scratch| {
        let Task { unit, head, rows } = &tasks[task];
        let mut buffers = Buffers::new(problem, &mut Arena::new(scratch));
        let unit = problem.unit(*unit);
        let range = (unit.begin(), problem.end(&unit, rows.end - 1));
        chunk(problem, shared, &unit, *head, rows.clone(), range, [None, None], sink, &mut buffers);
    });
}

/// The sum of keys that rows see with one weight, or of rows that see keys with one.
#[derive(Clone, Copy)]
pub(super) struct Far<'s, T> {
    /// `Σ k̄_j v_jᵀ` or `Σ q̄_i dN_iᵀ`, `head_width × value_width`.
    pub outer: &'s [T],
    /// `Σ k̄_j` or `Σ c_i q̄_i`: the column of the ones in `v⁺`.
    pub features: &'s [T],
    /// The exponent subtracted from both.
    pub exponent: T,
    /// The bias between them and what they meet.
    pub bias: T,
}

impl<T: Real> Far<'_, T> {
    /// Adds to a block of `dN⁺` or `v⁺` what the sum makes of it: `to_i += weight·(S y_i + ones_i·z)` with `y_i` in `y` and
    /// where `ones` is none 1. `turned` and `tile` are working memory. Returns `weight · Σ x_i·(S y_i + ones_i·z)`.
    #[allow(clippy::too_many_arguments)]
    pub fn add_features(
        &self,
        problem: &Problem<'_, T>,
        weight: T,
        (y, ones): (&[T], Option<&[T]>),
        count: usize,
        x: &[T],
        to: &mut [T],
        (turned, tile): (&mut [T], &mut [T]),
    ) -> T {
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        transpose((self.outer, value_width), (head_width, value_width), (turned, head_width));
        Product::of(
            (y, value_width),
            (turned, head_width),
            (tile, head_width),
            [count, head_width, problem.dims.value_dim],
        )
        .compute();
        let mut sum = T::ZERO;
        for row in 0..count {
            let line = &mut tile[row * head_width..][..head_width];
            add_scaled(line, ones.map_or(T::ONE, |ones| ones[row]), self.features);
            sum += dot(&x[row * head_width..][..head_width], line);
            add_scaled(&mut to[row * head_width..][..head_width], weight, line);
        }
        weight * sum
    }

    /// Adds `weight·Sᵀ x_i` for each row of a block of features.
    pub fn add_values(&self, problem: &Problem<'_, T>, weight: T, x: &[T], count: usize, to: &mut [T], tile: &mut [T]) {
        let value_width = problem.value_width;
        Product::of(
            (x, problem.head_width),
            (self.outer, value_width),
            (tile, value_width),
            [count, value_width, problem.features],
        )
        .compute();
        for row in 0..count {
            let line = &tile[row * value_width..][..value_width];
            add_scaled(&mut to[row * value_width..][..value_width], weight, line);
        }
    }
}

/// Computes the outputs of one chunk of rows from the keys of a range by tiles and from sums of all others.
#[allow(clippy::too_many_arguments)]
pub(super) fn far_chunk<T: Real>(
    problem: &Problem<'_, T>,
    shared: &Shared<'_, T>,
    unit: &Unit<'_, T>,
    head: usize,
    rows: std::ops::Range<usize>,
    range: (isize, isize),
    fars: [Option<Far<'_, T>>; 2],
    sink: Sink<'_, T>,
    scratch: &mut [T],
) {
    let mut buffers = Buffers::new(problem, &mut Arena::new(scratch));
    chunk(problem, shared, unit, head, rows, range, fars, sink, &mut buffers);
}

/// Computes the outputs of one chunk of rows.
#[allow(clippy::too_many_arguments)]
fn chunk<T: Real>(
    problem: &Problem<'_, T>,
    shared: &Shared<'_, T>,
    unit: &Unit<'_, T>,
    head: usize,
    rows: std::ops::Range<usize>,
    (mut from, end): (isize, isize),
    fars: [Option<Far<'_, T>>; 2],
    sink: Sink<'_, T>,
    buffers: &mut Buffers<'_, T>,
) {
    let Buffers { q, q_shifts, o, sums, tile, keys, weights, map } = buffers;
    let (head_width, value_width) = (problem.head_width, problem.value_width);
    let value_dim = problem.dims.value_dim;
    let line = shared.line(head);
    problem.load_queries(unit, head, rows.start, rows.len(), q, q_shifts, map);
    o[..rows.len() * value_width].fill(T::ZERO);
    sums[..rows.len()].fill(T::ZERO);
    while from < end {
        keys.load(problem, unit, (from, end), map);
        shared.blocks(problem, unit, head, rows.clone(), |block| {
            let visible = keys.visible(&block);
            if visible == 0 {
                return;
            }
            let at = block.row - rows.start;
            let band = keys.band(problem, &block);
            scores(problem, &q[at * head_width..], keys, (block.rows, visible, band), tile);
            let factors = weights.form(problem, unit, line, &block, keys);
            dispatch(WeighByDistance {
                tile,
                row_length: TILE,
                columns: visible,
                factors,
                band,
                sums: &mut sums[at..at + block.rows],
            });
            Product::of(
                (tile, TILE),
                (keys.v, value_width),
                (&mut o[at * value_width..], value_width),
                [block.rows, value_width, visible],
            )
            .accumulate(true)
            .a_band(band)
            .compute();
        });
        from += keys.count as isize;
    }
    for far in fars.iter().flatten() {
        shared.blocks(problem, unit, head, rows.clone(), |block| {
            // The large numbers first: their difference is exact where it matters.
            let weight = ((far.exponent - block.level) + far.bias).exp();
            let at = block.row - rows.start;
            let q = &q[at * head_width..];
            far.add_values(problem, weight, q, block.rows, &mut o[at * value_width..], tile);
            for row in 0..block.rows {
                sums[at + row] += weight * dot(far.features, &q[row * head_width..][..head_width]);
            }
        });
    }
    for row in rows.clone() {
        let at = row - rows.start;
        let token = unit.sequence.query_start + row;
        // SAFETY: each (batch, head, token) belongs to one task.
        let out = unsafe { sink.out.row(unit.sequence.batch, head, token, value_dim) };
        let sees = problem.sees(unit, row);
        let mut denominator = if sees { sums[at] } else { T::ZERO };
        if !problem.toeplitz.normalize {
            let level = shared.level(unit, head, row);
            let scale = (level + q_shifts[at]).exp();
            store(&o[at * value_width..], if sees { scale } else { T::ZERO }, out);
            denominator = T::ONE;
        } else if denominator.vanishes() {
            denominator = T::ZERO;
            out.fill(T::ZERO);
        } else {
            store(&o[at * value_width..], T::ONE / denominator, out);
        }
        if let Some(denominators) = sink.denominators {
            // SAFETY: as above.
            unsafe { denominators.row(unit.sequence.batch, head, token, 1)[0] = denominator };
        }
    }
}

/// The state after the last key.
pub(super) fn final_state<T: Real>(problem: &Problem<'_, T>, state: &mut State<T>, scratch: &mut Scratch<T>) {
    let near = problem.toeplitz.bias.near();
    if let Some(initial) = problem.call.initial_state {
        *state = initial.clone();
    } else if let Ok(empty) = super::state::empty(problem.toeplitz, &problem.dims) {
        *state = empty;
    }
    let (width, features, value_dim) = (problem.head_width, problem.features, problem.dims.value_dim);
    let per_head =
        TILE * width + padded::<T>(value_dim) + Arena::measure(|arena| MapBuffers::new(&problem.mapping, TILE, arena));
    let heads: Vec<_> = state.heads_mut().map(Head::from).enumerate().collect();
    let memory = scratch.take(heads.len() * per_head).chunks_exact_mut(per_head);
    threads::share(heads.into_iter().zip(memory), |((index, head), memory)| {
        // Packed sequences are refused, so units are batch entries and heads in order.
        let unit = problem.unit(index);
        let mut writer = Writer::new(near, head);
        let mut arena = Arena::new(memory);
        let (block, none) = (arena.take(TILE * width), arena.take(value_dim));
        none.fill(T::ZERO);
        let mut map = MapBuffers::new(&problem.mapping, TILE, &mut arena);
        for first in (0..unit.sequence.keys).step_by(TILE) {
            let count = (unit.sequence.keys - first).min(TILE);
            let mut exponents = [T::ZERO; TILE];
            if problem.mapping.exponential {
                for (key, exponent) in exponents[..count].iter_mut().enumerate() {
                    *exponent = problem.key_max(&unit, (first + key) as isize).unwrap_or(T::ZERO);
                }
            }
            problem.load_each_key(&unit, first, &exponents[..count], block, &mut map);
            for (key, row) in (first..first + count).zip(block.chunks_exact(width.max(1))) {
                let (v, present) = match unit.ignores(key) {
                    true => (&*none, T::ZERO),
                    false => (unit.v.row(key, value_dim), T::ONE),
                };
                writer.push(&row[..features], exponents[key - first], v, present);
            }
        }
    });
}

/// Where the backward pass writes.
#[derive(Clone, Copy)]
pub(super) struct GradientSink<'a, T> {
    pub dq: SharedRows<'a, T>,
    pub dk: SharedRows<'a, T>,
    pub dv: SharedRows<'a, T>,
}

/// Loads the gradients of rows over their denominators, `d = G/D` (or times the row's scale), and `c = −G·A/D`.
#[allow(clippy::too_many_arguments)]
pub(super) fn load_cotangent<T: Real>(
    problem: &Problem<'_, T>,
    shared: &Shared<'_, T>,
    cotangent: &Cotangent<'_, T>,
    unit: &Unit<'_, T>,
    head: usize,
    rows: std::ops::Range<usize>,
    q_shifts: &[T],
    d: &mut [T],
    c: &mut [T],
) {
    let (width, value_dim) = (problem.value_width, problem.dims.value_dim);
    let [out, d_out] = [cotangent.out, cotangent.d_out]
        .map(|view| view.rows(unit.sequence.batch, head).skip(unit.sequence.query_start));
    copy_rows(d_out.skip(rows.start), (rows.len(), value_dim), None, (d, width));
    let first = (unit.sequence.batch * problem.dims.heads + head) * problem.dims.queries + unit.sequence.query_start;
    for row in rows.clone() {
        let at = row - rows.start;
        let line = &mut d[at * width..][..width];
        c[at] = T::ZERO;
        if !problem.sees(unit, row) {
            line.fill(T::ZERO);
        } else if !problem.toeplitz.normalize {
            scale_by(line, (shared.level(unit, head, row) + q_shifts[at]).exp());
        } else if cotangent.denominators[first + row].vanishes() {
            // The row gave 0 whatever the inputs were.
            line.fill(T::ZERO);
        } else {
            scale_by(line, T::ONE / cotangent.denominators[first + row]);
            c[at] = -dot(out.row(row, value_dim), line);
        }
    }
}

/// Fills a tile with the products `φ(q_i)·φ(k_j)`.
pub(super) fn scores<T: Real>(
    problem: &Problem<'_, T>,
    q: &[T],
    keys: &KeyBlock<'_, T>,
    (rows, visible, band): (usize, usize, Band),
    tile: &mut [T],
) {
    Product::of((q, problem.head_width), (keys.k_columns, TILE), (tile, TILE), [rows, visible, problem.features])
        .c_band(band)
        .compute();
}

/// Adds the keys' features, weighed by a tile, to gradients of queries.
pub(super) fn add_keys<T: Real>(
    problem: &Problem<'_, T>,
    tile: &[T],
    keys: &KeyBlock<'_, T>,
    (rows, visible, band): (usize, usize, Band),
    dq: &mut [T],
) {
    Product::of(
        (tile, TILE),
        (keys.k, problem.head_width),
        (dq, problem.head_width),
        [rows, problem.head_width, visible],
    )
    .accumulate(true)
    .a_band(band)
    .compute();
}

/// Fills a tile with `dN_i·v⁺_j = d_i·v_j + c_i`.
pub(super) fn value_products<T: Real>(
    problem: &Problem<'_, T>,
    d: &[T],
    c: &[T],
    keys: &KeyBlock<'_, T>,
    (rows, visible, band): (usize, usize, Band),
    tile: &mut [T],
) {
    for (row, &c) in c[..rows].iter().enumerate() {
        tile[row * TILE..(row + 1) * TILE].fill(c);
    }
    Product::of(
        (d, problem.value_width),
        (keys.v_columns, TILE),
        (tile, TILE),
        [rows, visible, problem.dims.value_dim],
    )
    .accumulate(true)
    .c_band(band)
    .compute();
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
    if let [d_bias] = parameters
        && one_pass::takes(problem, &states)
    {
        one_pass::backward(problem, cotangent, sink, d_bias, states, scratch);
        return;
    }
    backward_with(problem, cotangent, sink, parameters, states, scratch, 0, |_, _, _, _, _| {
        (chunks(problem, 0..problem.units()), (0..problem.units()).map(KeyUnit::whole).collect())
    });
}

/// Computes the gradients that `others` leaves: first those of the queries in the tasks that it gives, then those of
/// keys, values and biases of the units that it gives, chunk of keys by chunk. Both passes form the weights anew.
/// `others` is given lines of 0 for the gradients of biases, sums for those of a learned map, a worker's memory, and as many
/// doubles as it wants.
#[allow(clippy::too_many_arguments)]
pub(super) fn backward_with<T: Real>(
    problem: &Problem<'_, T>,
    cotangent: &Cotangent<'_, T>,
    sink: GradientSink<'_, T>,
    parameters: &mut [&mut [T]],
    states: StateGradients<'_, T>,
    scratch: &mut Scratch<T>,
    doubles: usize,
    others: impl FnOnce(&Shared<'_, T>, &mut [T], MapSums<'_, T>, &mut [T], &mut [f64]) -> (Vec<Task>, Vec<KeyUnit>),
) {
    let per_worker = Arena::measure(|arena| QueryBuffers::new(problem, false, &mut [], arena))
        .max(super::gradient::buffers_len(problem, super::gradient::Beside::Nothing));
    let workers = threads::count();
    let lines = super::gradient::lines_len(problem);
    let sums_len = padded::<T>(MapSums::len(problem));
    let numbers = problem.shared_len() + lines + sums_len + workers * per_worker;
    let (numbers, doubles) = scratch.take_with_doubles(numbers, doubles);
    let mut arena = Arena::new(numbers);
    let shared = problem.shared(&mut arena);
    let (d_lines, map_numbers) = (arena.take(lines), arena.take(MapSums::len(problem)));
    d_lines.fill(T::ZERO);
    let mut view = MapSums::view(problem, &mut *map_numbers);
    let sums = MapSums::new(problem, view.shared());
    let rest = arena.rest();
    let (mut tasks, units) = others(&shared, d_lines, sums, &mut *rest, doubles);
    // Tasks of one lane add to one sum, one after the other.
    let lane = |task: &Task| (task.unit, task.head, sums.lane(task.rows.start / CHUNK));
    tasks.sort_by_key(lane);
    let runs: Vec<&[Task]> = tasks.chunk_by(|a, b| lane(a) == lane(b)).collect();
    parallel(runs.len(), rest, per_worker, |run, scratch| {
        for Task { unit, head, rows } in runs[run] {
            // SAFETY: each lane of a head's rows is one run's own.
            let sums = unsafe { sums.of_queries(*unit, *head, rows.start / CHUNK) };
            let mut buffers = QueryBuffers::new(problem, false, sums, &mut Arena::new(scratch));
            let unit = problem.unit(*unit);
            let range = (unit.begin(), problem.end(&unit, rows.end - 1));
            query_chunk(
                problem,
                &shared,
                cotangent,
                &unit,
                *head,
                rows.clone(),
                range,
                [None, None],
                sink,
                &mut buffers,
            );
        }
    });
    let pass = KeyPass { problem, shared: &shared, cotangent, sink, rows: None, states, sums };
    pass.run(&units, d_lines, (rest, per_worker));
    let [d_bias, of_map @ ..] = parameters else { return };
    super::gradient::reduce(problem, d_lines, d_bias);
    map_sums::write(problem, map_numbers, of_map);
}

/// Working memory of a task that computes gradients of queries.
struct QueryBuffers<'s, T> {
    q: &'s mut [T],
    q_shifts: &'s mut [T],
    d: &'s mut [T],
    c: &'s mut [T],
    dq: &'s mut [T],
    tile: &'s mut [T],
    keys: KeyBlock<'s, T>,
    weights: Weights<'s, T>,
    /// A transposed sum of far keys.
    turned: &'s mut [T],
    map: MapBuffers<'s, T>,
    /// Where the gradient of a learned map is summed.
    sums: &'s mut [T],
}

/// Numbers of working memory of a worker of [`far_query_chunk`].
pub(super) fn query_len<T: Real>(problem: &Problem<'_, T>) -> usize {
    Arena::measure(|arena| QueryBuffers::new(problem, true, &mut [], arena))
}

impl<'s, T: Real> QueryBuffers<'s, T> {
    fn new(problem: &Problem<'_, T>, far: bool, sums: &'s mut [T], arena: &mut Arena<'s, T>) -> Self {
        Self {
            q: arena.take(CHUNK * problem.head_width),
            q_shifts: arena.take(CHUNK),
            d: arena.take(CHUNK * problem.value_width),
            c: arena.take(CHUNK),
            dq: arena.take(CHUNK * problem.head_width),
            tile: arena.take(TILE * TILE.max(problem.head_width)),
            keys: KeyBlock::new(problem, true, arena),
            weights: Weights::new(problem, arena),
            turned: arena.take(if far { problem.head_width * problem.value_width } else { 0 }),
            map: MapBuffers::new(&problem.mapping, TILE, arena),
            sums,
        }
    }
}

/// Computes the gradients of one chunk of queries from the keys of a range by tiles and from sums of all others.
#[allow(clippy::too_many_arguments)]
pub(super) fn far_query_chunk<T: Real>(
    problem: &Problem<'_, T>,
    shared: &Shared<'_, T>,
    cotangent: &Cotangent<'_, T>,
    unit: &Unit<'_, T>,
    head: usize,
    rows: std::ops::Range<usize>,
    range: (isize, isize),
    fars: [Option<Far<'_, T>>; 2],
    sink: GradientSink<'_, T>,
    (sums, scratch): (&mut [T], &mut [T]),
) {
    let mut buffers = QueryBuffers::new(problem, true, sums, &mut Arena::new(scratch));
    query_chunk(problem, shared, cotangent, unit, head, rows, range, fars, sink, &mut buffers);
}

/// Computes the gradients of one chunk of queries.
#[allow(clippy::too_many_arguments)]
fn query_chunk<T: Real>(
    problem: &Problem<'_, T>,
    shared: &Shared<'_, T>,
    cotangent: &Cotangent<'_, T>,
    unit: &Unit<'_, T>,
    head: usize,
    rows: std::ops::Range<usize>,
    (mut from, end): (isize, isize),
    fars: [Option<Far<'_, T>>; 2],
    sink: GradientSink<'_, T>,
    buffers: &mut QueryBuffers<'_, T>,
) {
    let QueryBuffers { q, q_shifts, d, c, dq, tile, keys, weights, turned, map, sums } = buffers;
    let (head_width, value_width, head_dim) = (problem.head_width, problem.value_width, problem.dims.head_dim);
    let line = shared.line(head);
    problem.load_queries(unit, head, rows.start, rows.len(), q, q_shifts, map);
    load_cotangent(problem, shared, cotangent, unit, head, rows.clone(), q_shifts, d, c);
    dq[..rows.len() * head_width].fill(T::ZERO);
    while from < end {
        keys.load(problem, unit, (from, end), map);
        shared.blocks(problem, unit, head, rows.clone(), |block| {
            let visible = keys.visible(&block);
            if visible == 0 {
                return;
            }
            let at = block.row - rows.start;
            let band = keys.band(problem, &block);
            value_products(problem, &d[at * value_width..], &c[at..], keys, (block.rows, visible, band), tile);
            let mut unused = [T::ZERO; TILE];
            let factors = weights.form(problem, unit, line, &block, keys);
            dispatch(WeighByDistance {
                tile,
                row_length: TILE,
                columns: visible,
                factors,
                band,
                sums: &mut unused[..block.rows],
            });
            add_keys(problem, tile, keys, (block.rows, visible, band), &mut dq[at * head_width..]);
        });
        from += keys.count as isize;
    }
    for far in fars.iter().flatten() {
        shared.blocks(problem, unit, head, rows.clone(), |block| {
            let weight = ((far.exponent - block.level) + far.bias).exp();
            let at = block.row - rows.start;
            let (q, dq) = (&q[at * head_width..], &mut dq[at * head_width..]);
            let d = (&d[at * value_width..], Some(&c[at..]));
            far.add_features(problem, weight, d, block.rows, q, dq, (&mut *turned, &mut *tile));
        });
    }
    let queries = problem.queries(unit, head);
    for first in rows.clone().step_by(TILE) {
        let (count, at) = ((rows.end - first).min(TILE), (first - rows.start) * head_width);
        let sees = |row: usize| problem.sees(unit, first + row);
        let (q, dq) = (&mut q[at..], &mut dq[at..]);
        let (dq, width) = problem.pull_back(Side::Query(head), queries.skip(first), count, sees, q, dq, sums, map);
        for row in 0..count {
            let token = unit.sequence.query_start + first + row;
            // SAFETY: each (batch, head, token) belongs to one task.
            let to = unsafe { sink.dq.row(unit.sequence.batch, head, token, head_dim) };
            if sees(row) {
                store(&dq[row * width..], T::ONE, to);
            } else {
                to.fill(T::ZERO);
            }
        }
    }
}
