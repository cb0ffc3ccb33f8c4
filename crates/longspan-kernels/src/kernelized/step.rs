//! One token at a time, in constant time and memory: what the forward pass would give for the last row.

use super::layout::FeatureLayout;
use super::problem::LostRows;
use super::state::{Head, OLDEST, SHIFT, add_row};
use super::{KernelizedAttention, Score};
use crate::call::{
    Arena, Dims, Mechanism, State, Step, StepMemory, Token, check_log_decay, check_token, step_rows, token_dims,
};
use crate::error::Error;
use crate::feature_map::FeatureMap;
use crate::feature_map::elementwise::{FeatureDots, Features, Shift, load_features};
use crate::feature_map::rows::{RawRows, RowMap, Side as MapSide};
use crate::fourier::rotation::{self, RotationBuffers, Rotations, Side, TokenRange};
use crate::kernelized::running_sum::AbsorbToken;
use crate::shaw::{RelativeMap, Shaw};
use crate::simd::block::{add_scaled, decay_by, dot, largest, scale_by};
use crate::simd::rows::{Rows, padded};
use crate::simd::token::{AddWeighedValues, ReadToken};
use crate::simd::{Real, dispatch};
use crate::threads;

impl Step for KernelizedAttention {
    fn step<'p, T: Real>(&self, token: &Token<'p, T>, state: &mut State<T>, out: &mut [T]) -> Result<(), Error> {
        let operation = self.name();
        let dims = token_dims(self, token, token.k, state)?;
        let Dims { kv_heads, head_dim, value_dim, .. } = dims;
        check_token(self, &dims, token, state, out)?;
        self.check_options(&dims)?;

        let map = self.feature_map;
        let (parameters, log_decay) = self.split_gate(token.parameters);
        if let Some(log_decay) = log_decay {
            check_log_decay(operation, log_decay)?;
        }
        // The map's own parameters come after those of positions.
        let (parameters, of_map) = parameters.split_at(parameters.len() - map.parameters(&dims).len());
        let row_map = RowMap::new(map, &dims, of_map);
        let layout = FeatureLayout::new::<T>(map.features(head_dim), &self.score);
        if let Score::Fourier(fourier) = self.score {
            rotation::check_positions(&fourier, operation, &dims, parameters, |_, _| false)?;
        }
        let lost = LostRows::new(self);
        let group = dims.group();
        let numbers = state.numbers().len();
        let memory = || Memory {
            numbers: StepMemory::new(),
            rotations: self.score.fourier().map(|fourier| {
                let of_head = Dims { heads: group, kv_heads: 1, ..dims };
                Rotations::empty(fourier, of_head, layout.mapped)
            }),
        };
        let run = |(index, (head, out)): (usize, (Head<&mut [T]>, &mut [T])), memory: &mut Memory<'p, T>| {
            let token = HeadToken {
                attention: self,
                layout,
                row_map: row_map.as_ref(),
                lost: &lost,
                dims: &dims,
                batch: index / kv_heads,
                kv_head: index % kv_heads,
                q: &token.q[index * group * head_dim..][..group * head_dim],
                k: &token.k[index * head_dim..][..head_dim],
                v: &token.v[index * value_dim..][..value_dim],
                parameters,
                log_decay: log_decay.map(|log_decay| log_decay[index]),
                gamma: self.decay.as_ref().map_or(1.0, |decay| decay[index % kv_heads]),
            };
            token.step(head, out, memory);
        };
        let heads = state.heads_mut().map(Head::from).zip(step_rows(out, group * value_dim)).enumerate();
        threads::share_many_with(numbers, heads, memory, run);
        lost.report(operation, &dims)
    }
}

/// What heads that come one after the other work with.
struct Memory<'p, T: 'static> {
    numbers: StepMemory<T>,
    /// The Fourier positions of the head at work and its queries alone.
    rotations: Option<Rotations<'p, T>>,
}

