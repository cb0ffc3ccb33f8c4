//! Multi-head attention: projections around any mechanism.

use burn::config::Config;
use burn::module::Module;
use burn::nn::{Initializer, Linear, LinearConfig};
use burn::tensor::{Device, Tensor};

use super::{Attention, AttentionConfig, AttentionMask, AttentionState, Heads, MemoryState};
use crate::error::{Result, argument, config};
use crate::layers::{Activation, After, apply, linear};

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
}

/// Multi-head attention. One module serves self-attention or cross-attention.
#[derive(Module, Debug)]
pub struct MultiHeadAttention {
    /// Queries, keys and values in one product, `[d_model, heads·head_dim + kv_heads·(key_dim + head_dim)]`: the
    /// queries' columns first, then the keys', then the values', each head by head. `key_dim` is `head_dim`, for
    /// AFT-conv 1.
    pub query_key_value: Linear,
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
        let initializer = Initializer::XavierUniform { gain: 1.0 };
        let key_dim = attention.key_dim();
        let projected = self.heads * head_dim + kv_heads * (key_dim + head_dim);
        Ok(MultiHeadAttention {
            query_key_value: LinearConfig::new(self.d_model, projected)
                .with_initializer(initializer.clone())
                .init(device),
            output: LinearConfig::new(self.d_model, self.d_model).with_initializer(initializer).init(device),
            heads: attention.heads(),
            attention,
            key_dim,
        })
    }
}

impl MultiHeadAttention {
    /// Self-attention, bidirectional or causal as `mask` says: queries, keys and values are projections of `x`, each
    /// head runs the mechanism, and `output` projects the heads side by side.
    ///
    /// # Shapes
    /// `x` and output: `[batch, tokens, d_model]`.
    ///
    /// # Errors
    /// A wrong width, or a mask of the wrong size.
    pub fn self_attention(&self, x: Tensor<3>, mask: &AttentionMask) -> Result<Tensor<3>> {
        self.self_attention_with(x, mask, After::default())
    }

    /// [`self_attention`](Self::self_attention) and what follows it.
    pub(crate) fn self_attention_with(&self, x: Tensor<3>, mask: &AttentionMask, after: After) -> Result<Tensor<3>> {
        let [q, k, v] = self.split(x, "self-attention")?;
        Ok(self.merge(self.attention.forward(q, k, v, mask)?, after))
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
        self.cross_attention_with(x, memory, mask, After::default())
    }

    /// [`cross_attention`](Self::cross_attention) and what follows it.
    pub(crate) fn cross_attention_with(
        &self,
        x: Tensor<3>,
        memory: Tensor<3>,
        mask: &AttentionMask,
        after: After,
    ) -> Result<Tensor<3>> {
        self.check("cross-attention", "x", &x)?;
        self.check("cross-attention", "memory", &memory)?;
        let q = self.queries(x);
        let [k, v] = self.keys_and_values(memory);
        Ok(self.merge(self.attention.forward(q, k, v, mask)?, after))
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
        self.step_with(x, state, After::default())
    }

    /// [`step`](Self::step) and what follows it.
    pub(crate) fn step_with(&self, x: Tensor<3>, state: &mut AttentionState, after: After) -> Result<Tensor<3>> {
        let [q, k, v] = self.split(x, "self-attention step")?;
        Ok(self.merge(self.attention.step(q, k, v, state)?, after))
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
        self.advance_with(x, state, After::default())
    }

    /// [`advance`](Self::advance) and what follows it.
    pub(crate) fn advance_with(&self, x: Tensor<3>, state: &mut AttentionState, after: After) -> Result<Tensor<3>> {
        let [q, k, v] = self.split(x, "self-attention")?;
        Ok(self.merge(self.attention.advance(q, k, v, state)?, after))
    }

