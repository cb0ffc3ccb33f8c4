//! The attention part of a block: `y = x + dropout(A(norm(x)·W + b)·W₂ + b₂)`, with or without norm and residual `x`, where `A` is a
//! mechanism on heads that lie side by side in the columns of one projection: first the queries', then the keys', then the values'.
//! Between the queries' and the keys' stand those of gates, if the heads' outputs go through a gated norm before the last layer.
//!
//! In cross-attention keys and values are projections of a memory, by the same weight's later columns. For the backward
//! projections, heads' outputs and denominators are kept, or nothing, and all is formed again.

use std::borrow::Cow;
use std::fmt::Debug;
use std::ops::Range;

use super::dropout::Dropout;
use super::feed_forward::Weights;
use super::gated_norm::{GatedNormWeights, Gates};
use super::gradients;
use super::linear::{Kept, Linear, LinearGradients};
use super::norm::NormWeights;
use super::products::try_zeros;
use longspan_core::error::{Error, expect};
use longspan_core::simd::block::add_scaled;
use longspan_kernels::Purpose;
use longspan_kernels::{
    Call, CombineGradients, Cotangent, Dims, Gradients, Kernel, Mask, Output, Scratch, State, View, ViewMut,
};

/// What keys and values are projections of, if not of the queries' own rows.
#[derive(Debug, Clone, Copy)]
pub struct Memory<'a> {
    /// `[batch, keys, width]`.
    pub numbers: &'a [f32],
    /// Keys of each batch entry.
    pub keys: usize,
}

/// A causal sequence that is cut into stretches, of which a call computes one beside others that compute theirs. What they exchange
/// are states.
pub trait Stretches: Debug + Sync {
    /// From the state of this stretch alone: that of all tokens before it, and that after the last stretch. A backward that forms
    /// everything again asks once more, and needs no second exchange.
    ///
    /// # Errors
    /// States that have no sum.
    fn exchange(&self, own: State<f32>, parameters: &[&[f32]]) -> Result<[State<f32>; 2], Error>;

    /// From the gradient of the state before this stretch: those of its own state and of the parameters, or `None` where nothing
    /// comes after it.
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange).
    fn exchange_back(
        &self,
        d_before: State<f32>,
        parameters: &[&[f32]],
    ) -> Result<Option<CombineGradients<f32>>, Error>;
}

/// One call of multi-head attention.
#[derive(Debug, Clone, Copy)]
pub struct MultiHead<'a> {
    /// `[batch, queries, heads · head_dim]`.
    pub x: &'a [f32],
    /// Independent sequences.
    pub batch: usize,
    /// Rows of each.
    pub queries: usize,
    /// In cross-attention.
    pub memory: Option<Memory<'a>>,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads, a divisor of `heads`.
    pub kv_heads: usize,
    /// Numbers of a query and of a value.
    pub head_dim: usize,
    /// The norm of `x` that is projected, if not `x` itself.
    pub norm: Option<NormWeights<'a>>,
    /// `W` and `b`: to `heads · head_dim + kv_heads · (key_dim + head_dim)` columns, and `heads · head_dim` gates after the queries if
    /// there is a gated norm.
    pub projection: Weights<'a>,
    /// `A`.
    pub kernel: &'a dyn Kernel<f32>,
    /// What it has learned.
    pub parameters: &'a [&'a [f32]],
    /// What a query sees.
    pub mask: Mask<'a>,
    /// The state of the tokens before the first. No gradient passes to it.
    pub initial_state: Option<&'a State<f32>>,
    /// What stands before the first token, and takes gradients, in the place of an initial state.
    pub stretches: Option<&'a dyn Stretches>,
    /// The gated norm of heads' outputs, if there is one.
    pub gated_norm: Option<GatedNormWeights<'a>>,
    /// `W₂` and `b₂`, `[heads · head_dim, heads · head_dim]`.
    pub output: Weights<'a>,
    /// What it drops of the last layer's results.
    pub dropout: Option<Dropout>,
    /// Whether `x` is added.
    pub residual: bool,
}

