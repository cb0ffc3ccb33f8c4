//! Dropout, and what it is drawn from.

use std::cell::RefCell;

use burn::nn::DropoutConfig;
use burn::tensor::{DType, Device, Distribution, Tensor};
use longspan_kernels::Error;
use longspan_layers::Dropout;
use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::RngCore;
use rand_xoshiro::rand_core::SeedableRng;

use super::flex::{is_f32, numbers, shape, tensor};
use crate::backend::operation::{Operation, run};
use crate::cpu::{FlexTensor, is_flex};
use crate::error::{Result, argument};

thread_local! {
    static SEEDS: RefCell<Option<SplitMix64>> = const { RefCell::new(None) };
}

/// Runs `work`, whose dropout on this thread and the CPU backend is drawn from `seed` alone, and not from the device's generator,
/// which all threads share. So parts of a batch can be computed side by side and give the same bits each time.
pub fn with_dropout_seed<R>(seed: u64, work: impl FnOnce() -> R) -> R {
    struct Before(Option<SplitMix64>);
    impl Drop for Before {
        fn drop(&mut self) {
            SEEDS.replace(self.0.take());
        }
    }
    let _before = Before(SEEDS.replace(Some(SplitMix64::seed_from_u64(seed))));
    work()
}

/// The seed of the next dropout if this thread has been given one.
fn next_seed() -> Option<u64> {
    SEEDS.with_borrow_mut(|seeds| seeds.as_mut().map(RngCore::next_u64))
}

/// Checks a probability.
pub(super) fn check(probability: f64) -> Result<()> {
    let expected = || "a number in [0, 1)".into();
    argument((0.0..1.0).contains(&probability), "dropout", "probability", expected, || probability.to_string())
}

/// On a device that trains, makes numbers 0 with a probability and the others larger, so that their mean stays.
///
/// # Errors
/// A probability outside [0, 1).
pub fn dropout<const D: usize>(x: Tensor<D>, probability: f64) -> Result<Tensor<D>> {
    check(probability)?;
    if probability == 0.0 || x.dims().contains(&0) {
        return Ok(x);
    }
    let device = x.device();
    if !is_flex(&device) {
        return Ok(DropoutConfig::new(probability).init().forward(x));
    }
    let Some(dropout) = drawn(probability, [&device; 2]) else { return Ok(x) };
    let dropped = |x: Tensor<D>| run(DropoutOperation(dropout), x.into_dispatch(), Vec::new());
    if is_f32(&x) {
        return Ok(dropped(x)?);
    }
    let factors: Tensor<D> = dropped(Tensor::ones(x.dims(), (&device, DType::F32)))?;
    let dtype = x.dtype();
    Ok(x * factors.cast(dtype))
}

/// What is dropped with this probability on devices of which one trains.
pub(crate) fn drawn(probability: f64, devices: [&Device; 2]) -> Option<Dropout> {
    let device = devices.into_iter().find(|device| device.is_autodiff()).filter(|_| probability > 0.0)?;
    let seed = next_seed().unwrap_or_else(|| {
        let drawn = Tensor::<1>::random([4], Distribution::Uniform(0.0, 65_536.0), &device.clone().inner());
        drawn.into_data().iter::<f32>().fold(0, |seed, part| (seed << 16) | part as u64)
    });
    Dropout::new(probability, seed)
}

/// The same places forward and backward.
#[derive(Debug, Clone, Copy)]
struct DropoutOperation(Dropout);

impl Operation for DropoutOperation {
    const NAME: &'static str = "dropout";

    type Kept = ();

    fn forward(&self, tensors: &[FlexTensor]) -> Result<FlexTensor, Error> {
        let x = &tensors[0];
        Ok(tensor(self.0.forward(numbers(x))?, shape(x)))
    }

    fn training(&self, tensors: &[FlexTensor]) -> Result<(FlexTensor, ()), Error> {
        Ok((self.forward(tensors)?, ()))
    }

    fn backward(&self, _: &[FlexTensor], (): &(), d_out: FlexTensor) -> Result<Vec<Option<FlexTensor>>, Error> {
        Ok(vec![Some(self.forward(&[d_out])?)])
    }
}