    /// Prepares a memory, `[batch, keys, d_model]`, for queries that come one by one.
    ///
    /// # Errors
    /// A wrong width, or a mask of the wrong size.
    pub fn remember(&self, memory: Tensor<3>, mask: &AttentionMask) -> Result<MemoryState> {
        self.check("cross-attention", "memory", &memory)?;
        let [k, v] = self.keys_and_values(memory);
        self.attention.remember(k, v, mask)
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
        self.recall_with(x, first, memory, After::default())
    }

    /// [`recall`](Self::recall) and what follows it.
    pub(crate) fn recall_with(
        &self,
        x: Tensor<3>,
        first: usize,
        memory: &MemoryState,
        after: After,
    ) -> Result<Tensor<3>> {
        self.check("cross-attention", "x", &x)?;
        let q = self.queries(x);
        Ok(self.merge(self.attention.recall(q, first, memory)?, after))
    }

    /// Queries of `x`, `[batch, heads, tokens, head_dim]`.
    fn queries(&self, x: Tensor<3>) -> Tensor<4> {
        let Heads { heads, head_dim, .. } = self.heads;
        self.project(x, 0, heads, head_dim)
    }

    /// Keys and values of a memory, `[batch, kv_heads, keys, ·]` each: views of one product where they are equally
    /// wide.
    fn keys_and_values(&self, memory: Tensor<3>) -> [Tensor<4>; 2] {
        let Heads { heads, kv_heads, head_dim } = self.heads;
        let first = heads * head_dim;
        if self.key_dim != head_dim {
            let keys = self.project(memory.clone(), first, kv_heads, self.key_dim);
            return [keys, self.project(memory, first + kv_heads * self.key_dim, kv_heads, head_dim)];
        }
        let both = self.project(memory, first, 2 * kv_heads, head_dim);
        [both.clone().narrow(1, 0, kv_heads), both.narrow(1, kv_heads, kv_heads)]
    }

    /// Queries, keys and values of `x`, `[batch, ·, tokens, ·]` each: views of one product where they are equally wide.
    fn split(&self, x: Tensor<3>, operation: &'static str) -> Result<[Tensor<4>; 3]> {
        self.check(operation, "x", &x)?;
        let Heads { heads, kv_heads, head_dim } = self.heads;
        if self.key_dim != head_dim {
            let [keys, values] = self.keys_and_values(x.clone());
            return Ok([self.queries(x), keys, values]);
        }
        let [batch, tokens, _] = x.dims();
        let all = heads + 2 * kv_heads;
        let projected = apply(&self.query_key_value, x, Activation::Identity, After::default())
            .reshape([batch, tokens, all, head_dim]);
        let projected = projected.swap_dims(1, 2);
        let part = |first, heads| projected.clone().narrow(1, first, heads);
        Ok([part(0, heads), part(heads, kv_heads), part(heads + kv_heads, kv_heads)])
    }

    /// `count` heads of `width` numbers from the projection's column `start` on, `[batch, count, tokens, width]`.
    fn project(&self, x: Tensor<3>, start: usize, count: usize, width: usize) -> Tensor<4> {
        let [batch, tokens, _] = x.dims();
        let columns = count * width;
        let weight = self.query_key_value.weight.val().narrow(1, start, columns);
        let bias = self.query_key_value.bias.as_ref().map(|bias| bias.val().narrow(0, start, columns));
        linear(x, weight, bias, Activation::Identity, After::default())
            .reshape([batch, tokens, count, width])
            .swap_dims(1, 2)
    }

    fn merge(&self, output: Tensor<4>, after: After) -> Tensor<3> {
        let [batch, _, tokens, _] = output.dims();
        let Heads { heads, head_dim, .. } = self.heads;
        let output = output.swap_dims(1, 2).reshape([batch, tokens, heads * head_dim]);
        apply(&self.output, output, Activation::Identity, after)
    }

    fn check(&self, operation: &'static str, name: &'static str, x: &Tensor<3>) -> Result<()> {
        let width = self.heads.heads * self.heads.head_dim;
        argument(
            x.dims()[2] == width,
            operation,
            name,
            || format!("[batch, tokens, d_model = {width}]"),
            || format!("{:?}", x.dims()),
        )
    }
}
