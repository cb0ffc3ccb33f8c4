//! One optimiser step: the loss of a batch and its gradient, computed in parts at the same time.

use std::thread;

use anyhow::{Result, anyhow};
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Tensor, TensorData};
use longspan::models::Seq2Seq;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::model::padded;
use crate::tokens::{END, START};

/// A training pair as ids, without start and end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pair {
    pub source: Vec<u32>,
    pub target: Vec<u32>,
}

impl Pair {
    /// Tokens that the decoder predicts: the target and its end.
    pub fn predicted(&self) -> usize {
        self.target.len() + 1
    }
}

/// What a step found out before it changes the weights.
pub struct Found {
    /// The mean of `−log p` over the predicted tokens, in nats, without smoothing.
    pub loss: f64,
    /// The gradient of the smoothed loss.
    pub gradients: GradientsParams,
}

/// Threads that each take a part of every batch, one rayon pool of one thread each.
///
/// Burn's CPU backend runs elementwise operations on the calling thread alone; whole parts side by side keep all cores
/// busy, and how the sums are ordered depends on the number of parts, not on who finishes first.
pub struct Workers {
    pools: Vec<ThreadPool>,
}

impl Workers {
    /// So many workers.
    pub fn new(count: usize) -> Result<Self> {
        let pools = (0..count.max(1))
            .map(|_| ThreadPoolBuilder::new().num_threads(1).build())
            .collect::<Result<_, _>>()
            .map_err(|error| anyhow!("cannot start {count} threads: {error}; lower --set workers=…"))?;
        Ok(Self { pools })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.pools.len()
    }

    /// Runs `task` on the parts of `items`, at the same time unless `in_turn`; results in the order of the parts.
    pub fn run<T: Sync, R: Send>(
        &self,
        items: &[T],
        in_turn: bool,
        task: impl Fn(&[T]) -> Result<R> + Sync,
    ) -> Result<Vec<R>> {
        let part = items.len().div_ceil(self.pools.len()).max(1);
        if in_turn {
            return items.chunks(part).zip(&self.pools).map(|(part, pool)| pool.install(|| task(part))).collect();
        }
        thread::scope(|scope| {
            let task = &task;
            let handles: Vec<_> = items
                .chunks(part)
                .zip(&self.pools)
                .map(|(part, pool)| scope.spawn(move || pool.install(|| task(part))))
                .collect();
            handles
                .into_iter()
                .map(|handle| handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        })
    }
}

/// The loss of a batch and the gradient of its smoothed form with respect to every parameter.
///
/// Dropout draws from one generator of the backend: with it, the parts go one after the other, so that the draws come in
/// one order.
pub fn gradients(model: &Seq2Seq, batch: &[&Pair], smoothing: f64, dropout: bool, workers: &Workers) -> Result<Found> {
    let tokens: usize = batch.iter().map(|pair| pair.predicted()).sum();
    let device = Device::flex().autodiff();
    let parts = workers.run(batch, dropout, |part| {
        // A graph of its own for each part: parts that shared leaves would wait for each other.
        let model = model.clone().fork(&device);
        let losses = losses(&model, part, smoothing, &device)?;
        let scale = 1.0 / tokens as f64;
        let plain = losses.plain.into_scalar::<f32>();
        let gradients = losses.smoothed.mul_scalar(scale).backward();
        Ok((f64::from(plain), GradientsParams::from_grads(gradients, &model)))
    })?;
    let mut parts = parts.into_iter();
    let (mut loss, mut sum) = parts.next().ok_or_else(|| anyhow!("a batch without examples"))?;
    for (other_loss, other) in parts {
        loss += other_loss;
        sum = added(model, sum, other);
    }
    Ok(Found { loss: loss / tokens as f64, gradients: sum })
}

/// The mean loss over `pairs` in nats per token, batch by batch; no gradients.
pub fn mean_loss(model: &Seq2Seq, pairs: &[Pair], batch_size: usize, workers: &Workers) -> Result<f64> {
    let model = model.valid();
    let device = Device::flex();
    let mut ordered: Vec<&Pair> = pairs.iter().collect();
    ordered.sort_by_key(|pair| (pair.predicted(), pair.source.len()));
    let parts = workers.run(&ordered, false, |part| {
        let mut sum = 0.0;
        for batch in part.chunks(batch_size) {
            sum += f64::from(losses(&model, batch, 0.0, &device)?.plain.into_scalar::<f32>());
        }
        Ok(sum)
    })?;
    let tokens: usize = pairs.iter().map(Pair::predicted).sum();
    Ok(parts.iter().sum::<f64>() / tokens as f64)
}

/// Sums over a batch.
struct Losses {
    /// `Σ −log p(token)`.
    plain: Tensor<1>,
    /// `Σ −(1−ε)·log p(token) − ε·mean_v log p(v)`.
    smoothed: Tensor<1>,
}

fn losses(model: &Seq2Seq, batch: &[&Pair], smoothing: f64, device: &Device) -> Result<Losses> {
    let sources: Vec<Vec<u32>> = batch.iter().map(|pair| source_ids(&pair.source)).collect();
    let inputs: Vec<Vec<u32>> = batch.iter().map(|pair| [&[START], pair.target.as_slice()].concat()).collect();
    let labels: Vec<Vec<u32>> = batch.iter().map(|pair| [pair.target.as_slice(), &[END]].concat()).collect();
    let rows = |ids: &[Vec<u32>]| {
        let rows: Vec<&[u32]> = ids.iter().map(Vec::as_slice).collect();
        padded(&rows, device)
    };
    let (source, source_lengths) = rows(&sources);
    let (input, lengths) = rows(&inputs);
    let (label, _) = rows(&labels);
    let log_p = log_softmax(model.forward(source, &source_lengths, input)?, 2);
    let [batch, longest, vocabulary] = log_p.dims();
    let counted: Vec<f32> =
        lengths.iter().flat_map(|&length| (0..longest).map(move |at| f32::from(u8::from(at < length)))).collect();
    let counted = Tensor::<2>::from_data(TensorData::new(counted, [batch, longest]), device);
    let right: Tensor<2> = log_p.clone().gather(2, label.unsqueeze_dim::<3>(2)).squeeze_dim(2);
    let plain = (right * counted.clone()).sum().neg();
    if smoothing == 0.0 {
        return Ok(Losses { plain: plain.clone(), smoothed: plain });
    }
    let mean: Tensor<2> = log_p.sum_dim(2).squeeze_dim(2).div_scalar(vocabulary as f64);
    let spread = (mean * counted).sum().neg();
    let smoothed = plain.clone().mul_scalar(1.0 - smoothing) + spread.mul_scalar(smoothing);
    Ok(Losses { plain, smoothed })
}

/// A source as the encoder gets it: with its end marked.
pub fn source_ids(source: &[u32]) -> Vec<u32> {
    [source, &[END]].concat()
}

/// The sum of two gradients.
fn added(model: &Seq2Seq, one: GradientsParams, other: GradientsParams) -> GradientsParams {
    struct Adding {
        one: GradientsParams,
        other: GradientsParams,
        sum: GradientsParams,
    }
    impl ModuleVisitor for Adding {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let sum = match (self.one.remove::<D>(param.id), self.other.remove::<D>(param.id)) {
                (Some(one), Some(other)) => one + other,
                (Some(only), None) | (None, Some(only)) => only,
                (None, None) => return,
            };
            self.sum.register(param.id, sum);
        }
    }
    let mut adding = Adding { one, other, sum: GradientsParams::new() };
    model.visit(&mut adding);
    adding.sum
}

