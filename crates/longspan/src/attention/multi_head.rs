//! Multi-head attention: projections around any mechanism.

use burn::config::Config;
use burn::module::Module;
use burn::nn::{Initializer, Linear, LinearConfig};
use burn::tensor::{Device, Tensor};

use super::{Attention, AttentionConfig, AttentionMask, AttentionState, MemoryState};
use crate::error::{Result, argument, config};
use crate::projection;

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
    /// Queries, keys and values in one product, `[d_model, (heads + 2·kv_heads)·head_dim]`: the queries' columns first,
    /// then the keys', then the values', each head by head.
    pub query_key_value: Linear,
    /// `[heads·head_dim, d_model]`.
    pub output: Linear,
    /// The mechanism.
    pub attention: Attention,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
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
        let projected = (self.heads + 2 * kv_heads) * head_dim;
        Ok(MultiHeadAttention {
            query_key_value: LinearConfig::new(self.d_model, projected)
                .with_initializer(initializer.clone())
                .init(device),
            output: LinearConfig::new(self.d_model, self.d_model).with_initializer(initializer).init(device),
            attention,
            heads: self.heads,
            kv_heads,
            head_dim,
        })
    }
}

impl MultiHeadAttention {
    /// Self-attention, bidirectional or causal by `mask`.
    ///
    /// # Shapes
    /// `x` and output: `[batch, tokens, d_model]`.
    ///
    /// # Errors
    /// A wrong width, or a mask of the wrong size.
    pub fn self_attention(&self, x: Tensor<3>, mask: &AttentionMask) -> Result<Tensor<3>> {
        let [q, k, v] = self.split(x, "self-attention")?;
        Ok(self.merge(self.attention.forward(q, k, v, mask)?))
    }

    /// Attention of `x` to `memory`.
    ///
    /// # Shapes
    /// - `x` and output: `[batch, queries, d_model]`
    /// - `memory`: `[batch, keys, d_model]`
    ///
    /// # Errors
    /// Wrong widths, different batch sizes, or a mask of the wrong size.
    pub fn cross_attention(&self, x: Tensor<3>, memory: Tensor<3>, mask: &AttentionMask) -> Result<Tensor<3>> {
        self.check("cross-attention", "x", &x)?;
        self.check("cross-attention", "memory", &memory)?;
        let q = self.project(x, 0, self.heads);
        let [k, v] = self.keys_and_values(memory);
        Ok(self.merge(self.attention.forward(q, k, v, mask)?))
    }

    /// One token of causal self-attention: takes it into `state`, which before the first is the default, and gives its row of
    /// [`MultiHeadAttention::self_attention`].
    ///
    /// # Shapes
    /// `x` and output: `[batch, 1, d_model]`.
    ///
    /// # Errors
    /// A wrong width, or a state of another batch or mechanism.
    pub fn step(&self, x: Tensor<3>, state: &mut AttentionState) -> Result<Tensor<3>> {
        let [q, k, v] = self.split(x, "self-attention step")?;
        Ok(self.merge(self.attention.step(q, k, v, state)?))
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

    /// Attention of queries from position `first` on to a prepared memory: their rows of
    /// [`MultiHeadAttention::cross_attention`].
    ///
    /// # Shapes
    /// `x` and output: `[batch, queries, d_model]`.
    ///
    /// # Errors
    /// A wrong width, or a memory of another batch or mechanism.
    pub fn recall(&self, x: Tensor<3>, first: usize, memory: &MemoryState) -> Result<Tensor<3>> {
        self.check("cross-attention", "x", &x)?;
        let q = self.project(x, 0, self.heads);
        Ok(self.merge(self.attention.recall(q, first, memory)?))
    }

    /// Keys and values of a memory, `[batch, kv_heads, keys, head_dim]` each.
    fn keys_and_values(&self, memory: Tensor<3>) -> [Tensor<4>; 2] {
        let both = self.project(memory, self.heads, 2 * self.kv_heads);
        [both.clone().narrow(1, 0, self.kv_heads), both.narrow(1, self.kv_heads, self.kv_heads)]
    }

    /// Queries, keys and values of `x`, `[batch, ·, tokens, head_dim]` each, as views of one product.
    fn split(&self, x: Tensor<3>, operation: &'static str) -> Result<[Tensor<4>; 3]> {
        self.check(operation, "x", &x)?;
        let [batch, tokens, _] = x.dims();
        let all = self.heads + 2 * self.kv_heads;
        let projected =
            projection::apply(&self.query_key_value, x).reshape([batch, tokens, all, self.head_dim]).swap_dims(1, 2);
        let part = |first, heads| projected.clone().narrow(1, first, heads);
        Ok([part(0, self.heads), part(self.heads, self.kv_heads), part(self.heads + self.kv_heads, self.kv_heads)])
    }

    /// `count` of the projected heads from head `first` on, `[batch, count, tokens, head_dim]`.
    fn project(&self, x: Tensor<3>, first: usize, count: usize) -> Tensor<4> {
        let [batch, tokens, _] = x.dims();
        let (start, width) = (first * self.head_dim, count * self.head_dim);
        let weight = self.query_key_value.weight.val().narrow(1, start, width);
        let bias = self.query_key_value.bias.as_ref().map(|bias| bias.val().narrow(0, start, width));
        projection::project(x, weight, bias).reshape([batch, tokens, count, self.head_dim]).swap_dims(1, 2)
    }

    fn merge(&self, heads: Tensor<4>) -> Tensor<3> {
        let [batch, _, tokens, _] = heads.dims();
        projection::apply(&self.output, heads.swap_dims(1, 2).reshape([batch, tokens, self.heads * self.head_dim]))
    }

    fn check(&self, operation: &'static str, name: &'static str, x: &Tensor<3>) -> Result<()> {
        let width = self.heads * self.head_dim;
        argument(
            x.dims()[2] == width,
            operation,
            name,
            || format!("[batch, tokens, d_model = {width}]"),
            || format!("{:?}", x.dims()),
        )
    }
}
