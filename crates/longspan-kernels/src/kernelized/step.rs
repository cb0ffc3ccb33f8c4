//! One token at a time, in constant time and memory: what the forward pass would give for the last row.

use rayon::prelude::*;

use super::features::FeatureLayout;
use super::problem::NegativeRows;
use super::state::{self, Head, OLDEST, SHIFT};
use super::{KernelizedAttention, Score};
use crate::error::Error;
use crate::feature_map::FeatureMap;
use crate::feature_map::mapping::largest;
use crate::feature_map::rows::{RowMap, Shift, Side as MapSide};
use crate::fourier::rotation::{Rotations, Side, Span};
use crate::mechanism::{Mechanism, Token, check_token, token_dims};
use crate::real::Real;
use crate::scratch::{Arena, padded};
use crate::shape::{Dims, Rows};
use crate::shaw::RelativeMap;
use crate::simd::Ops;
use crate::state::State;

/// Numbers of state below which handing heads to other threads costs more than it saves: a rayon hand-over takes a few
/// microseconds, in which one thread updates about this many.
const PARALLEL_NUMBERS: usize = 1 << 17;

/// Features whose working memory fits the stack of a task.
const STACK: usize = 512;

/// Takes one token into `state` and writes its output.
pub(super) fn step<T: Real>(
    attention: &KernelizedAttention,
    token: &Token<'_, T>,
    state: &mut State<T>,
    out: &mut [T],
) -> Result<(), Error> {
    let operation = Mechanism::<T>::name(attention);
    let dims = token_dims(attention, token, token.k, state)?;
    let Dims { batch: _, heads, kv_heads, head_dim, value_dim, .. } = dims;
    state::check(attention, &dims, state, "state")?;
    check_token(attention, &dims, token, out)?;
    attention.check_decay(operation, kv_heads)?;
    attention.check_feature_map(&dims)?;

    let map = attention.feature_map;
    let own = token.parameters.len() - map.parameters(&dims).len();
    let row_map = RowMap::new(map, &dims, &token.parameters[own..]);
    let layout = FeatureLayout::new::<T>(map.features(head_dim), &attention.score);
    let rotations = match attention.score {
        Score::Fourier(fourier) => {
            fourier.check(operation, layout.mapped)?;
            let rotations = Rotations::new(fourier, dims, layout.mapped, token.parameters);
            rotations.check_positions(operation, |_, _| false)?;
            Some(rotations)
        }
        _ => None,
    };
    let negative = NegativeRows::new(attention.wants_positive());
    let group = dims.group();
    let numbers = state.numbers().len();
    let ops = T::ops();
    let run = |(index, (head, out)): (usize, (Head<&mut [T]>, &mut [T]))| {
        let token = HeadToken {
            attention,
            layout,
            row_map: row_map.as_ref(),
            rotations: rotations.as_ref(),
            negative: &negative,
            batch: index / kv_heads,
            heads,
            ops,
            q: &token.q[index * group * head_dim..][..group * head_dim],
            k: &token.k[index * head_dim..][..head_dim],
            v: &token.v[index * value_dim..][..value_dim],
            table: token.parameters.first().copied(),
            first_head: index % kv_heads * group,
            gamma: attention.decay.as_ref().map_or(1.0, |decay| decay[index % kv_heads]),
        };
        token.step(head, out);
    };
    if value_dim == 0 {
        return Ok(());
    }
    let tasks = state.heads_mut().map(Head::from).zip(out.chunks_exact_mut(group * value_dim)).enumerate();
    if numbers < PARALLEL_NUMBERS {
        tasks.for_each(run);
    } else {
        let tasks: Vec<_> = tasks.collect();
        tasks.into_par_iter().for_each(run);
    }
    negative.report(operation, &dims)
}

/// The token of one key/value head and the query heads that read it.
struct HeadToken<'a, T: 'static> {
    attention: &'a KernelizedAttention,
    layout: FeatureLayout,
    row_map: Option<&'a RowMap<'a, T>>,
    rotations: Option<&'a Rotations<'a, T>>,
    negative: &'a NegativeRows,
    batch: usize,
    heads: usize,
    ops: &'static Ops<T>,
    q: &'a [T],
    k: &'a [T],
    v: &'a [T],
    table: Option<&'a [T]>,
    first_head: usize,
    gamma: f64,
}

