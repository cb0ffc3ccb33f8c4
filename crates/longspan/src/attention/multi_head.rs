//! Multi-head attention: projections around any mechanism.

mod fused;

use std::sync::Arc;

use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::{Initializer, Linear};
use burn::tensor::{Bool, Device, Tensor};

use super::{Attention, AttentionConfig, AttentionMask, AttentionState, Heads, MemoryState};
use super::{KeyMask, stored::StoredAttention};
use crate::backend::Outside;
use crate::backend::{self, Layer, Peers};
use crate::error::{Error, Result, argument, config, fits};
use crate::layers::flex::{is_f32, numbers, taken};
use crate::layers::{
    Activation, After, Around, GatedRmsNorm, GatedRmsNormConfig, apply, check_like, check_rows, check_types, drawn,
    linear, reshape,
};

/// Makes a [`MultiHeadAttention`].
#[derive(Config, Debug)]
pub struct MultiHeadAttentionConfig {
    /// Width of a token.
    pub d_model: usize,
    /// Query heads; they divide `d_model`.
    pub heads: usize,
    /// Key/value heads if fewer than query heads; `heads` is a multiple of them.
    pub kv_heads: Option<usize>,
    /// The mechanism.
    #[config(default = "AttentionConfig::default()")]
    pub attention: AttentionConfig,
    /// Whether heads' outputs go through a [`GatedRmsNorm`] before the output layer. Its gates are one more projection of `x`.
    #[config(default = false)]
    pub gated: bool,
    /// What draws the weights, those of queries, gates, keys and values each with its own fan, with biases of 0. By default one draw of Xavier's
    /// uniform initializer over the whole projection, as PyTorch's `MultiheadAttention` draws its weights; biases are drawn likewise.
    pub initializer: Option<Initializer>,
}

/// Multi-head attention. One module serves self-attention or cross-attention.
#[derive(Module, Debug)]
pub struct MultiHeadAttention {
    /// Queries, keys and values in one product, `[d_model, heads·head_dim + kv_heads·(key_dim + head_dim)]`: the
    /// queries' columns first, then the keys', then the values', each head by head. `key_dim` is `head_dim`, for
    /// AFT-conv 1. Gated, `heads·head_dim` columns of gates stand after the queries'. [`projections`](Self::projections)
    /// gives them apart.
    pub query_key_value: Linear,
    /// Of heads' outputs, if they are gated.
    pub gated_norm: Option<GatedRmsNorm>,
    /// `[heads·head_dim, d_model]`.
    pub output: Linear,
    /// The mechanism.
    pub attention: Attention,
    #[module(skip)]
    heads: Heads,
    key_dim: usize,
}

impl MultiHeadAttentionConfig {
    /// Makes the module.
    ///
    /// # Errors
    /// Sizes that do not divide, and what the mechanism refuses.
    pub fn init(&self, device: &Device) -> Result<MultiHeadAttention> {
        const NAME: &str = "MultiHeadAttentionConfig";
        config(
            self.heads > 0 && self.d_model > 0 && self.d_model.is_multiple_of(self.heads),
            NAME,
            "heads",
            format_args!("a divisor of d_model = {}", self.d_model),
            self.heads,
        )?;
        let kv_heads = self.kv_heads.unwrap_or(self.heads);
        let head_dim = self.d_model / self.heads;
        let attention = self.attention.init(self.heads, kv_heads, head_dim, device)?;
        let key_dim = attention.key_dim();
        fits(NAME, "d_model", &[self.d_model, self.d_model, 8])?;
        let queries = [self.d_model; 2];
        let parts = [&queries[..1 + usize::from(self.gated)], &[kv_heads * key_dim, kv_heads * head_dim]].concat();
        let by = self.initializer.as_ref();
        Ok(MultiHeadAttention {
            query_key_value: drawn(by, self.d_model, &parts, device),
            gated_norm: self.gated.then(|| GatedRmsNormConfig::new(self.heads, head_dim).init(device)).transpose()?,
            output: drawn(by, self.d_model, &[self.d_model], device),
            heads: attention.heads(),
            attention,
            key_dim,
        })
    }
}