/// Scales gradients down so that the norm over all parameters is at most `limit`; returns the norm before.
pub fn clip(model: &Seq2Seq, gradients: &mut GradientsParams, limit: f64) -> f64 {
    struct Norm<'a> {
        gradients: &'a GradientsParams,
        squares: f64,
    }
    impl ModuleVisitor for Norm<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(gradient) = self.gradients.get::<D>(param.id) {
                self.squares += f64::from(gradient.clone().mul(gradient).sum().into_scalar::<f32>());
            }
        }
    }
    struct Scale<'a> {
        gradients: &'a mut GradientsParams,
        factor: f64,
    }
    impl ModuleVisitor for Scale<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(gradient) = self.gradients.remove::<D>(param.id) {
                self.gradients.register(param.id, gradient.mul_scalar(self.factor));
            }
        }
    }
    let mut norm = Norm { gradients, squares: 0.0 };
    model.visit(&mut norm);
    let norm = norm.squares.sqrt();
    if norm.is_finite() && norm > limit {
        model.visit(&mut Scale { gradients, factor: limit / norm });
    }
    norm
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RunConfig;
    use crate::model::{configure, fresh};

    fn model() -> Seq2Seq {
        let config = RunConfig { d_model: 8, heads: 2, d_ff: 8, radius: 2, ..RunConfig::default() };
        fresh(&configure(&config, 9, 9).unwrap(), 3, &Device::flex().autodiff()).unwrap()
    }

    fn pairs() -> Vec<Pair> {
        [(3, 2), (1, 4), (0, 1), (5, 0), (2, 2)]
            .map(|(s, t)| Pair { source: vec![4; s], target: (0..t).map(|i| 4 + i % 3).collect() })
            .to_vec()
    }

    #[test]
    fn parts_add_up_to_the_whole() {
        let (model, pairs) = (model(), pairs());
        let batch: Vec<&Pair> = pairs.iter().collect();
        let found = |workers| {
            let mut found = gradients(&model, &batch, 0.1, false, &Workers::new(workers).unwrap()).unwrap();
            (found.loss, clip(&model, &mut found.gradients, f64::MAX))
        };
        let (loss, norm) = found(1);
        for workers in [2, 3, 8] {
            let parts = found(workers);
            assert!((parts.0 - loss).abs() < 1e-5 * loss, "{} {loss}", parts.0);
            assert!((parts.1 - norm).abs() < 1e-5 * norm, "{} {norm}", parts.1);
        }
        let mean = mean_loss(&model, &pairs, 2, &Workers::new(2).unwrap()).unwrap();
        assert!((mean - loss).abs() < 1e-5 * loss, "{mean} {loss}");
    }

    #[test]
    fn every_parameter_has_a_gradient_and_clipping_bounds_their_norm() {
        struct Count(usize);
        impl ModuleVisitor for Count {
            fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<D>>) {
                self.0 += 1;
            }
        }
        let (model, pairs) = (model(), pairs());
        let batch: Vec<&Pair> = pairs.iter().collect();
        let mut found = gradients(&model, &batch, 0.0, false, &Workers::new(2).unwrap()).unwrap();
        let mut count = Count(0);
        model.visit(&mut count);
        assert_eq!(found.gradients.len(), count.0);
        let before = clip(&model, &mut found.gradients, 0.25);
        assert!(before > 0.25, "{before}");
        assert!((clip(&model, &mut found.gradients, 0.25) - 0.25).abs() < 1e-5);
    }
}