/// What a forward leaves for its backward.
#[derive(Debug, Clone)]
pub struct KeptAttention {
    projections: Projections,
    /// The state of the stretches before.
    before: Option<State<f32>>,
    /// `[batch, queries, heads · head_dim]`, before a gated norm.
    heads: Vec<f32>,
    /// `[batch, heads, queries]`.
    denominators: Vec<f32>,
}

/// Rows of projections, of the queries' rows and, in cross-attention, of the memory's.
#[derive(Debug, Clone)]
struct Projections {
    own: Vec<f32>,
    memory: Vec<f32>,
}

/// The gradients of a call. Those of a memory or of norms that are not there are empty.
#[derive(Debug, Clone, PartialEq)]
pub struct MultiHeadGradients {
    /// As `x`, that by the residual included.
    pub dx: Vec<f32>,
    /// As the memory.
    pub d_memory: Vec<f32>,
    /// Of `γ` and `β`.
    pub d_norm: [Vec<f32>; 2],
    /// Of `W` and `b`.
    pub d_projection: [Vec<f32>; 2],
    /// Of what the mechanism has learned, one after the other.
    pub d_parameters: Vec<f32>,
    /// Of the gated norm's `γ`.
    pub d_gated_norm: Vec<f32>,
    /// Of `W₂` and `b₂`.
    pub d_output: [Vec<f32>; 2],
}

const OPERATION: &str = "multi_head";

impl<'a> MultiHead<'a> {
    pub(super) fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    pub(super) fn dims(&self) -> Dims {
        let Self { batch, heads, kv_heads, queries, head_dim, .. } = *self;
        let keys = self.memory.map_or(queries, |memory| memory.keys);
        Dims { batch, heads, kv_heads, queries, keys, head_dim, value_dim: head_dim }
    }

    /// Heads and widths of queries, gates, keys and values.
    pub(super) fn parts(&self) -> [[usize; 2]; 4] {
        let key_dim = self.kernel.key_dim(&self.dims());
        let gates = if self.gated_norm.is_some() { self.heads } else { 0 };
        let [queries, gates] = [self.heads, gates].map(|heads| [heads, self.head_dim]);
        [queries, gates, [self.kv_heads, key_dim], [self.kv_heads, self.head_dim]]
    }

    /// Columns of the projection that are made of the queries' rows: theirs and gates.
    pub(super) fn query_columns(&self) -> usize {
        self.width() * (1 + usize::from(self.gated_norm.is_some()))
    }

    /// The mechanism's state before the first token.
    ///
    /// # Errors
    /// Sizes that the mechanism refuses, and memory that is not there.
    pub fn empty_state(&self) -> Result<State<f32>, Error> {
        self.kernel.empty_state(&self.dims())
    }

    pub(super) fn columns(&self) -> usize {
        self.parts().iter().map(|[heads, width]| heads * width).sum()
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        let dims = self.dims();
        dims.check(OPERATION)?;
        let width = self.width();
        let length = |name, got: usize, [a, b]: [usize; 2]| {
            expect(got == a * b * width, OPERATION, name, || format!("{a} × {b} × {width} numbers"), || got.to_string())
        };
        length("x", self.x.len(), [dims.batch, dims.queries])?;
        if let Some(Memory { numbers, keys }) = self.memory {
            length("memory", numbers.len(), [dims.batch, keys])?;
        }
        expect(width > 0, OPERATION, "heads", || "heads of at least 1 number".into(), || "0".into())?;
        let apart = self.stretches.is_none() || self.memory.is_none();
        expect(apart, OPERATION, "stretches", || "none beside a memory".into(), || "both".into())?;
        self.norm.map_or(Ok(()), |norm| norm.check(OPERATION, width))?;
        self.projection.check(OPERATION, "projection", [width, self.columns()])?;
        self.gated_norm.map_or(Ok(()), |norm| norm.check(OPERATION, width))?;
        self.output.check(OPERATION, "output", [width, width])
    }

    /// The linear layers that project: all columns of the queries' rows, or in cross-attention the queries' columns of them and the
    /// later ones of the memory's rows.
    fn projections(&self) -> [Option<Linear<'a>>; 2] {
        match self.memory {
            None => [Some(self.columns_of(self.x, 0..self.columns()).with_norm(self.norm)), None],
            Some(memory) => [
                Some(self.columns_of(self.x, 0..self.query_columns()).with_norm(self.norm)),
                Some(self.keys_and_values(memory.numbers, None)),
            ],
        }
    }