/// The token of one key/value head and the query heads that read it.
struct HeadToken<'a, 'p, T: 'static> {
    attention: &'a KernelizedAttention,
    layout: FeatureLayout,
    row_map: Option<&'a RowMap<'a, T>>,
    lost: &'a LostRows,
    dims: &'a Dims,
    batch: usize,
    kv_head: usize,
    q: &'a [T],
    k: &'a [T],
    v: &'a [T],
    parameters: &'p [&'p [T]],
    log_decay: Option<T>,
    gamma: f64,
}

/// A table's features a row at a time, and what the map of whole rows works with.
struct Work<'s, T> {
    entry: &'s mut [T],
    map: &'s mut [T],
}

/// The Fourier positions of one head's token, with their working memory.
struct Turns<'s, 'a, T: 'static> {
    rotations: &'s Rotations<'a, T>,
    buffers: RotationBuffers<'s, T>,
    mapped: &'s mut [T],
}

impl<'p, T: Real> HeadToken<'_, 'p, T> {
    fn step(&self, mut state: Head<&mut [T]>, out: &mut [T], memory: &mut Memory<'p, T>) {
        let (weighed, denominators) = self.layout.counts();
        let from = if self.layout.separate().is_some() { weighed } else { 0 };
        let (head_dim, features) = (self.k.len(), from + denominators);
        let shaw = self.attention.score.shaw();
        let Memory { numbers, rotations } = memory;
        if let Some(rotations) = rotations {
            rotations.fill(&rotations.fourier.of_head(self.parameters, self.dims.kv_heads, self.kv_head));
        }
        let rotations = rotations.as_ref();
        let width = padded::<T>(features);
        let rows = shaw.map_or(0, |shaw| shaw.radius + 1);
        let mapped = padded::<T>(self.layout.mapped);
        let turning = rotations.map_or(0, |r| mapped + Arena::measure(|arena| r.buffers(1, arena)));
        let mapping = self.row_map.map_or(0, |map| mapped + padded::<T>(map.work_len(1)));
        let mut arena = Arena::new(numbers.take(2 * width + padded::<T>(rows) + turning + mapping));
        let (q, k, weights) = (arena.take(width), arena.take(width), arena.take(rows));
        let work = Work {
            entry: arena.take(self.row_map.map_or(0, |_| mapped)),
            map: arena.take(self.row_map.map_or(0, |map| map.work_len(1))),
        };
        let mut turns = rotations.map(|rotations| {
            let mapped = arena.take(mapped);
            let mut buffers = rotations.buffers(1, &mut arena);
            rotations.start(0, &mut buffers);
            Turns { rotations, buffers, mapped }
        });
        let exp = self.attention.feature_map.is_exponential();
        let key = MapSide::Key(self.kv_head);
        let content = self.attention.score.content();

        if let Some(log_decay) = self.log_decay {
            let factor = log_decay.exp();
            state.passed[0] += log_decay;
            decay_by(state.sum, factor);
            decay_by(state.keys, factor);
            decay_by(state.far, factor);
            state.ring.chunks_exact_mut(self.v.len() + 1).for_each(|row| decay_by(&mut row[self.v.len()..], factor));
        }

        // The exponent that an exponential map subtracts from the keys seen so far.
        let mut shift = T::ZERO;
        if content {
            if exp {
                let top = self.top(key, self.k, work.map);
                let old = state.marks[SHIFT];
                if top > old {
                    if old.is_finite() {
                        let factor = (old - top).exp();
                        scale_by(state.sum, factor);
                        scale_by(state.keys, factor);
                    }
                    state.marks[SHIFT] = top;
                }
                shift = state.marks[SHIFT];
            }
            self.features((Side::Key, key), shift, self.k, state.tokens() as f64, k, &mut turns, work.map);
        }
        if let Some(shaw) = shaw {
            self.advance_ring(shaw.radius, &mut state);
        }

        let value_dim = self.v.len();
        for (n, (raw, out)) in self.q.chunks_exact(head_dim.max(1)).zip(step_rows(out, value_dim)).enumerate() {
            let head = self.kv_head * self.dims.group() + n;
            let query = MapSide::Query(head);
            let q_shift = if exp { finite(self.top(query, raw, work.map)) } else { T::ZERO };
            let sides = (Side::Query(n), query);
            self.features(sides, q_shift, raw, state.tokens() as f64, q, &mut turns, work.map);
            out.fill(T::ZERO);
            let mut sum = T::ZERO;
            // The exponent that `out` and `sum` stand under.
            let mut scale = shift;
            if content {
                if n == 0 {
                    dispatch(AbsorbToken { sum: state.sum, k: &k[..weighed], v: self.v, q, out });
                    add_scaled(state.keys, T::ONE, &k[from..]);
                } else {
                    dispatch(ReadToken { sum: state.sum, q: &q[..weighed], out });
                }
                sum = dot(state.keys, &q[from..]);
            }
            if let Some(shaw) = shaw {
                let table = self.table(shaw, head);
                let (map, table_shift) = match shaw.map {
                    RelativeMap::Identity => (FeatureMap::Identity, T::ZERO),
                    RelativeMap::Same if exp => {
                        let row_max = table.chunks_exact(head_dim.max(1)).map(|row| self.top(key, row, work.map));
                        let top = row_max.filter(|top| top.is_finite()).fold(T::NEG_INFINITY, T::max);
                        (self.attention.feature_map, finite(top))
                    }
                    RelativeMap::Same => (self.attention.feature_map, T::ZERO),
                };
                if exp {
                    scale = if content { shift.max(table_shift) } else { table_shift };
                    if scale != shift {
                        let factor = (shift - scale).exp();
                        scale_by(out, factor);
                        sum *= factor;
                    }
                }
                if let Some(rows) = self.row_map.filter(|_| shaw.map == RelativeMap::Same) {
                    for (row, weight) in table.chunks_exact(head_dim.max(1)).zip(&mut *weights) {
                        self.map_row(rows, key, table_shift, row, work.entry, work.map);
                        *weight = dot(&q[..self.layout.mapped], work.entry);
                    }
                } else {
                    dispatch(FeatureDots {
                        map,
                        shift: table_shift,
                        rows: table,
                        width: self.table_row(shaw),
                        q,
                        to: weights,
                    });
                }
                if scale != table_shift {
                    scale_by(weights, (table_shift - scale).exp());
                }
                sum += self.add_relative(shaw.radius, weights, &state, out);
            }
            if !self.attention.normalizes() {
                if exp {
                    scale_by(out, (scale + q_shift).exp());
                }
            } else if self.lost.gives_nothing(sum) {
                self.lost.see(sum, self.batch * self.dims.heads + head, || largest(self.k).is_finite());
                out.fill(T::ZERO);
            } else {
                scale_by(out, T::ONE / sum);
            }
        }
        state.count_token();
        if self.gamma != 1.0 {
            let gamma = T::from_f64(self.gamma);
            decay_by(state.sum, gamma);
            decay_by(state.keys, gamma);
            decay_by(state.far, gamma);
        }
    }

    /// The largest exponent of a row under an exponential map.
    fn top(&self, side: MapSide, x: &[T], work: &mut [T]) -> T {
        let Some(map) = self.row_map else { return largest(x) };
        let mut top = [T::ZERO];
        map.row_max(RawRows::one(side, x), &mut top, work);
        top[0]
    }

    /// The features of one row under a map of whole rows.
    fn map_row(&self, map: &RowMap<'_, T>, side: MapSide, shift: T, x: &[T], to: &mut [T], work: &mut [T]) {
        let row = to.len();
        map.write(RawRows::one(side, x), Shift::One(shift), to, row, work);
    }

    /// The features of the token's query or key, at the position that `tokens` before it make, without gaps.
    #[allow(clippy::too_many_arguments)]
    fn features(
        &self,
        (side, of): (Side, MapSide),
        shift: T,
        x: &[T],
        tokens: f64,
        to: &mut [T],
        turns: &mut Option<Turns<'_, '_, T>>,
        work: &mut [T],
    ) {
        let (row, map, from) = (to.len(), self.attention.feature_map, Rows { data: x, stride: x.len() });
        let Some(Turns { rotations, buffers, mapped }) = turns else {
            return match self.row_map {
                Some(map) => self.map_row(map, of, shift, x, to, work),
                None => load_features((map, shift), from, (1, x.len()), None, (to, row)),
            };
        };
        let mapped_row = mapped.len();
        let features = match self.row_map {
            Some(map) => {
                self.map_row(map, of, shift, x, mapped, work);
                Features::Formed(mapped)
            }
            None => Features::Mapped { map, shift, from, ignored: None, to: mapped, keep: false },
        };
        let range = TokenRange {
            side,
            batch: self.batch,
            kv_head: 0,
            token: 0,
            count: 1,
            position: tokens,
            origin: tokens,
            ignored: None,
        };
        rotations.rotate(&range, (features, mapped_row), (to, row), self.layout.mapped, &mut [], buffers);
    }

    /// The rows of a query head's table that a causal token meets: from "`R` or more before" to "here".
    fn table(&self, shaw: Shaw, head: usize) -> &[T] {
        let len = self.table_row(shaw);
        let start = if shaw.shared { 0 } else { head * shaw.rows() * len };
        &self.parameters[0][start..][..(shaw.radius + 1) * len]
    }

    fn table_row(&self, shaw: Shaw) -> usize {
        shaw.row_len(self.attention.feature_map, self.k.len())
    }

    /// The oldest row of the ring becomes far, the token's value takes its place. Without a ring the value is far.
    fn advance_ring(&self, radius: usize, state: &mut Head<&mut [T]>) {
        let value_dim = self.v.len();
        let width = value_dim + 1;
        if radius == 0 {
            add_scaled(&mut state.far[..value_dim], T::ONE, self.v);
            state.far[value_dim] += T::ONE;
            return;
        }
        let oldest = state.marks[OLDEST].to_f64() as usize % radius;
        let row = &mut state.ring[oldest * width..][..width];
        // Its weight has fallen with every token since it came.
        let weight = if self.gamma == 1.0 { T::ONE } else { T::from_f64(self.gamma.powf(radius as f64)) };
        add_row(state.far, weight, row);
        row[..value_dim].copy_from_slice(self.v);
        row[value_dim] = T::ONE;
        state.marks[OLDEST] = T::from_f64(((oldest + 1) % radius) as f64);
    }

    /// Adds the relative term of one query head to `out`, given the products of its query with the table's rows; returns
    /// its share of the denominator.
    fn add_relative(&self, radius: usize, weights: &mut [T], state: &Head<&mut [T]>, out: &mut [T]) -> T {
        let (far, near) = weights.split_at_mut(1);
        if self.gamma != 1.0 {
            // Table row R is the token itself, each row before it one token earlier.
            let mut decay = 1.0;
            for weight in near.iter_mut().rev() {
                *weight *= T::from_f64(decay);
                decay *= self.gamma;
            }
        }
        let mut sum = dispatch(AddWeighedValues { rows: state.far, weights: far, to: out });
        if radius > 0 {
            // The ring's oldest row is R − 1 tokens ago: table row 1.
            let oldest = state.marks[OLDEST].to_f64() as usize % radius;
            let width = self.v.len() + 1;
            let (later, earlier) = state.ring.split_at(oldest * width);
            let (first, second) = near.split_at_mut(radius - oldest);
            for (rows, weights) in [(earlier, first), (later, second)] {
                if self.log_decay.is_none() {
                    sum += dispatch(AddWeighedValues { rows, weights, to: out });
                    continue;
                }
                weights.iter_mut().zip(rows.chunks_exact(width)).for_each(|(weight, row)| *weight *= row[width - 1]);
                dispatch(AddWeighedValues { rows, weights, to: out });
                sum += weights.iter().copied().sum();
            }
        }
        sum
    }
}

/// `x`, or 0 where nothing finite was there to be subtracted.
fn finite<T: Real>(x: T) -> T {
    if x.is_finite() { x } else { T::ZERO }
}
