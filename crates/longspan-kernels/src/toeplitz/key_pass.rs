//! The pass over keys: a task takes chunks of keys of one unit, meets the rows near them by tiles and those far from them by
//! sums, and writes the gradients of keys and values, those of an initial state among them.

use std::ops::Range;

use super::backward::{Memory, Pass};
use super::bias_gradient::line_len;
use super::far::{self, Far, FarSum, FarSums, near_rows};
use super::key_tiles::{KeyGradients, TileBuffers, key_gradients};
use super::left::{KeyUnit, Left};
use super::problem::{CHUNK, Problem, TILE, Unit};
use super::state::EXPONENT;
use super::state_gradient::Last;
use crate::call::{Arena, SharedRows};
use crate::feature_map::elementwise::Shift;
use crate::feature_map::rows::Side;
use crate::simd::Real;
use crate::simd::block::{add_scaled, dot, store};
use crate::threads::{self, parallel};

struct Buffers<'s, T> {
    tiles: TileBuffers<'s, T>,
    /// The transpose of a sum, and its product with a block.
    turned: &'s mut [T],
    far_tile: &'s mut [T],
    /// The gradient of the final state's sums, as sums of rows are.
    last: &'s mut [T],
}

impl<'s, T: Real> Buffers<'s, T> {
    fn new(problem: &Problem<'_, T>, far: bool, arena: &mut Arena<'s, T>) -> Self {
        let (sums, head_width, value_width) = (usize::from(far), problem.head_width, problem.value_width);
        Self {
            tiles: TileBuffers::new(problem, false, arena),
            turned: arena.take(sums * head_width * value_width),
            far_tile: arena.take(sums * TILE * head_width.max(value_width)),
            last: arena.take(sums * FarSum::len(problem)),
        }
    }
}

/// Numbers of working memory of a worker; `far` says whether keys meet sums of rows.
pub(super) fn worker_len<T: Real>(problem: &Problem<'_, T>, far: bool) -> usize {
    Arena::measure(|arena| {
        key_gradients(problem, arena);
        Buffers::new(problem, far, arena);
    })
}

pub(super) struct KeyPass<'x, 'a, T: 'static> {
    pub pass: &'x Pass<'x, 'a, T>,
    /// The rows that lie far from each chunk of keys; without them all rows are met by tiles.
    pub rows: Option<&'x FarSums<'x, T>>,
}

struct Chunk<'x, 'a, T> {
    unit: Unit<'a, T>,
    left: Option<&'x Left>,
    /// The chunk of the unit's keys.
    index: usize,
    keys: Range<isize>,
    last: Option<Last<'x, T>>,
    /// Where the gradient of a learned map is summed.
    map_sums: &'x mut [T],
    /// The gradients of the biases, by head.
    lines: &'x mut [T],
}

impl<T: Real> KeyPass<'_, '_, T> {
    /// Computes the gradients of all keys and values of some units, and adds those of the biases to the lines.
    pub fn run(&self, units: &[KeyUnit], memory: Memory<'_, T>) {
        let (problem, states) = (self.pass.call.problem, &self.pass.call.states);
        let segments = problem.segments();
        let per_task = problem.dims.group() * line_len(problem);
        let lines = SharedRows::new(memory.lines, [per_task, 0, 0]);
        let mut lasts: Vec<Option<Last<'_, T>>> = vec![None; units.len()];
        if let Some(state) = states.last {
            threads::share(lasts.iter_mut().zip(units), |(last, unit)| {
                *last = Some(Last::new(problem, &problem.unit(unit.0), state));
            });
        }
        let chunk_len = if self.rows.is_some() { far::ROWS } else { CHUNK };
        parallel(units.len() * segments, memory.workers, memory.per_worker, |task, scratch| {
            let (index, left) = &units[task / segments];
            let (unit, left, segment) = (problem.unit(*index), left.as_ref(), task % segments);
            // SAFETY: each task has lines of its own, and a sum of its own.
            let (lines, map_sums) = unsafe {
                let lines = lines.row(unit.index * segments + segment, 0, 0, per_task);
                (lines, self.pass.map_sums.of_keys(unit.index, segment))
            };
            let mut arena = Arena::new(scratch);
            let mut blocks = key_gradients(problem, &mut arena);
            let mut buffers = Buffers::new(problem, self.rows.is_some(), &mut arena);
            let last = lasts[task / segments];
            if let Some(last) = last.filter(|last| self.rows.is_some() && last.exponent > T::NEG_INFINITY) {
                FarSum::empty(problem, buffers.last).add_state(problem, &last.head, -last.exponent);
            }
            let (begin, end) = (unit.begin(), unit.sequence.keys as isize);
            let mut chunk = Chunk { unit, left, index: 0, keys: 0..0, last, map_sums, lines };
            // Chunks by turns, because later keys are seen by fewer rows.
            for index in (segment..((end - begin) as usize).div_ceil(chunk_len)).step_by(segments) {
                let from = begin + (index * chunk_len) as isize;
                (chunk.index, chunk.keys) = (index, from..(from + chunk_len as isize).min(end));
                // What is beyond the final ring does not share a block, and so an exponent, with what is not.
                let ring_from = last.map_or(begin, |last| last.ring_from);
                let mut from = from;
                while from < chunk.keys.end {
                    let end = if from < ring_from { ring_from.min(chunk.keys.end) } else { chunk.keys.end };
                    from = self.key_blocks(&mut chunk, (from, end), &mut blocks, &mut buffers);
                }
            }
            if segment == 0 && left.is_none() {
                self.past(&mut chunk);
            }
        });
    }