impl<T: Real> HeadToken<'_, T> {
    fn step(&self, mut state: Head<&mut [T]>, out: &mut [T]) {
        let (weighed, denominators) = self.layout.counts();
        let from = if self.layout.separate().is_some() { weighed } else { 0 };
        let (head_dim, features) = (self.k.len(), from + denominators);
        let width = padded::<T>(features);
        let mut stack = [T::ZERO; STACK];
        let mut heap = Vec::new();
        let work: &mut [T] = if 3 * width <= STACK {
            &mut stack[..3 * width]
        } else {
            heap.resize(3 * width, T::ZERO);
            &mut heap
        };
        let (q, work) = work.split_at_mut(width);
        let (k, relative) = work.split_at_mut(width);
        let map = self.attention.feature_map;
        let exp = map.is_exponential();
        let mut work = vec![T::ZERO; self.row_map.map_or(0, |map| map.work_len(1))];
        let work = &mut *work;
        let kv_head = self.first_head / (self.q.len() / self.k.len().max(1)).max(1);
        let content = self.attention.score.content();
        let shaw = self.attention.score.shaw();

        // The exponents of an exponential map: of keys seen so far, of the table, and of both.
        let mut shift = T::ZERO;
        let mut table_shift = T::ZERO;
        if exp {
            if content {
                let top = self.top(MapSide::Key(kv_head), self.k, work);
                let old = state.marks[SHIFT];
                if top > old {
                    if old.is_finite() {
                        let factor = (old - top).exp();
                        self.ops.scale(state.sum, factor);
                        self.ops.scale(state.keys, factor);
                    }
                    state.marks[SHIFT] = top;
                }
                shift = state.marks[SHIFT];
            }
            if let Some(table) = self.table
                && shaw.is_some_and(|shaw| shaw.map == RelativeMap::Same)
            {
                table_shift = self.table_top(table, kv_head, head_dim, work);
            }
        }
        if content {
            self.features(Side::Key, MapSide::Key(kv_head), shift, self.k, state.tokens() as f64, k, work);
        }
        if let Some(shaw) = shaw {
            self.advance_ring(shaw.radius, &mut state);
        }
        let scale = if exp && content && shaw.is_some() { shift.max(table_shift) } else { shift };
        let (content_scale, relative_scale) = if exp && shaw.is_some() {
            let scale = if content { scale } else { table_shift };
            ((shift - scale).exp(), (table_shift - scale).exp())
        } else {
            (T::ONE, T::ONE)
        };

        let value_dim = self.v.len();
        for (n, (raw, out)) in self.q.chunks_exact(head_dim.max(1)).zip(out.chunks_exact_mut(value_dim)).enumerate() {
            let head = self.first_head + n;
            let q_shift = if exp { self.top(MapSide::Query(head), raw, work) } else { T::ZERO };
            let q_shift = if q_shift.is_finite() { q_shift } else { T::ZERO };
            let (side, tokens) = (MapSide::Query(head), state.tokens() as f64);
            self.features(Side::Query(head), side, q_shift, raw, tokens, q, work);
            out.fill(T::ZERO);
            let mut sum = T::ZERO;
            if content {
                if n == 0 {
                    self.ops.absorb_token(state.sum, &k[..weighed], self.v, q, out);
                    self.ops.add_scaled(state.keys, T::ONE, &k[from..]);
                } else {
                    self.ops.read_token(state.sum, &q[..weighed], out);
                }
                sum = self.ops.dot(state.keys, &q[from..]);
                if content_scale != T::ONE {
                    self.ops.scale(out, content_scale);
                    sum *= content_scale;
                }
            }
            if let Some(shaw) = shaw {
                sum += self.add_relative(shaw, head, table_shift, relative_scale, q, relative, &state, out, work);
            }
            if !self.attention.normalizes() {
                if exp {
                    let scale = if content { scale } else { table_shift };
                    self.ops.scale(out, (scale + q_shift).exp());
                }
            } else if self.negative.gives_nothing(sum) {
                let heads = self.heads;
                self.negative.see(sum, self.batch * heads + self.first_head + n);
                out.fill(T::ZERO);
            } else {
                self.ops.scale(out, T::ONE / sum);
            }
        }
        state.count_token();
        if self.gamma != 1.0 {
            let gamma = T::from_f64(self.gamma);
            self.ops.scale(state.sum, gamma);
            self.ops.scale(state.keys, gamma);
            self.ops.scale(state.far, gamma);
        }
    }

    /// The largest exponent of a row under an exponential map.
    fn top(&self, side: MapSide, x: &[T], work: &mut [T]) -> T {
        let Some(map) = self.row_map else { return largest(x) };
        let mut top = [T::ZERO];
        map.tops(side, Rows { data: x, stride: x.len() }, 1, &mut top, work);
        top[0]
    }

    /// The largest exponent of a table, or 0 if none is finite.
    fn table_top(&self, table: &[T], kv_head: usize, head_dim: usize, work: &mut [T]) -> T {
        let tops = table.chunks_exact(head_dim.max(1)).map(|row| self.top(MapSide::Key(kv_head), row, work));
        let top = tops.filter(|top| top.is_finite()).fold(T::NEG_INFINITY, T::max);
        if top.is_finite() { top } else { T::ZERO }
    }

    /// The features of the token's query or key, at the position that `tokens` before it make, without gaps.
    #[allow(clippy::too_many_arguments)]
    fn features(&self, side: Side, of: MapSide, shift: T, x: &[T], tokens: f64, to: &mut [T], work: &mut [T]) {
        let Some(rotations) = self.rotations else {
            return self.map(self.attention.feature_map, of, shift, x, to, work);
        };
        let mut mapped = vec![T::ZERO; padded::<T>(self.layout.mapped)];
        self.map(self.attention.feature_map, of, shift, x, &mut mapped, work);
        let mut memory = vec![T::ZERO; rotations.buffers_len(1)];
        let mut buffers = rotations.buffers(1, &mut Arena::new(&mut memory));
        let kv_head = self.first_head / (self.q.len() / x.len().max(1)).max(1);
        rotations.start(kv_head, &mut buffers);
        let span = Span { side, batch: self.batch, kv_head, token: 0, count: 1, position: tokens, ignored: None };
        let row = to.len();
        rotations.rotate(&span, &mapped, mapped.len(), to, row, self.layout.mapped, &mut buffers);
    }

    /// `φ(x)` into a block row, relative to the exponent `shift` where there is one.
    fn map(&self, map: FeatureMap, side: MapSide, shift: T, x: &[T], to: &mut [T], work: &mut [T]) {
        let (row, from) = (to.len(), Rows { data: x, stride: x.len() });
        match self.row_map {
            Some(rows) if !map.is_elementwise() => rows.write(side, from, 1, None, Shift::One(shift), to, row, work),
            _ => self.ops.load(map, shift, from, 1, x.len(), None, to, row),
        }
    }

    /// The oldest row of the ring becomes far, the token's value takes its place. Without a ring the value is far.
    fn advance_ring(&self, radius: usize, state: &mut Head<&mut [T]>) {
        let value_dim = self.v.len();
        let width = value_dim + 1;
        if radius == 0 {
            self.ops.add_scaled(&mut state.far[..value_dim], T::ONE, self.v);
            state.far[value_dim] += T::ONE;
            return;
        }
        let oldest = state.marks[OLDEST].to_f64() as usize % radius;
        let row = &mut state.ring[oldest * width..][..width];
        // Its weight has fallen with every token since it came.
        let weight = if self.gamma == 1.0 { T::ONE } else { T::from_f64(self.gamma.powf(radius as f64)) };
        self.ops.add_scaled(state.far, weight, row);
        row[..value_dim].copy_from_slice(self.v);
        row[value_dim] = T::ONE;
        state.marks[OLDEST] = T::from_f64(((oldest + 1) % radius) as f64);
    }

    /// Adds the relative term of one query head to `out`; returns its share of the denominator.
    #[allow(clippy::too_many_arguments)]
    fn add_relative(
        &self,
        shaw: crate::Shaw,
        head: usize,
        table_shift: T,
        scale: T,
        q: &[T],
        entry: &mut [T],
        state: &Head<&mut [T]>,
        out: &mut [T],
        work: &mut [T],
    ) -> T {
        let value_dim = self.v.len();
        let len = shaw.row_len(self.attention.feature_map, self.k.len());
        let Some(table) = self.table else { return T::ZERO };
        let table = &table[if shaw.shared { 0 } else { head * shaw.rows() * len }..];
        let side = MapSide::Key(head / (self.q.len() / self.k.len().max(1)).max(1));
        let map = match shaw.map {
            RelativeMap::Same => self.attention.feature_map,
            RelativeMap::Identity => FeatureMap::Identity,
        };
        let mut sum = T::ZERO;
        let mut add = |row: usize, decay: T, values: &[T]| {
            self.map(map, side, table_shift, &table[row * len..][..len], entry, work);
            let weight = self.ops.dot(entry, q) * scale * decay;
            self.ops.add_scaled(out, weight, &values[..value_dim]);
            sum += weight * values[value_dim];
        };
        add(0, T::ONE, state.far);
        let oldest = state.marks[OLDEST].to_f64() as usize;
        for back in 0..shaw.radius {
            // `back` tokens ago: distance −back, table row R − back.
            let row = (oldest + 2 * shaw.radius - 1 - back) % shaw.radius;
            let decay = if self.gamma == 1.0 { T::ONE } else { T::from_f64(self.gamma.powf(back as f64)) };
            add(shaw.radius - back, decay, &state.ring[row * (value_dim + 1)..][..value_dim + 1]);
        }
        sum
    }
}
