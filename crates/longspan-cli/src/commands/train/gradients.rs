//! Weights of a new model, and the gradient of a batch, computed in parts at the same time.

use std::cmp::Reverse;

use anyhow::Result;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use longspan::layers::{add_gradients, with_dropout_seed};

use crate::tasks::Task;
use crate::tasks::batches::{Random, micro_batches};
use crate::tasks::ranks::share;
use crate::tasks::workers::Workers;
use crate::terminal::signals::Stop;

/// Draws the weights of a new model, from the seed alone.
pub fn draw<M: Module>(model: M, seed: u64) -> M {
    /// Weights are drawn when they are first looked at; this looks at them in the order of the model.
    struct Draw;
    impl ModuleVisitor for Draw {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            param.val();
        }
    }
    Device::flex().seed(seed);
    model.visit(&mut Draw);
    model
}

pub struct Found<C> {
    /// The mean of `−log p` over the predicted tokens, in nats, without smoothing.
    pub loss: f64,
    pub gradients: GradientsParams,
    /// What the parts of the batch leave to the next batch, in their order.
    pub carried: Vec<C>,
}

/// The examples of a batch that are this process's.
pub struct Share<'a, E> {
    examples: &'a [&'a E],
    tokens: usize,
    rank: usize,
    ranks: usize,
    /// Whether it is a stretch of every example.
    split: bool,
}

impl<'a, E> Share<'a, E> {
    /// Of rank `rank` among `ranks`, some of the examples or, `split`, a stretch of all; `size` says how many tokens of an example are
    /// predicted, and how many read.
    pub fn of(
        batch: &'a [&'a E],
        size: impl Fn(&E) -> (usize, usize),
        (rank, ranks): (usize, usize),
        split: bool,
    ) -> Self {
        let examples = if split { batch } else { &batch[share(batch.len(), rank, ranks)] };
        Self { examples, tokens: batch.iter().map(|example| size(example).0).sum(), rank, ranks, split }
    }
}

/// The loss of a batch and the gradient of its smoothed form with respect to every parameter, or a process's part of both; `None`
/// if a signal asks to stop.
///
/// Each part draws its dropout from `seed` and its own number.
pub fn gradients<T: Task>(
    task: &T,
    model: &T::Model,
    share: &Share<'_, T::Example>,
    smoothing: f64,
    seed: u64,
    workers: &Workers,
    stop: &Stop,
) -> Result<Option<Found<T::Carried>>> {
    let tokens = share.tokens;
    let (before, all) = (share.rank * workers.count, share.ranks * workers.count);
    let device = Device::flex().autodiff();
    // Ranks that compute stretches of the same examples take them in the same order, and end a batch that they have begun.
    let parts = workers.run_in(if share.split { 1 } else { workers.count }, share.examples, |number, part| {
        // A graph of its own for each part: parts that shared leaves would wait for each other.
        let model = model.clone().fork(&device);
        let scale = 1.0 / tokens as f64;
        let (mut plain, mut sum, mut draws, mut carried) = (0.0, None, (before + number) as u64, Vec::new());
        for micro_batch in micro_batches(part, |example| T::size(example)) {
            if stop.asked() && !share.split {
                return Ok(None);
            }
            let seed = Random::new(seed, draws).next();
            draws += all as u64;
            let (loss, left) = with_dropout_seed(seed, || task.learn(&model, micro_batch, smoothing, &device))?;
            carried.extend(left);
            plain += f64::from(loss.plain.into_scalar::<f32>());
            let gradients = loss.smoothed.mul_scalar(scale).backward();
            let gradients = GradientsParams::from_grads(gradients, &model);
            sum = Some(added(&model, sum, gradients));
        }
        Ok(sum.map(|sum| (plain, sum, carried)))
    })?;
    let (mut loss, mut sum, mut carried) = (0.0, None, Vec::new());
    for part in parts {
        let Some((plain, gradients, left)) = part else { return Ok(None) };
        carried.extend(left);
        loss += plain;
        sum = Some(added(model, sum, gradients));
    }
    // A process may have no examples.
    Ok(Some(Found { loss: loss / tokens as f64, gradients: sum.unwrap_or_default(), carried }))
}