    /// The sum of the rows far on one side of a chunk of keys (chunk 0 is what lies before all keys).
    fn far(&self, unit: &Unit<'_, T>, head: usize, side: usize, chunk: usize) -> Option<Far<'_, T>> {
        let (problem, group) = (self.pass.call.problem, self.pass.call.problem.dims.group());
        self.rows?.get(problem, (unit.index * group + head % group, head), side, chunk)
    }

    /// The gradient of the initial state's sums, and what they add to that of their bias.
    fn past(&self, chunk: &mut Chunk<'_, '_, T>) {
        let (problem, unit) = (self.pass.call.problem, &chunk.unit);
        let Some(past) = unit.past.filter(|past| past.head.marks[EXPONENT] > T::NEG_INFINITY) else { return };
        let (value_dim, value_width) = (problem.dims.value_dim, problem.value_width);
        let features = past.head.keys.len();
        // SAFETY: one task a unit comes here.
        let mut parts = self.pass.call.states.first.as_ref().map(|first| unsafe {
            (first.part(unit.index, 0, 0, features * value_dim), first.part(unit.index, 1, 0, features))
        });
        if let (Some((sum, keys)), Some(last)) = (&mut parts, &chunk.last) {
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
            chunk.lines[n * line_len(problem) + problem.line_width()] += weight * dots;
        }
    }

    /// Adds to the gradients of a block of keys and of the biases what far rows give, and then what the final state does.
    fn add_fars(
        &self,
        chunk: &mut Chunk<'_, '_, T>,
        KeyGradients { keys, dk, dv }: &mut KeyGradients<'_, T>,
        buffers: &mut Buffers<'_, T>,
    ) {
        let (problem, unit) = (self.pass.call.problem, &chunk.unit);
        let Buffers { turned, far_tile, last, .. } = buffers;
        let mut add = |far: Far<'_, T>| {
            // At most a little above 0: each of these rows counts from at least what it sees here.
            let weight = ((far.exponent + keys.exponent) + far.bias).exp();
            let (values, memory) = ((&*keys.v, None, keys.count), (&mut **turned, &mut **far_tile));
            let d_bias = far.add_features(problem, weight, values, (keys.k, dk), memory);
            far.add_values(problem, weight, (keys.k, keys.count), dv, far_tile);
            d_bias
        };
        for (n, head) in problem.heads(unit).enumerate() {
            for side in 0..2 {
                if let Some(far) = self.far(unit, head, side, chunk.index + 1) {
                    chunk.lines[n * line_len(problem) + problem.line_width() + side] += add(far);
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
        chunk: &mut Chunk<'_, '_, T>,
        (from, end): (isize, isize),
        blocks: &mut [KeyGradients<'_, T>],
        buffers: &mut Buffers<'_, T>,
    ) -> isize {
        let (problem, unit) = (self.pass.call.problem, chunk.unit);
        let mut loaded = 0;
        let mut next = from;
        for KeyGradients { keys, dk, dv } in &mut *blocks {
            if next >= end {
                break;
            }
            keys.load(problem, &unit, (next, end), &mut buffers.tiles.map);
            dk.fill(T::ZERO);
            dv.fill(T::ZERO);
            next += keys.count as isize;
            loaded += 1;
        }
        let blocks = &mut blocks[..loaded];
        // Rows before the first see none of the keys.
        let rows = unit.sequence.queries;
        let first = if problem.causal { (from - problem.offset).clamp(0, rows as isize) as usize } else { 0 };
        let near = if self.rows.is_some() { near_rows(problem, &unit, &chunk.keys) } else { 0..rows };
        let near = first.max(near.start)..near.end;
        for (n, head) in problem.heads(&unit).enumerate() {
            let d_line = &mut chunk.lines[n * line_len(problem)..][..problem.line_width()];
            self.pass.tiles(&unit, (n, head), chunk.left, near.clone(), blocks, (d_line, 0), &mut buffers.tiles);
        }
        let seen = problem.seen(&unit);
        for block in blocks {
            let KeyGradients { keys, dk, dv } = &mut *block;
            if chunk.left.is_some_and(|left| !left.keys_of(keys)) {
                continue;
            }
            for row in (0..keys.count).filter(|&row| keys.from + row as isize >= seen) {
                // No row has given anything but what stood in memory.
                dk[row * problem.head_width..][..problem.head_width].fill(T::ZERO);
                dv[row * problem.value_width..][..problem.value_width].fill(T::ZERO);
            }
            if self.rows.is_some() {
                self.add_fars(chunk, block, buffers);
            }
            self.write(chunk, block, &mut buffers.tiles);
        }
        next
    }

    /// Writes the gradients of a block of keys and values, those of an initial state to its ring.
    fn write(&self, chunk: &mut Chunk<'_, '_, T>, block: &mut KeyGradients<'_, T>, buffers: &mut TileBuffers<'_, T>) {
        let (call, unit) = (&self.pass.call, &chunk.unit);
        let problem = call.problem;
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        let (features, value_dim) = (problem.features, problem.dims.value_dim);
        let KeyGradients { keys, dk, dv } = block;
        let ring = |key: isize| chunk.last.filter(|last| key >= last.ring_from).map(|last| last.ring_row(problem, key));
        let kept = ((-keys.from).max(0) as usize).min(keys.count);
        for row in 0..kept {
            let key = keys.from + row as isize;
            let (Some(first), Some(past)) = (&call.states.first, &unit.past) else { break };
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
            let factor = past.head.ring_exponents.get(slot).map_or(T::ONE, |&own| (own - keys.exponent).exp());
            store(&dk[row * head_width..], factor, to_k);
            store(&dv[row * value_width..], T::ONE, to_v);
            if let Some((d_keys, d_values)) = ring(key) {
                add_scaled(to_k, T::ONE, d_keys);
                add_scaled(to_v, T::ONE, &d_values[..value_dim]);
            }
        }
        let (start, rows) = ((keys.from + kept as isize) as usize, keys.count - kept);
        let seen = problem.seen(unit);
        let counts = |key: usize| !unit.sequence.ignores(key) && ((key as isize) < seen || chunk.last.is_some());
        let pairs = (&mut keys.k[kept * head_width..], &mut dk[kept * head_width..]);
        let (dv, map, sums) = (&dv[kept * value_width..], &mut buffers.map, &mut *chunk.map_sums);
        problem.write_keys(unit, (start, rows), counts, pairs, Some(dv), sums, map, call.sink);
        for key in (start..start + rows).filter(|&key| !unit.sequence.ignores(key)) {
            let Some((d_keys, d_values)) = ring(key as isize) else { continue };
            // The ring's key counts from an exponent of its own.
            let (phi, d_phi) = buffers.rows.q.split_at_mut(head_width);
            let d_phi = &mut d_phi[..head_width];
            let exponent = problem.key_piece(unit, key as isize, key as isize + 1).1;
            problem.load_keys(unit, (key, 1), Shift::One(exponent), phi, map);
            d_phi.fill(T::ZERO);
            d_phi[..features].copy_from_slice(d_keys);
            let from = (Side::Key(unit.kv_head), unit.k.skip(key));
            let (d_raw, _) = problem.pull_back(from, (1, |_| true), (phi, d_phi), sums, map);
            // SAFETY: each key belongs to one task.
            let (to_k, to_v) = unsafe { call.sink.key(unit.key_place(key), &problem.dims) };
            add_scaled(to_k, T::ONE, d_raw);
            add_scaled(to_v, T::ONE, &d_values[..value_dim]);
        }
    }
}
