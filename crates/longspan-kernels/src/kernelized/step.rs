//! One token at a time, in constant time and memory: what the forward pass would give for the last row.

use rayon::prelude::*;

use super::features::FeatureLayout;
use super::problem::NegativeRows;
use super::state::{self, Head, OLDEST, SHIFT};
use super::{KernelizedAttention, Score};
use crate::error::Error;
use crate::feature_map::FeatureMap;
use crate::fourier::rotation::{Rotations, Side, Span};
use crate::mechanism::{Mechanism, Token, check_token, step_rows, token_dims};
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

    let layout = FeatureLayout::new::<T>(head_dim, &attention.score);
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
    let tasks = state.heads_mut().map(Head::from).zip(step_rows(out, group * value_dim)).enumerate();
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
        let exp = map == FeatureMap::Exp;
        let content = self.attention.score.content();
        let shaw = self.attention.score.shaw();

        // The exponents of an exponential map: of keys seen so far, of the table, and of both.
        let mut shift = T::ZERO;
        let mut table_shift = T::ZERO;
        if exp {
            if content {
                let top = largest(self.k);
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
                let top = largest(table);
                table_shift = if top.is_finite() { top } else { T::ZERO };
            }
        }
        if content {
            self.features(Side::Key, shift, self.k, state.tokens() as f64, k);
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
        for (n, (raw, out)) in self.q.chunks_exact(head_dim.max(1)).zip(step_rows(out, value_dim)).enumerate() {
            let q_shift = if exp { largest(raw) } else { T::ZERO };
            let q_shift = if q_shift.is_finite() { q_shift } else { T::ZERO };
            self.features(Side::Query(self.first_head + n), q_shift, raw, state.tokens() as f64, q);
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
                sum +=
                    self.add_relative(shaw, self.first_head + n, table_shift, relative_scale, q, relative, &state, out);
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

    /// The features of the token's query or key, at the position that `tokens` before it make, without gaps.
    fn features(&self, side: Side, shift: T, x: &[T], tokens: f64, to: &mut [T]) {
        let Some(rotations) = self.rotations else {
            return self.map(self.attention.feature_map, shift, x, to);
        };
        let mut mapped = vec![T::ZERO; padded::<T>(x.len())];
        self.map(self.attention.feature_map, shift, x, &mut mapped);
        let mut memory = vec![T::ZERO; rotations.buffers_len(1)];
        let mut buffers = rotations.buffers(1, &mut Arena::new(&mut memory));
        let kv_head = self.first_head / (self.q.len() / x.len().max(1)).max(1);
        rotations.start(kv_head, &mut buffers);
        let span = Span { side, batch: self.batch, kv_head, token: 0, count: 1, position: tokens, ignored: None };
        let row = to.len();
        rotations.rotate(&span, &mapped, mapped.len(), to, row, self.layout.mapped, &mut buffers);
    }

    /// `φ(x − shift)` into a block row.
    fn map(&self, map: FeatureMap, shift: T, x: &[T], to: &mut [T]) {
        let row = to.len();
        self.ops.load(map, shift, Rows { data: x, stride: x.len() }, 1, x.len(), None, to, row);
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
    ) -> T {
        let (head_dim, value_dim) = (self.k.len(), self.v.len());
        let Some(table) = self.table else { return T::ZERO };
        let table = &table[if shaw.shared { 0 } else { head * shaw.rows() * head_dim }..];
        let map = match shaw.map {
            RelativeMap::Same => self.attention.feature_map,
            RelativeMap::Identity => FeatureMap::Identity,
        };
        let mut sum = T::ZERO;
        let mut add = |row: usize, decay: T, values: &[T]| {
            self.map(map, table_shift, &table[row * head_dim..][..head_dim], entry);
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

fn largest<T: Real>(x: &[T]) -> T {
    x.iter().copied().fold(T::NEG_INFINITY, T::max)
}