impl MultiHeadAttention {
    /// Columns of queries, with gates if there are any, of keys, and of values.
    fn columns(&self) -> [usize; 3] {
        let Heads { kv_heads, head_dim, .. } = self.heads;
        [self.query_heads() * head_dim, kv_heads * self.key_dim, kv_heads * head_dim]
    }

    /// The projections to queries (and to gates, after them), keys and values as layers of their own: copies, as other programs keep them.
    pub fn projections(&self) -> [Linear; 3] {
        let Linear { weight, bias } = &self.query_key_value;
        let mut first = 0;
        self.columns().map(|count| {
            // Cut from the graph last: what a graph has made of others is no parameter.
            let bias = bias.as_ref().map(|bias| Param::from_tensor(bias.val().narrow(0, first, count).detach()));
            let weight = Param::from_tensor(weight.val().narrow(1, first, count).detach());
            first += count;
            Linear { weight, bias }
        })
    }

    /// The same attention with other projections, of the shapes that [`projections`](Self::projections) gives: what was loaded or learned apart,
    /// such as adapters of queries and values, merged. One without a bias has one of 0 where others have one.
    ///
    /// # Errors
    /// Weights or biases of other shapes, number types or devices.
    pub fn with_projections(self, projections: [Linear; 3]) -> Result<Self> {
        const NAME: &str = "projections";
        let (inputs, own) = (self.query_key_value.weight.dims()[0], self.query_key_value.weight.val());
        for (layer, count) in projections.iter().zip(self.columns()) {
            check_like(NAME, "weight", &layer.weight.val(), [inputs, count], &own)?;
            layer.bias.iter().try_for_each(|bias| check_like(NAME, "bias", &bias.val(), [count], &own))?;
        }
        let biased = projections.iter().any(|layer| layer.bias.is_some());
        let weights = projections.iter().map(|layer| layer.weight.val()).collect();
        let bias = |(layer, count): (&Linear, usize)| {
            let none = || Tensor::zeros([count], (&own.device(), own.dtype()));
            layer.bias.as_ref().map_or_else(none, |bias| bias.val())
        };
        let biases = || Tensor::cat(projections.iter().zip(self.columns()).map(bias).collect(), 0);
        let weight = Param::from_tensor(Tensor::cat(weights, 1).detach());
        let bias = biased.then(|| Param::from_tensor(biases().detach()));
        Ok(Self { query_key_value: Linear { weight, bias }, ..self })
    }

    /// Self-attention, bidirectional or causal as `mask` says: queries, keys and values are projections of `x`, each
    /// head runs the mechanism, and `output` projects the heads side by side, or their gated norms.
    ///
    /// # Shapes
    /// `x` and output: `[batch, tokens, d_model]`.
    ///
    /// # Errors
    /// A wrong width, or a mask of the wrong size.
    pub fn self_attention(&self, x: Tensor<3>, mask: &AttentionMask) -> Result<Tensor<3>> {
        self.self_attention_in(x, mask, Around::default())
    }

    /// [`self_attention`](Self::self_attention) and what stands around it.
    pub(crate) fn self_attention_in(
        &self,
        x: Tensor<3>,
        mask: &AttentionMask,
        around: Around<'_>,
    ) -> Result<Tensor<3>> {
        self.self_attention_by(self.attention.layer(), x, mask, around)
    }

    /// [`self_attention`](Self::self_attention) at positions that are given, real numbers such as times. Only `fourier` takes them;
    /// any other mechanism counts tokens.
    ///
    /// # Shapes
    /// `positions`: `[batch, tokens, axes]`; gradients reach them.
    ///
    /// # Errors
    /// As [`self_attention`](Self::self_attention), positions of another shape or number type, and packed sequences.
    pub fn self_attention_at(&self, x: Tensor<3>, positions: Tensor<3>, mask: &AttentionMask) -> Result<Tensor<3>> {
        self.self_attention_at_in(x, positions, mask, Around::default())
    }

