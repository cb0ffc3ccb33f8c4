//! The model of numeric series: a stack of blocks over points at real-valued times, then scores or numbers of one row of it all, or of
//! the row of each point.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::{Dropout, Linear};
use burn::tensor::{Device, Tensor};

use super::block::{BlockConfig, EncoderBlock};
use super::pooling::{self, Pooling};
use super::positions::Positions;
use super::stack;
use crate::attention::AttentionConfig;
use crate::error::{Result, argument};
use crate::layers::{
    Activation, After, CrossEntropyLoss, Targets, TokenNorm, apply, cross_entropy, dropout, fresh, squared_error,
};

/// Makes a [`SeriesModel`].
#[derive(Config, Debug, PartialEq)]
pub struct SeriesModelConfig {
    /// Numbers at each point.
    pub channels: usize,
    /// Number of classes, or of numbers to foretell.
    pub outputs: usize,
    /// Its blocks, but for their mechanisms.
    #[config(default = "BlockConfig::new()")]
    pub block: BlockConfig,
    /// Blocks.
    #[config(default = 2)]
    pub layers: usize,
    /// The mechanisms of the blocks, from the first block on; where there are more blocks the list begins anew. `fourier` sees the
    /// times; any other mechanism counts points.
    #[config(default = "vec![AttentionConfig::fourier()]")]
    pub attention: Vec<AttentionConfig>,
    /// Whether a point sees only those before it.
    #[config(default = false)]
    pub causal: bool,
    /// How the rows of a series become one.
    #[config(default = "Pooling::Mean")]
    pub pooling: Pooling,
    /// Absolute positions, which count points.
    #[config(default = "Positions::None")]
    pub positions: Positions,
}

/// A transformer that tells the class of a series of points, or numbers about it. The points come at any times:
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use longspan::models::{BlockConfig, SeriesModelConfig};
///
/// # fn main() -> longspan::Result<()> {
/// let device = Device::flex();
/// let block = BlockConfig::new().with_d_model(16).with_d_ff(32);
/// let model = SeriesModelConfig::new(2, 3).with_block(block).init(&device)?;
/// // Two series of 3 and 2 points with 2 channels, padded with 0.
/// let values = Tensor::<3>::from_data([[[1.0, 0.5], [0.9, 0.4], [0.1, 0.0]], [[2.0, 1.0], [1.0, 1.0], [0.0, 0.0]]], &device);
/// let times = Tensor::<2>::from_data([[0.0, 0.3, 4.1], [0.0, 7.5, 0.0]], &device);
/// assert_eq!(model.forward(values, times, &[3, 2])?.dims(), [2, 3]);
/// # Ok(())
/// # }
/// ```
///
/// Frequencies of `fourier` begin at wavelengths from 2π to 2000π, so let a time of 1 be the usual distance of neighbours, and let
/// series begin near 0, where `f32` keeps most digits. Only differences of times count.
#[derive(Module, Debug)]
pub struct SeriesModel {
    /// `[channels, d_model]`.
    pub input: Linear,
    /// The blocks.
    pub blocks: Vec<EncoderBlock>,
    /// The norm after pre-norm blocks.
    pub norm: Option<TokenNorm>,
    /// `w` of [`Pooling::Attention`], `[d_model]`.
    pub pooling_query: Option<Param<Tensor<1>>>,
    /// `[d_model, outputs]`.
    pub output: Linear,
    dropout: Dropout,
    #[module(skip)]
    positions: Positions,
    #[module(skip)]
    pooling: Pooling,
    #[module(skip)]
    causal: bool,
    channels: usize,
}

impl SeriesModelConfig {
    /// Makes the model with fresh weights.
    ///
    /// # Errors
    /// Sizes of 0, sizes that do not divide, no mechanism, and what a mechanism refuses.
    pub fn init(&self, device: &Device) -> Result<SeriesModel> {
        const NAME: &str = "SeriesModelConfig";
        let (block, d_model) = (&self.block, self.block.d_model);
        stack::check(NAME, block, &[("channels", self.channels), ("outputs", self.outputs)])?;
        Ok(SeriesModel {
            input: fresh(self.channels, d_model, device),
            blocks: stack::blocks(NAME, block, &self.attention, self.layers, device)?,
            norm: stack::last_norm(block, device)?,
            pooling_query: self.pooling.query(d_model, device),
            output: fresh(d_model, self.outputs, device),
            dropout: block.dropout()?,
            positions: self.positions,
            pooling: self.pooling,
            causal: self.causal,
            channels: self.channels,
        })
    }
}

