//! Numbers from a seed, parts of batches, and token lists as one padded tensor.

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