    /// [`self_attention_at`](Self::self_attention_at) and what stands around it.
    pub(crate) fn self_attention_at_in(
        &self,
        x: Tensor<3>,
        positions: Tensor<3>,
        mask: &AttentionMask,
        around: Around<'_>,
    ) -> Result<Tensor<3>> {
        let Attention::Fourier(fourier) = &self.attention else {
            return self.self_attention_in(x, mask, around);
        };
        let [batch, tokens, _] = x.dims();
        let both = [positions.clone(), positions];
        fourier.check_positions(&both, [(batch, tokens); 2], backend::place(&x), mask)?;
        self.self_attention_by(&fourier.placed(both), x, mask, around)
    }

    /// [`self_attention`](Self::self_attention) of softmax without some pairs of tokens, as in
    /// [`SoftmaxAttention::forward_hiding`](super::SoftmaxAttention::forward_hiding):
    /// any mask of `[tokens, tokens]`. It runs in tensor operations.
    ///
    /// # Shapes
    /// `hidden`: `[1 or batch, 1 or heads, tokens, tokens]`, `true` where a token does not see another.
    ///
    /// # Errors
    /// As [`self_attention`](Self::self_attention), pairs of another shape, and any other mechanism.
    pub fn self_attention_hiding(
        &self,
        x: Tensor<3>,
        hidden: Tensor<4, Bool>,
        mask: &AttentionMask,
    ) -> Result<Tensor<3>> {
        self.check("self-attention", "x", &x)?;
        let (Attention::Softmax(softmax) | Attention::SoftmaxWindow(softmax)) = &self.attention else {
            let (expected, got) = ("softmax, whose pairs are formed".into(), self.attention.layer().name().into());
            return Err(Error::Argument { operation: "self-attention", argument: "mechanism", expected, got });
        };
        let (gate, [q, k, v]) = self.split(x)?;
        self.merge(softmax.forward_hiding(q, k, v, hidden, mask)?, gate, After::default())
    }

    /// Self-attention by a mechanism of these heads.
    fn self_attention_by(
        &self,
        layer: &dyn Layer,
        x: Tensor<3>,
        mask: &AttentionMask,
        around: Around<'_>,
    ) -> Result<Tensor<3>> {
        self.check("self-attention", "x", &x)?;
        if self.is_fused(&x) {
            return fused::multi_head(self, layer, x, None, mask, around, None);
        }
        self.in_parts(layer, x, None, mask, around)
    }

    /// Attention as one operation after the other.
    fn in_parts(
        &self,
        layer: &dyn Layer,
        x: Tensor<3>,
        memory: Option<Tensor<3>>,
        mask: &AttentionMask,
        around: Around<'_>,
    ) -> Result<Tensor<3>> {
        let (x, after) = around.split(x)?;
        let (gate, [q, k, v]) = match memory {
            None => self.split(x)?,
            Some(memory) => {
                let [k, v] = self.keys_and_values(memory)?;
                let (gate, q) = self.queries(x)?;
                (gate, [q, k, v])
            }
        };
        self.merge(backend::attend(layer, q, k, v, mask)?, gate, after)
    }

    /// Cross-attention: queries from `x`, keys and values from `memory`.
    ///
    /// # Shapes
    /// - `x` and output: `[batch, queries, d_model]`
    /// - `memory`: `[batch, keys, d_model]`
    ///
    /// # Errors
    /// Wrong widths, different batch sizes, or a mask of the wrong size.
    pub fn cross_attention(&self, x: Tensor<3>, memory: Tensor<3>, mask: &AttentionMask) -> Result<Tensor<3>> {
        self.cross_attention_in(x, memory, mask, Around::default())
    }