    /// The part of the projection that makes keys and values of rows.
    fn keys_and_values(&self, rows: &'a [f32], norm: Option<NormWeights<'a>>) -> Linear<'a> {
        self.columns_of(rows, self.query_columns()..self.columns()).with_norm(norm)
    }

    /// Some columns of the projection.
    fn columns_of(&self, rows: &'a [f32], columns: Range<usize>) -> Linear<'a> {
        let width = self.width();
        let Weights { weight, bias } = self.projection;
        Linear::new(rows, &weight[columns.start.min(weight.len())..], [rows.len() / width, width, columns.len()])
            .with_stride(self.columns())
            .with_bias(bias.map(|bias| &bias[columns]))
    }

    fn project(&self) -> Result<Projections, Error> {
        let [own, memory] = self.projections();
        let forward = |layer: Option<Linear<'_>>| layer.map_or(Ok(Vec::new()), |layer| layer.forward());
        Ok(Projections { own: forward(own)?, memory: forward(memory)? })
    }

    /// The state of the stretches before. Where there are any, the final state is filled here, and the call is to fill none.
    fn before(
        &self,
        projections: &Projections,
        final_state: &mut Option<&mut State<f32>>,
        scratch: &mut Scratch<f32>,
    ) -> Result<Option<State<f32>>, Error> {
        let Some(stretches) = self.stretches else { return Ok(None) };
        let own = self.state_of(self.stretch(projections), self.queries, None, scratch)?;
        let [before, last] = stretches.exchange(own, self.parameters)?;
        if let Some(to) = final_state.take() {
            *to = last;
        }
        Ok(Some(before))
    }

    /// Keys and values of self-attention, as [`state_of`](Self::state_of) takes them.
    fn stretch<'c>(&self, projections: &'c Projections) -> (&'c [f32], usize, usize) {
        (&projections.own, self.columns(), self.query_columns())
    }

    /// The mechanism's call on projections.
    fn call<'c>(&'c self, projections: &'c Projections, before: Option<&'c State<f32>>) -> Call<'c, f32>
    where
        'a: 'c,
    {
        let (columns, query_columns) = (self.columns(), self.query_columns());
        let Projections { own, memory } = projections;
        let (queries, keys) = match self.memory {
            None => ((own.as_slice(), columns), (own.as_slice(), columns, query_columns)),
            Some(_) => ((own.as_slice(), query_columns), (memory.as_slice(), columns - query_columns, 0)),
        };
        let before = before.or(self.initial_state);
        self.call_of(self.dims(), queries, keys).with_mask(self.mask).with_initial_state(before)
    }

    /// A call on rows of so many columns whose first are queries, and on rows of so many columns of which some, from one on, are keys
    /// and values.
    fn call_of<'c>(
        &'c self,
        dims: Dims,
        (queries, query_columns): (&'c [f32], usize),
        (keys, columns, first): (&'c [f32], usize, usize),
    ) -> Call<'c, f32>
    where
        'a: 'c,
    {
        let [[_, q], _, [kv_heads, k], [_, v]] = self.parts();
        // Strides of batch, head and token of a part that begins at a column.
        let view = |numbers: &'c [f32], tokens: usize, columns: usize, first: usize, width: usize| {
            View::strided(&numbers[first.min(numbers.len())..], [tokens * columns, width, columns])
        };
        Call::new(
            dims,
            view(queries, dims.queries, query_columns, 0, q),
            view(keys, dims.keys, columns, first, k),
            view(keys, dims.keys, columns, first + kv_heads * k, v),
        )
        .with_parameters(self.parameters)
    }

    /// The gates among the columns of projections of the queries' rows.
    fn gate<'c>(&self, own: &'c [f32]) -> Gates<'c> {
        let stride = if self.memory.is_some() { self.query_columns() } else { self.columns() };
        Gates { numbers: &own[self.width().min(own.len())..], stride }
    }

    /// What the last layer is given of what was kept.
    fn normed<'k>(&self, kept: &'k KeptAttention) -> Result<Cow<'k, [f32]>, Error> {
        Ok(match self.gated_norm {
            None => Cow::Borrowed(&kept.heads),
            Some(norm) => Cow::Owned(norm.of(&kept.heads, self.gate(&kept.projections.own), self.head_dim)?),
        })
    }

    /// The layer after the heads.
    fn last<'l>(&'l self, heads: &'l [f32]) -> Linear<'l> {
        let width = self.width();
        Linear::new(heads, self.output.weight, [heads.len() / width, width, width])
            .with_bias(self.output.bias)
            .with_dropout(self.dropout)
            .with_residual(self.residual.then_some(self.x))
    }

    /// The result, as `x`, and the state after the last token if it is wanted.
    ///
    /// # Errors
    /// Sizes that do not fit, what the mechanism refuses, and memory that is not there.
    pub fn forward(&self, scratch: &mut Scratch<f32>, final_state: Option<&mut State<f32>>) -> Result<Vec<f32>, Error> {
        self.check()?;
        let KeptAttention { projections, mut heads, .. } = self.kept(Purpose::Inference, scratch, final_state)?;
        if let Some(norm) = self.gated_norm {
            norm.apply(&mut heads, self.gate(&projections.own), self.head_dim);
        }
        drop(projections);
        self.last(&heads).forward()
    }

    /// The state of the tokens of `x`, the first of their sequences.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn state(&self, scratch: &mut Scratch<f32>) -> Result<State<f32>, Error> {
        self.check()?;
        let projected = self.keys_and_values(self.x, self.norm).forward()?;
        self.state_of((&projected, self.columns() - self.query_columns(), 0), self.queries, None, scratch)
    }

    /// The state of so many tokens, from rows whose columns from one on are keys and values.
    fn state_of(
        &self,
        rows: (&[f32], usize, usize),
        keys: usize,
        initial_state: Option<&State<f32>>,
        scratch: &mut Scratch<f32>,
    ) -> Result<State<f32>, Error> {
        let dims = Dims { queries: 0, keys, ..self.dims() };
        let mut state = self.empty_state()?;
        let call = self.call_of(dims, (&[], 0), rows).with_mask(Mask::causal()).with_initial_state(initial_state);
        let output = Output::new(ViewMut::contiguous(&mut [], dims.out())).with_final_state(&mut state);
        self.kernel.forward(&call, output, scratch)?;
        Ok(state)
    }

    /// The results of the `rows` of one sequence that is too long to be seen at once. `x` is a stretch of it, `outside` the states of
    /// the tokens before and after that stretch; the rows stand at least [`Mechanism::reach`](longspan_kernels::Mechanism::reach) from its ends,
    /// or where the sequence ends. And the state before the stretch's token `next`.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), and a mechanism that takes no such states.
    pub fn segment(
        &self,
        rows: Range<usize>,
        outside: [&State<f32>; 2],
        next: usize,
        scratch: &mut Scratch<f32>,
    ) -> Result<(Vec<f32>, State<f32>), Error> {
        self.check()?;
        let holds =
            rows.start <= rows.end && rows.end.max(next) <= self.queries && self.batch == 1 && self.memory.is_none();
        let expected = || format!("rows of the {} of one sequence, in self-attention", self.queries);
        expect(holds, OPERATION, "rows", expected, || format!("{rows:?} and {next} of a batch of {}", self.batch))?;
        let (width, columns) = (self.width(), self.columns());
        let segment = Self { x: &self.x[rows.start * width..rows.end * width], queries: rows.len(), ..*self };
        let Projections { own, .. } = self.project()?;
        let keys = (own.as_slice(), columns, self.query_columns());
        let own_rows = &own[rows.start * columns..];
        let mut heads = try_zeros(segment.x.len())?;
        let dims = Dims { queries: rows.len(), ..self.dims() };
        let call = self
            .call_of(dims, (own_rows, columns), keys)
            .with_mask(Mask::bidirectional().with_offset(rows.start as isize))
            .with_outside(outside);
        self.kernel.forward(&call, Output::new(segment.token_major(&mut heads)), scratch)?;
        if let Some(norm) = self.gated_norm {
            norm.apply(&mut heads, self.gate(own_rows), self.head_dim);
        }
        let state = self.state_of(keys, next, Some(outside[0]), scratch)?;
        drop(own);
        Ok((segment.last(&heads).forward()?, state))
    }

    /// The result and what [`backward`](Self::backward) takes if it is given it, and the state after the last token if it is wanted.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn training(
        &self,
        scratch: &mut Scratch<f32>,
        final_state: Option<&mut State<f32>>,
    ) -> Result<(Vec<f32>, KeptAttention), Error> {
        self.check()?;
        let kept = self.kept(Purpose::Training, scratch, final_state)?;
        let out = self.last(&self.normed(&kept)?).forward()?;
        Ok((out, kept))
    }

    /// All but the last layer of a checked call; denominators only in training.
    fn kept(
        &self,
        purpose: Purpose,
        scratch: &mut Scratch<f32>,
        mut final_state: Option<&mut State<f32>>,
    ) -> Result<KeptAttention, Error> {
        let projections = self.project()?;
        let before = self.before(&projections, &mut final_state, scratch)?;
        let mut heads = try_zeros(self.x.len())?;
        let mut denominators = Vec::new();
        let mut output = Output::new(self.token_major(&mut heads)).with_final_state(final_state);
        if purpose == Purpose::Training {
            denominators = try_zeros(self.kernel.denominators(&self.dims()).iter().product())?;
            output.denominators = Some(&mut denominators);
        }
        self.kernel.forward(&self.call(&projections, before.as_ref()), output, scratch)?;
        Ok(KeptAttention { projections, before, heads, denominators })
    }

    /// Adds to the gradients of projections and parameters what comes by the state of these keys alone.
    fn add_from_state(
        &self,
        projections: &Projections,
        found: &CombineGradients<f32>,
        d_own: &mut [f32],
        d_parameters: &mut [f32],
        scratch: &mut Scratch<f32>,
    ) -> Result<(), Error> {
        let dims = Dims { queries: 0, ..self.dims() };
        let (columns, first) = (self.columns(), self.query_columns());
        let call = self.call_of(dims, (&[], 0), self.stretch(projections)).with_mask(Mask::causal());
        // Queries and gates have no part in it.
        let mut more = try_zeros(d_own.len() / columns * (columns - first))?;
        let [_, _, keys, values] = self.parts();
        let [dk, dv] = ViewMut::side_by_side(&mut more, [dims.batch, dims.keys], [keys, values]);
        let mut more_parameters = vec![0.0; d_parameters.len()];
        let cotangent = Cotangent {
            out: View::contiguous(&[], dims.out()),
            denominators: &[],
            d_out: View::contiguous(&[], dims.out()),
            final_state: Some(&found.later),
        };
        let gradients = Gradients {
            dq: ViewMut::contiguous(&mut [], dims.q()),
            dk,
            dv,
            parameters: &mut self.split_parameters(&mut more_parameters),
            initial_state: None,
        };
        self.kernel.backward(&call, &cotangent, gradients, scratch)?;
        // Threads share pieces of 64 rows.
        let pieces = d_own.chunks_mut(64 * columns).zip(more.chunks(64 * (columns - first)));
        longspan_core::threads::share(pieces, |(to, more)| {
            let rows = to.chunks_exact_mut(columns).zip(more.chunks_exact(columns - first));
            rows.for_each(|(to, more)| add_scaled(&mut to[first..], 1.0, more));
        });
        add_scaled(d_parameters, 1.0, &more_parameters);
        add_scaled(d_parameters, 1.0, &found.parameters.concat());
        Ok(())
    }

    fn split_parameters<'v>(&self, mut all: &'v mut [f32]) -> Vec<&'v mut [f32]> {
        let part = |given: &&[f32]| {
            let (first, others) = std::mem::take(&mut all).split_at_mut(given.len());
            all = others;
            first
        };
        self.parameters.iter().map(part).collect()
    }

    /// Strides of heads' outputs, `[batch, queries, heads · head_dim]`.
    pub(super) fn strides(&self) -> [usize; 3] {
        [self.queries * self.width(), self.head_dim, self.width()]
    }

    pub(super) fn token_major<'v>(&self, numbers: &'v mut [f32]) -> ViewMut<'v, f32> {
        ViewMut::strided(numbers, self.strides())
    }

    /// The gradients, from that of the result and what [`training`](Self::training) kept, or nothing to form it again.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn backward(
        &self,
        kept: Option<&KeptAttention>,
        d_out: &[f32],
        scratch: &mut Scratch<f32>,
    ) -> Result<MultiHeadGradients, Error> {
        self.check()?;
        let formed = if kept.is_some() { None } else { Some(self.kept(Purpose::Training, scratch, None)?) };
        let Some(kept) = kept.or(formed.as_ref()) else { unreachable!("kept or formed") };
        let normed = self.normed(kept)?;
        // An identity's backward looks at no result: only its length is checked.
        let LinearGradients { dx: mut d_heads, d_weight, d_bias, .. } =
            self.last(&normed).backward(d_out, &Kept::Result, d_out)?;
        drop(normed);
        let d_output = [d_weight, d_bias];

        let Projections { own, memory } = &kept.projections;
        // Every number of it is written, by the gated norm and the mechanism.
        let mut lent = scratch.lend(own.len() + memory.len())?;
        let (d_own, rest) = lent.split_at_mut(own.len());
        let d_memory = &mut rest[..memory.len()];
        let d_gated_norm = self.gated_norm.map_or(Vec::new(), |norm| {
            let d_gate = &mut d_own[self.width().min(own.len())..];
            norm.pull_back(&kept.heads, self.gate(own), self.head_dim, &mut d_heads, d_gate)
        });
        let parts @ [q, gate, k, v] = self.parts();
        let dims = self.dims();
        let [dq, _, dk, dv] = match self.memory {
            None => ViewMut::side_by_side(d_own, [dims.batch, dims.queries], parts),
            Some(_) => {
                let [dq, d_gate] = ViewMut::side_by_side(d_own, [dims.batch, dims.queries], [q, gate]);
                let [dk, dv] = ViewMut::side_by_side(d_memory, [dims.batch, dims.keys], [k, v]);
                [dq, d_gate, dk, dv]
            }
        };
        let mut d_parameters = vec![0.0; self.parameters.iter().map(|given| given.len()).sum()];
        let mut parameters = self.split_parameters(&mut d_parameters);
        let cotangent = Cotangent {
            out: View::strided(&kept.heads, self.strides()),
            denominators: &kept.denominators,
            d_out: View::strided(&d_heads, self.strides()),
            final_state: None,
        };
        let mut d_before = kept.before.as_ref().map(State::try_clone).transpose()?;
        let gradients = Gradients { dq, dk, dv, parameters: &mut parameters, initial_state: d_before.as_mut() };
        let call = self.call(&kept.projections, kept.before.as_ref());
        self.kernel.backward(&call, &cotangent, gradients, scratch)?;
        drop(d_heads);
        if let (Some(stretches), Some(d_before)) = (self.stretches, d_before)
            && let Some(found) = stretches.exchange_back(d_before, self.parameters)?
        {
            self.add_from_state(&kept.projections, &found, d_own, &mut d_parameters, scratch)?;
        }

        let [from_own, from_memory] = self.projections();
        let pull_back = |layer: Option<Linear<'_>>, own: &[f32], d: &[f32]| {
            layer.map(|layer| layer.backward(own, &Kept::Result, d)).transpose()
        };
        let own = pull_back(from_own, own, d_own)?;
        let from_memory = pull_back(from_memory, memory, d_memory)?;
        scratch.give_back(lent);
        let Some(LinearGradients { mut dx, mut d_weight, mut d_bias, d_norm }) = own else { unreachable!("queries") };
        if self.residual {
            gradients::add(&mut dx, d_out)?;
        }
        let mut d_memory = Vec::new();
        if let Some(gradients) = from_memory {
            let columns = self.columns() - self.query_columns();
            let rows = d_weight.chunks_exact(self.query_columns()).zip(gradients.d_weight.chunks_exact(columns.max(1)));
            d_weight = rows.flat_map(|(own, memory)| own.iter().chain(memory).copied()).collect();
            d_bias.extend(gradients.d_bias);
            d_memory = gradients.dx;
        }
        let d_projection = [d_weight, d_bias];
        Ok(MultiHeadGradients { dx, d_memory, d_norm, d_projection, d_parameters, d_gated_norm, d_output })
    }
}
