//! Which examples make up the batch of a step, and token lists as one padded tensor.
//!
//! A batch depends on the seed and the step alone, so that a resumed run sees the batches of one that was not interrupted.

use anyhow::{Result, anyhow, bail};
use burn::tensor::{Device, Int, Tensor, TensorData};
use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore, SeedableRng};

use super::tokens::PAD;

/// A stream of numbers from a seed: the same on every machine and in every version, as a resumed run needs.
#[derive(Debug, Clone)]
pub struct Random(SplitMix64);

impl Random {
    pub fn new(seed: u64, stream: u64) -> Self {
        let base = SplitMix64::seed_from_u64(seed).next_u64();
        Self(SplitMix64::seed_from_u64(base ^ stream.wrapping_mul(0xd134_2543_de82_ef95)))
    }

    pub fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            // The bias of the remainder is below len / 2⁶⁴.
            let other = (self.next() % (last as u64 + 1)) as usize;
            items.swap(last, other);
        }
    }
}

/// Batches whose examples are of similar length, in an order that is random anew in every epoch.
#[derive(Debug)]
pub struct Batches {
    /// What examples are sorted by within a pool.
    lengths: Vec<(usize, usize)>,
    batch_size: usize,
    seed: u64,
    epoch: Option<usize>,
    order: Vec<usize>,
    bounds: Vec<(usize, usize)>,
}

/// Batches that are sorted by length together. Enough that the lengths within a batch are nearly equal (padding below
/// 3 % on the dictionary), and few enough that short and long batches mix within an epoch.
const POOL: usize = 50;

impl Batches {
    /// Batches over examples of these sizes (tokens predicted, tokens read).
    pub fn new(lengths: Vec<(usize, usize)>, batch_size: usize, seed: u64) -> Self {
        Self { lengths, batch_size, seed, epoch: None, order: Vec::new(), bounds: Vec::new() }
    }

    pub fn per_epoch(&self) -> usize {
        self.lengths.len().div_ceil(self.batch_size)
    }

    pub fn tokens(&self) -> f64 {
        self.lengths.iter().map(|&(predicted, read)| (predicted + read) as f64).sum()
    }

    pub fn at(&mut self, step: usize) -> &[usize] {
        let (epoch, index) = (step / self.per_epoch(), step % self.per_epoch());
        if self.epoch != Some(epoch) {
            self.arrange(epoch);
        }
        let (start, end) = self.bounds[index];
        &self.order[start..end]
    }

    fn arrange(&mut self, epoch: usize) {
        let mut random = Random::new(self.seed, epoch as u64);
        self.order = (0..self.lengths.len()).collect();
        random.shuffle(&mut self.order);
        for pool in self.order.chunks_mut(self.batch_size * POOL) {
            pool.sort_by_key(|&example| self.lengths[example]);
        }
        let n = self.order.len();
        self.bounds = (0..n).step_by(self.batch_size).map(|start| (start, (start + self.batch_size).min(n))).collect();
        random.shuffle(&mut self.bounds);
        self.epoch = Some(epoch);
    }
}

/// Padded tokens that are computed together. Training keeps about 15 kB for each at the default sizes, so a part of a batch
/// takes 120 MB and a fraction of a second: long examples cost time, not memory, and a signal is soon seen.
const TOKENS: usize = 8192;

/// Cuts examples into parts of at most [`TOKENS`] padded tokens, or of a single example. Examples of similar lengths
/// should be neighbours.
pub fn micro_batches<E>(examples: &[E], size: impl Fn(&E) -> (usize, usize)) -> Vec<&[E]> {
    let (mut found, mut start, mut longest) = (Vec::new(), 0, (0, 0));
    for (at, example) in examples.iter().enumerate() {
        let (predicted, read) = size(example);
        let next: (usize, usize) = (predicted.max(longest.0), read.max(longest.1));
        if at > start && (at + 1 - start) * (next.0 + next.1) > TOKENS {
            found.push(&examples[start..at]);
            (start, longest) = (at, (predicted, read));
        } else {
            longest = next;
        }
    }
    if start < examples.len() {
        found.push(&examples[start..]);
    }
    found
}

/// Numbers of a tensor, none of them NaN.
pub fn values<const D: usize>(x: Tensor<D>) -> Result<Vec<f32>> {
    let found: Vec<f32> = x.try_into_vec_as().map_err(|error| anyhow!("the device gave no numbers back: {error}"))?;
    if found.iter().any(|x| x.is_nan()) {
        bail!("the model gives NaN; its weights are broken: train again");
    }
    Ok(found)
}

/// A batch of token lists, `[batch, longest]`, padded at the ends; and their lengths.
pub fn padded(rows: &[impl AsRef<[u32]>], device: &Device) -> (Tensor<2, Int>, Vec<usize>) {
    let lengths: Vec<usize> = rows.iter().map(|row| row.as_ref().len()).collect();
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let mut ids = Vec::with_capacity(rows.len() * longest);
    for (row, length) in rows.iter().zip(&lengths) {
        ids.extend(row.as_ref().iter().map(|&id| id as i32));
        ids.extend(std::iter::repeat_n(PAD as i32, longest - length));
    }
    (Tensor::from_data(TensorData::new(ids, [rows.len(), longest]), device), lengths)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(n: usize) -> Vec<(usize, usize)> {
        (0..n).map(|i| (i * 7 % 13, i * 5 % 11)).collect()
    }

    #[test]
    fn an_epoch_holds_every_example_once() {
        let mut batches = Batches::new(lengths(1003), 8, 5);
        for epoch in 0..3 {
            let steps = epoch * batches.per_epoch()..(epoch + 1) * batches.per_epoch();
            let mut seen: Vec<usize> = steps.flat_map(|step| batches.at(step).to_vec()).collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..1003).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_batch_depends_on_seed_and_step_alone() {
        let mut walked = Batches::new(lengths(500), 16, 9);
        let all: Vec<Vec<usize>> = (0..100).map(|step| walked.at(step).to_vec()).collect();
        let mut jumped = Batches::new(lengths(500), 16, 9);
        assert_eq!(jumped.at(77), all[77]);
        assert_eq!(jumped.at(3), all[3]);
        assert_ne!(Batches::new(lengths(500), 16, 10).at(3), all[3]);
        assert_ne!(all[0], all[walked.per_epoch()], "epochs differ");
    }

    #[test]
    fn micro_batches_hold_every_example_once_within_the_budget() {
        let sizes = [(10, 10), (4000, 90), (10, 4000), (5, 5), (9000, 9000), (1, 1), (1, 1)];
        let found = micro_batches(&sizes, |size| *size);
        assert_eq!(found.concat(), sizes);
        for part in found {
            let longest = |of: fn(&(usize, usize)) -> usize| part.iter().map(of).max().unwrap();
            assert!(part.len() == 1 || part.len() * (longest(|s| s.0) + longest(|s| s.1)) <= TOKENS, "{part:?}");
        }
        assert_eq!(micro_batches(&[(3, 3); 64], |size| *size).len(), 1, "short examples stay together");
        assert!(micro_batches(&[] as &[(usize, usize)], |size| *size).is_empty());
    }
}