    /// [`cross_attention`](Self::cross_attention) and what stands around it.
    pub(crate) fn cross_attention_in(
        &self,
        x: Tensor<3>,
        memory: Tensor<3>,
        mask: &AttentionMask,
        around: Around<'_>,
    ) -> Result<Tensor<3>> {
        self.check("cross-attention", "x", &x)?;
        self.check("cross-attention", "memory", &memory)?;
        let ([batch, ..], [memory_batch, ..]) = (x.dims(), memory.dims());
        let expected = || format!("a batch of {batch}, like x");
        argument(batch == memory_batch, "cross-attention", "memory", expected, || memory_batch.to_string())?;
        if self.is_fused(&x) && is_f32(&memory) {
            return fused::multi_head(self, self.attention.layer(), x, Some(memory), mask, around, None);
        }
        self.in_parts(self.attention.layer(), x, Some(memory), mask, around)
    }

    /// One token of causal self-attention: takes it into `state`, which before the first is the default, and gives its
    /// row of [`MultiHeadAttention::self_attention`].
    ///
    /// # Shapes
    /// `x` and output: `[batch, 1, d_model]`.
    ///
    /// # Errors
    /// A wrong width, or a state of another batch or mechanism.
    pub fn step(&self, x: Tensor<3>, state: &mut AttentionState) -> Result<Tensor<3>> {
        check_types("self-attention step", self)?;
        self.step_in(x, state, Around::default())
    }

    /// [`step`](Self::step) and what stands around it.
    pub(crate) fn step_in(&self, x: Tensor<3>, state: &mut AttentionState, around: Around<'_>) -> Result<Tensor<3>> {
        self.check("self-attention step", "x", &x)?;
        let (x, after) = around.split(x)?;
        let (gate, [q, k, v]) = self.split(x)?;
        self.merge(self.attention.step(q, k, v, state)?, gate, after)
    }

    /// Several tokens of causal self-attention: what [`step`](Self::step) gives one after the other, in the parallel form.
    /// A gradient reaches these tokens, but not those before.
    ///
    /// # Shapes
    /// `x` and output: `[batch, tokens, d_model]`.
    ///
    /// # Errors
    /// A wrong width, or a state of another batch or mechanism.
    pub fn advance(&self, x: Tensor<3>, state: &mut AttentionState) -> Result<Tensor<3>> {
        check_types("self-attention", self)?;
        self.advance_in(x, state, None, Around::default())
    }

    /// [`advance`](Self::advance) and what stands around it, where others may hold stretches of the same sequences.
    pub(crate) fn advance_in(
        &self,
        x: Tensor<3>,
        state: &mut AttentionState,
        peers: Option<&Arc<dyn Peers>>,
        around: Around<'_>,
    ) -> Result<Tensor<3>> {
        self.check("self-attention", "x", &x)?;
        let layer = self.attention.layer();
        if self.is_fused(&x) && backend::kernels_take(layer, &x, state, true) {
            let [batch, tokens, _] = x.dims();
            let mut states = backend::states_of(layer, self.heads.dims(batch, tokens, tokens), x.dtype(), state)?;
            if let Some(peers) = peers {
                states = states.between(peers.clone(), layer.kernel())?;
            }
            let out = fused::multi_head(self, layer, x, None, &AttentionMask::causal(), around, Some(&states))?;
            *state = states.into_state();
            return Ok(out);
        }
        let expected = || {
            "none: over several processes it takes the CPU backend, f32, and a mechanism with states of constant size"
                .into()
        };
        argument(peers.is_none(), "self-attention", "peers", expected, || format!("some, under {}", layer.name()))?;
        let (x, after) = around.split(x)?;
        let (gate, [q, k, v]) = self.split(x)?;
        self.merge(self.attention.advance(q, k, v, state)?, gate, after)
    }