impl SeriesModel {
    /// Logits of the classes, or the numbers.
    ///
    /// # Shapes
    /// - `values`: `[batch, points, channels]`; what stands beyond `lengths[b]` does not matter but must be finite
    /// - `times`: `[batch, points]`, likewise
    /// - `lengths`: one for each series, at least 1
    /// - output: `[batch, outputs]`
    ///
    /// # Errors
    /// Other shapes, a length of 0 or beyond `points`, not one length for each series, and what a mechanism refuses.
    pub fn forward(&self, values: Tensor<3>, times: Tensor<2>, lengths: &[usize]) -> Result<Tensor<2>> {
        let row = self.pooled(values, times, lengths)?;
        Ok(apply(&self.output, row, Activation::Identity, After::default())?.squeeze_dim(1))
    }

    /// The loss of series whose classes are known: [`cross_entropy`] of what [`forward`](Self::forward) gives.
    ///
    /// # Errors
    /// As [`forward`](Self::forward) and [`cross_entropy`].
    pub fn loss(
        &self,
        values: Tensor<3>,
        times: Tensor<2>,
        lengths: &[usize],
        classes: impl Into<Targets>,
        smoothing: f64,
    ) -> Result<CrossEntropyLoss> {
        let row = self.pooled(values, times, lengths)?;
        cross_entropy(row, &self.output, classes, smoothing)
    }

    /// The loss of series about which numbers are known: [`squared_error`] of what [`forward`](Self::forward) gives.
    ///
    /// # Errors
    /// As [`forward`](Self::forward) and [`squared_error`].
    pub fn squared_error(
        &self,
        values: Tensor<3>,
        times: Tensor<2>,
        lengths: &[usize],
        targets: &[f32],
    ) -> Result<Tensor<1>> {
        squared_error(self.forward(values, times, lengths)?, targets)
    }

    /// The numbers of every point, rather than of the series: what is missing at a point, or what comes at a time.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use longspan::layers::pinball;
    /// use longspan::models::{BlockConfig, SeriesModelConfig};
    ///
    /// # fn main() -> longspan::Result<()> {
    /// // A value and whether it is missing; of each point three quantiles.
    /// let device = Device::flex();
    /// let block = BlockConfig::new().with_d_model(16).with_d_ff(32);
    /// let model = SeriesModelConfig::new(2, 3).with_block(block).init(&device)?;
    /// // Two points are known, the one at the time 2.5 is to be predicted.
    /// let values = Tensor::<3>::from_data([[[0.3, 0.0], [0.1, 0.0], [0.0, 1.0]]], &device);
    /// let times = Tensor::<2>::from_data([[0.0, 1.0, 2.5]], &device);
    /// let predicted = model.at_points(values, times, &[3])?.narrow(1, 2, 1);
    /// assert_eq!(predicted.dims(), [1, 1, 3]);
    /// let loss = pinball(predicted.reshape([1, 3]), &[-0.2], &[0.1, 0.5, 0.9])?;
    /// # assert!(loss.into_scalar::<f32>() > 0.0);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Shapes
    /// As [`forward`](Self::forward); output: `[batch, points, outputs]`. Rows beyond `lengths[b]` mean nothing.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn at_points(&self, values: Tensor<3>, times: Tensor<2>, lengths: &[usize]) -> Result<Tensor<3>> {
        let rows = self.rows(values, times, lengths)?;
        apply(&self.output, rows, Activation::Identity, After::default())
    }

    /// One row for each series, `[batch, 1, d_model]`.
    fn pooled(&self, values: Tensor<3>, times: Tensor<2>, lengths: &[usize]) -> Result<Tensor<3>> {
        let rows = self.rows(values, times, lengths)?;
        self.pooling.pool(rows, lengths, self.pooling_query.as_ref())
    }

    /// A row for each point, `[batch, points, d_model]`.
    fn rows(&self, values: Tensor<3>, times: Tensor<2>, lengths: &[usize]) -> Result<Tensor<3>> {
        let [batch, points, channels] = values.dims();
        for (name, got, expected) in [
            ("values", vec![batch, points, channels], vec![batch, points, self.channels]),
            ("times", times.dims().to_vec(), vec![batch, points]),
        ] {
            argument(got == expected, "series", name, || format!("{expected:?}"), || format!("{got:?}"))?;
        }
        let mask = pooling::mask(lengths, [batch, points], self.causal, &values.device())?;
        let times = times.unsqueeze_dim::<3>(2);
        let x = apply(&self.input, values, Activation::Identity, After::default())?;
        let mut x = dropout(self.positions.add(x, 0), stack::probability(&self.dropout))?;
        for block in &self.blocks {
            x = block.forward_at(x, times.clone(), &mask)?;
        }
        stack::end(self.norm.as_ref(), x)
    }
}