/// The mean loss over `examples` in nats per token, batch by batch, and the sum of each batch; no gradients.
pub fn mean_loss<T: Task>(
    task: &T,
    model: &T::Model,
    examples: &[T::Example],
    batch_size: usize,
    workers: &Workers,
) -> Result<(f64, Vec<f64>)> {
    let model = model.valid();
    let device = Device::flex();
    let mut ordered: Vec<&T::Example> = examples.iter().collect();
    ordered.sort_by_key(|example| Reverse(T::size(example)));
    let batches: Vec<_> =
        ordered.chunks(batch_size).flat_map(|batch| micro_batches(batch, |example| T::size(example))).collect();
    let losses = workers
        .each(&batches, |batch| Ok(f64::from(task.loss(&model, batch, 0.0, &device)?.plain.into_scalar::<f32>())))?;
    let tokens: usize = examples.iter().map(|example| T::size(example).0).sum();
    Ok((losses.iter().sum::<f64>() / tokens as f64, losses))
}

/// The sum of two gradients, the first of which may not be there yet.
fn added(model: &impl Module, one: Option<GradientsParams>, other: GradientsParams) -> GradientsParams {
    match one {
        None => other,
        Some(one) => add_gradients(model, one, other),
    }
}

#[cfg(test)]
mod tests {
    use burn::module::list_param_ids;
    use longspan::layers::clip_gradients;

    use super::*;
    use crate::run::config::with;
    use crate::tasks::pairs::Pairs;

    /// A tiny model of pairs of unequal lengths, empty ones among them.
    fn tiny() -> (Pairs, <Pairs as Task>::Model, Vec<<Pairs as Task>::Example>) {
        let file = tempfile::Builder::new().suffix(".tsv").tempfile().unwrap();
        std::fs::write(file.path(), "abc\tba\nb\tabca\n\tc\nacbba\t\nbb\tcc\nca\tac\n").unwrap();
        let mut config =
            with(serde_json::json!({ "pairs": file.path(), "d_model": 8, "heads": 2, "d_ff": 8, "radius": 2 }));
        let (task, data) = Pairs::begin(&mut config).unwrap();
        let pairs = data.train.examples.clone();
        assert!(pairs.len() >= 4, "{} pairs are left", pairs.len());
        let model = draw(task.model(&config, &Device::flex().autodiff()).unwrap(), 3);
        (task, model, pairs)
    }

    #[test]
    fn parts_add_up_to_the_whole() {
        let (task, model, pairs) = tiny();
        let batch: Vec<_> = pairs.iter().collect();
        let found = |workers| {
            let share = Share::of(&batch, Pairs::size, (0, 1), false);
            let workers = Workers::new(workers).unwrap();
            let mut found = gradients(&task, &model, &share, 0.1, 0, &workers, &Stop::default()).unwrap().unwrap();
            assert_eq!(found.gradients.len(), list_param_ids(&model).len(), "every parameter has a gradient");
            (found.loss, clip_gradients(&model, &mut found.gradients, f64::MAX).unwrap())
        };
        let (loss, norm) = found(1);
        for workers in [2, 3, 8] {
            let parts = found(workers);
            assert!((parts.0 - loss).abs() < 1e-5 * loss, "{} {loss}", parts.0);
            assert!((parts.1 - norm).abs() < 1e-5 * norm, "{} {norm}", parts.1);
        }
        // Of more processes than there are examples, too.
        for ranks in [2, 3, 9] {
            let workers = Workers::new(1).unwrap();
            let (mut sum, mut gradient) = (0.0, None);
            for rank in 0..ranks {
                let share = Share::of(&batch, Pairs::size, (rank, ranks), false);
                let found = gradients(&task, &model, &share, 0.1, 0, &workers, &Stop::default()).unwrap().unwrap();
                sum += found.loss;
                gradient = Some(added(&model, gradient, found.gradients));
            }
            let found = clip_gradients(&model, &mut gradient.unwrap(), f64::MAX).unwrap();
            assert!((sum - loss).abs() < 1e-5 * loss, "{sum} {loss}");
            assert!((found - norm).abs() < 1e-5 * norm, "{found} {norm}");
        }
        let mean = mean_loss(&task, &model, &pairs, 2, &Workers::new(2).unwrap()).unwrap().0;
        assert!((mean - loss).abs() < 1e-5 * loss, "{mean} {loss}");
    }
}