    /// Checks that `state` takes one token more, `x`, before a step changes anything.
    pub(crate) fn check_step(&self, x: &Tensor<3>, state: &AttentionState) -> Result<()> {
        self.check("self-attention step", "x", x)?;
        backend::check_step(self.attention.layer(), x, state)
    }

    /// Prepares a memory, `[batch, keys, d_model]`, for queries that come one by one.
    ///
    /// # Errors
    /// A wrong width, or a mask of the wrong size.
    pub fn remember(&self, memory: Tensor<3>, mask: &AttentionMask) -> Result<MemoryState> {
        self.check("cross-attention", "memory", &memory)?;
        let [k, v] = self.keys_and_values(memory)?;
        self.attention.remember(k, v, mask)
    }

    /// [`remember`](Self::remember) for the first `longest` queries alone: of a long memory, on the CPU backend, only what these see
    /// row by row is kept, and the sums of the rest.
    ///
    /// # Errors
    /// As [`remember`](Self::remember).
    pub fn remember_for(&self, memory: Tensor<3>, mask: &AttentionMask, longest: usize) -> Result<MemoryState> {
        self.check("cross-attention", "memory", &memory)?;
        if let Some(near) = self.remember_near(&memory, mask, longest)? {
            return Ok(near);
        }
        self.remember(memory, mask)
    }

    /// None where it would not be worth it, or where the kernels don't take it.
    fn remember_near(&self, memory: &Tensor<3>, mask: &AttentionMask, longest: usize) -> Result<Option<MemoryState>> {
        /// Rows that are projected at a time.
        const SEGMENT: usize = 1 << 14;
        let [batch, keys, _] = memory.dims();
        let reach = self.attention.layer().kernel().reach();
        let near = reach.map(|reach| longest.saturating_add(reach));
        let Some(near) = near.filter(|near| (1..keys.div_ceil(2)).contains(near)) else { return Ok(None) };
        let all = mask.is_of_memory() && mask.keys == KeyMask::All;
        if batch != 1 || !all || !self.is_fused(memory) || memory.device().is_autodiff() {
            return Ok(None);
        }
        let stored = StoredAttention::new(self)?;
        let parameters = stored.parameters();
        let call = |rows| stored.call(rows, 1, None, &parameters, longspan_kernels::Mask::causal());
        let (before, mut after) = (call(&[]).empty_state()?, call(&[]).empty_state()?);
        let whole = taken(memory.clone());
        let rows = &numbers(&whole)[near * stored.width()..];
        for segment in rows.chunks(SEGMENT * stored.width()) {
            let state = backend::with_scratch(|scratch| call(segment).state(scratch))?;
            after = stored.kernel.combine(&after, &state, &parameters)?;
        }
        let rows = self.keys_and_values(memory.clone().narrow(1, 0, near))?;
        Ok(Some(MemoryState::near(&self.attention, rows, Outside::new([before, after]), longest)))
    }

    /// Cross-attention of queries from position `first` on to a prepared memory: their rows of
    /// [`MultiHeadAttention::cross_attention`].
    ///
    /// # Shapes
    /// `x` and output: `[batch, queries, d_model]`.
    ///
    /// # Errors
    /// A wrong width, or a memory of another batch or mechanism.
    pub fn recall(&self, x: Tensor<3>, first: usize, memory: &MemoryState) -> Result<Tensor<3>> {
        self.recall_in(x, first, memory, Around::default())
    }

    /// [`recall`](Self::recall) and what stands around it.
    pub(crate) fn recall_in(
        &self,
        x: Tensor<3>,
        first: usize,
        memory: &MemoryState,
        around: Around<'_>,
    ) -> Result<Tensor<3>> {
        self.check("cross-attention", "x", &x)?;
        let (x, after) = around.split(x)?;
        let (gate, q) = self.queries(x)?;
        self.merge(self.attention.recall(q, first, memory)?, gate, after)
    }

    /// Checks that a memory takes queries made of `x`, before anything is computed.
    pub(crate) fn check_recall(&self, x: &Tensor<3>, first: usize, memory: &MemoryState) -> Result<()> {
        let ([batch, queries, _], Heads { heads, head_dim, .. }) = (x.dims(), self.heads);
        self.attention.check_recall([batch, heads, queries, head_dim], backend::place(x), first, memory)
    }

    /// Heads of queries and of gates.
    fn query_heads(&self) -> usize {
        self.heads.heads * (1 + usize::from(self.gated_norm.is_some()))
    }

    /// Gates, if there are any, and queries of `x`, `[batch, heads, tokens, head_dim]` each.
    fn queries(&self, x: Tensor<3>) -> Result<(Option<Tensor<4>>, Tensor<4>)> {
        let Heads { heads, head_dim, .. } = self.heads;
        let projected = self.project(x, 0, self.query_heads(), head_dim)?;
        Ok((self.gate(&projected), projected.narrow(1, 0, heads)))
    }

    /// The gates among projected heads, which stand after the queries.
    fn gate(&self, projected: &Tensor<4>) -> Option<Tensor<4>> {
        let Heads { heads, .. } = self.heads;
        self.gated_norm.as_ref().map(|_| projected.clone().narrow(1, heads, heads))
    }

    /// Keys and values of a memory, `[batch, kv_heads, keys, ·]` each: views of one product where they are equally
    /// wide.
    fn keys_and_values(&self, memory: Tensor<3>) -> Result<[Tensor<4>; 2]> {
        let Heads { kv_heads, head_dim, .. } = self.heads;
        let first = self.query_heads() * head_dim;
        if self.key_dim != head_dim {
            let keys = self.project(memory.clone(), first, kv_heads, self.key_dim)?;
            return Ok([keys, self.project(memory, first + kv_heads * self.key_dim, kv_heads, head_dim)?]);
        }
        let both = self.project(memory, first, 2 * kv_heads, head_dim)?;
        Ok([both.clone().narrow(1, 0, kv_heads), both.narrow(1, kv_heads, kv_heads)])
    }

    /// Gates, if there are any, and queries, keys and values of `x`, `[batch, ·, tokens, ·]` each: views of one product where they are
    /// equally wide.
    fn split(&self, x: Tensor<3>) -> Result<(Option<Tensor<4>>, [Tensor<4>; 3])> {
        let Heads { heads, kv_heads, head_dim } = self.heads;
        if self.key_dim != head_dim {
            let [keys, values] = self.keys_and_values(x.clone())?;
            let (gate, queries) = self.queries(x)?;
            return Ok((gate, [queries, keys, values]));
        }
        let [batch, tokens, _] = x.dims();
        let first = self.query_heads();
        let all = first + 2 * kv_heads;
        let projected = apply(&self.query_key_value, x, Activation::Identity, After::default())?;
        let projected = reshape(projected, [batch, tokens, all, head_dim]).swap_dims(1, 2);
        let part = |first, heads| projected.clone().narrow(1, first, heads);
        Ok((self.gate(&projected), [part(0, heads), part(first, kv_heads), part(first + kv_heads, kv_heads)]))
    }

    /// `count` heads of `width` numbers from the projection's column `start` on, `[batch, count, tokens, width]`.
    fn project(&self, x: Tensor<3>, start: usize, count: usize, width: usize) -> Result<Tensor<4>> {
        let [batch, tokens, _] = x.dims();
        let columns = count * width;
        let weight = self.query_key_value.weight.val().narrow(1, start, columns);
        let bias = self.query_key_value.bias.as_ref().map(|bias| bias.val().narrow(0, start, columns));
        let projected = linear(x, weight, bias, Activation::Identity, After::default())?;
        Ok(reshape(projected, [batch, tokens, count, width]).swap_dims(1, 2))
    }

    fn merge(&self, output: Tensor<4>, gate: Option<Tensor<4>>, after: After) -> Result<Tensor<3>> {
        let [batch, _, tokens, _] = output.dims();
        let Heads { heads, head_dim, .. } = self.heads;
        let side_by_side = |x: Tensor<4>| reshape(x.swap_dims(1, 2), [batch, tokens, heads * head_dim]);
        let mut output = side_by_side(output);
        if let (Some(norm), Some(gate)) = (&self.gated_norm, gate) {
            output = norm.forward(output, side_by_side(gate))?;
        }
        apply(&self.output, output, Activation::Identity, after)
    }

    /// Whether all of it can run as one operation of the CPU backend.
    fn is_fused(&self, x: &Tensor<3>) -> bool {
        is_f32(x) && is_f32(&self.query_key_value.weight.val()) && is_f32(&self.output.weight.val())
    }

    fn check(&self, operation: &'static str, name: &'static str, x: &Tensor<3>) -> Result<()> {
        check_rows(operation, name, x, &self.query_key_value.weight)
    }
}

#[cfg(all(test, feature = "autodiff", feature = "flex"))]
mod tests {
    use super::*;
    use crate::layers::tests::{all_near, disturbed, random, with_gradients};
    use crate::layers::{TokenNorm, TokenNormConfig};

    /// With norm and residual, and alone; keeping what the backward needs, and forming it again.
    #[test]
    fn one_operation_gives_what_its_parts_give_with_all_gradients() {
        let device = Device::flex().autodiff();
        let configs = [
            (AttentionConfig::shaw(), None, true),
            (AttentionConfig::kernelized(), Some(2), false),
            (AttentionConfig::softmax(), None, true),
            (AttentionConfig::by_name("aft-conv").unwrap(), None, true),
        ];
        for (gated, (attention, kv_heads, causal)) in
            [false, true].into_iter().flat_map(|gated| configs.clone().map(|config| (gated, config)))
        {
            let config = MultiHeadAttentionConfig::new(8, 4)
                .with_kv_heads(kv_heads)
                .with_attention(attention.clone())
                .with_gated(gated);
            let norm = TokenNormConfig::new(8).init(&device).unwrap();
            let part: (MultiHeadAttention, TokenNorm) = disturbed((config.init(&device).unwrap(), norm), &device);
            let (x, d) = (random([2, 9, 8], &device), random([2, 9, 8], &device));
            let mask =
                if causal { AttentionMask::causal() } else { AttentionMask::bidirectional().with_lengths(&[9, 4]) };
            let memory = (!causal).then(|| random([2, 9, 8], &device));
            for (normed, residual) in [(true, true), (false, false)] {
                let around = |recompute| Around { norm: normed.then_some(&part.1), dropout: 0.0, residual, recompute };
                let plain = with_gradients(&part, &x, &d, |x| {
                    part.0.in_parts(part.0.attention.layer(), x, memory.clone(), &mask, around(false)).unwrap()
                });
                for recompute in [false, true] {
                    let fused = with_gradients(&part, &x, &d, |x| match &memory {
                        None => part.0.self_attention_in(x, &mask, around(recompute)).unwrap(),
                        Some(memory) => part.0.cross_attention_in(x, memory.clone(), &mask, around(recompute)).unwrap(),
                    });
                    all_near(&format!("{attention:?}, normed {normed}, gated {gated}"), &fused, &plain, 5e-5);
                }
            }
        }
    }

    #[test]
    fn a_memory_of_another_batch_is_refused() {
        let device = Device::flex();
        let attention = MultiHeadAttentionConfig::new(8, 2).init(&device).unwrap();
        let error = attention
            .cross_attention(random([2, 3, 8], &device), random([1, 3, 8], &device), &AttentionMask::bidirectional())
            .unwrap_err();
        assert!(error.to_string().contains("memory: expected a batch of 2"), "{error}");
    }
}
