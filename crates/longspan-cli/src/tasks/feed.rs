//! Where the batches of a run come from.

use anyhow::{Result, bail};
use sha2::{Digest, Sha256};

use super::batches::Random;
use super::lines;
use super::split::evenly;
use super::task::{Data, Task};
use crate::run::config::{Config, TaskSettings};
use crate::run::seal::sha256;

/// The hash of what a run learns from and, behind it, those of its files for development and scores, which runs of earlier versions lack.
pub fn hashes<S: TaskSettings>(learned: Sha256, config: &Config<S>) -> Result<String> {
    let mut all = format!("{:x}", learned.finalize());
    for path in config.own_files() {
        // A pipe can't be read again.
        let own = if path.is_file() { sha256(&lines::read(path)?) } else { "-".into() };
        all = format!("{all} {own}");
    }
    Ok(all)
}

/// Development examples: enough for two digits, few enough to cost little.
pub const DEVELOPMENT: usize = 512;

/// So many at least tell whether a simple method is corrected well.
const FEWEST: usize = 16;

pub trait Feed {
    type Example;

    /// Steps in which every example comes about once.
    fn per_epoch(&self) -> usize;

    /// Tokens of all examples; infinite where they are drawn without end.
    fn tokens(&self) -> f64;

    /// The batch of a step. Steps come in order; a step that was not completed is asked for again.
    fn batch(&mut self, step: usize) -> Result<Vec<&Self::Example>>;

    /// Keeps what examples of a rank's [`share`](super::ranks::share) need alone, before the first batch.
    fn keep_share(&mut self, _rank: usize, _ranks: usize) -> Result<()> {
        Ok(())
    }

    /// A few examples that show whether the loss is finite, where nothing is set apart for that.
    fn probe(&self) -> &[Self::Example];
}

/// Examples that are independent of each other, shuffled anew for every epoch, in batches of similar sizes. The batch of a
/// step depends on the seed and the step alone, so that a resumed run sees the batches of one that was not interrupted.
pub struct Shuffled<E> {
    pub examples: Vec<E>,
    /// What examples are sorted by within a pool.
    lengths: Vec<(usize, usize)>,
    batch_size: usize,
    seed: u64,
    epoch: Option<usize>,
    /// The places of the examples of each batch of the epoch.
    batches: Vec<Vec<usize>>,
}

/// Batches that are sorted by length together. Enough that the lengths within a batch are nearly equal (padding below
/// 3 % on the dictionary), and few enough that short and long batches mix within an epoch.
const POOL: usize = 50;

impl<E> Shuffled<E> {
    /// Batches of `batch_size` examples, whose sizes (tokens predicted, tokens read) `size` gives.
    pub fn new(examples: Vec<E>, size: impl Fn(&E) -> (usize, usize), batch_size: usize, seed: u64) -> Self {
        let lengths = examples.iter().map(size).collect();
        Self { examples, lengths, batch_size, seed, epoch: None, batches: Vec::new() }
    }

    fn at(&mut self, step: usize) -> &[usize] {
        let (epoch, index) = (step / self.per_epoch(), step % self.per_epoch());
        if self.epoch != Some(epoch) {
            self.arrange(epoch);
        }
        &self.batches[index]
    }

    fn arrange(&mut self, epoch: usize) {
        let mut random = Random::new(self.seed, epoch as u64);
        let mut order: Vec<usize> = (0..self.lengths.len()).collect();
        random.shuffle(&mut order);
        order.chunks_mut(self.batch_size * POOL).for_each(|pool| pool.sort_by_key(|&example| self.lengths[example]));
        self.batches = order.chunks(self.batch_size).map(<[usize]>::to_vec).collect();
        random.shuffle(&mut self.batches);
        self.epoch = Some(epoch);
    }
}

impl<E> Feed for Shuffled<E> {
    type Example = E;

    fn per_epoch(&self) -> usize {
        self.lengths.len().div_ceil(self.batch_size)
    }

    fn tokens(&self) -> f64 {
        self.lengths.iter().map(|&(predicted, read)| (predicted + read) as f64).sum()
    }

    fn batch(&mut self, step: usize) -> Result<Vec<&E>> {
        let places = self.at(step).to_vec();
        Ok(places.into_iter().map(|place| &self.examples[place]).collect())
    }

    fn probe(&self) -> &[E] {
        &self.examples[..self.examples.len().min(self.batch_size)]
    }
}

/// The data of a task whose examples have a `length`, those that are too long left out.
pub fn data<T: Task<Feed = Shuffled<<T as Task>::Example>, Example: Clone>>(
    all: Vec<T::Example>,
    mut development: Vec<T::Example>,
    held_out: Vec<T::Text>,
    config: &Config<T::Settings>,
    length: impl Fn(&T::Example) -> usize,
    fingerprint: impl Fn(&T::Example, &mut Sha256),
    strings: impl Fn(&T::Text) -> Vec<&str>,
) -> Result<Data<T>> {
    let files = config.common().files;
    let most = files.map_or(usize::MAX, |files| files.max_tokens);
    let own = files.is_some_and(|files| files.development.is_some());
    let count = all.len();
    let longest = all.iter().map(&length).max().unwrap_or(0);
    let mut train: Vec<T::Example> = all.into_iter().filter(|example| length(example) <= most).collect();
    if train.is_empty() {
        bail!(
            "all training {} have more than {} {}, the longest {longest}: take them in with --set max_tokens={longest}",
            T::EXAMPLES,
            most,
            T::LENGTH
        );
    }
    development.retain(|example| length(example) <= most);
    let mut development = evenly(&development, DEVELOPMENT);
    let mut hash = Sha256::new();
    train.iter().for_each(|example| fingerprint(example, &mut hash));
    // What is set apart of the same file; files of their own have a hash each.
    if let Some(files) = files.filter(|files| files.split_version >= 3) {
        if !own {
            development.iter().for_each(|example| fingerprint(example, &mut hash));
        }
        if files.held_out.is_none() {
            held_out.iter().flat_map(strings).for_each(|string| hash.update(sha256(string.as_bytes())));
        }
    }
    let (too_long, sha256) = (count - train.len(), hashes(hash, config)?);
    if config.common().base && !own && development.len() < FEWEST {
        // Too few to tell whether corrections are any good. What the simple method says of examples without them serves as well.
        let (more, rest): (Vec<_>, Vec<_>) = train.into_iter().enumerate().partition(|(n, _)| n % 4 == 3);
        development.extend(more.into_iter().map(|(_, example)| example));
        train = rest.into_iter().map(|(_, example)| example).collect();
    }
    let train = Shuffled::new(train, T::size, config.training.batch_size, config.training.seed);
    Ok(Data { train, development, held_out, too_long, longest, sha256 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(n: usize) -> Vec<(usize, usize)> {
        (0..n).map(|i| (i * 7 % 13, i * 5 % 11)).collect()
    }

    #[test]
    fn an_epoch_holds_every_example_once() {
        let mut batches = Shuffled::new(lengths(1003), |size| *size, 8, 5);
        for epoch in 0..3 {
            let steps = epoch * batches.per_epoch()..(epoch + 1) * batches.per_epoch();
            let mut seen: Vec<usize> = steps.flat_map(|step| batches.at(step).to_vec()).collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..1003).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_batch_depends_on_seed_and_step_alone() {
        let mut walked = Shuffled::new(lengths(500), |size| *size, 16, 9);
        let all: Vec<Vec<usize>> = (0..100).map(|step| walked.at(step).to_vec()).collect();
        let mut jumped = Shuffled::new(lengths(500), |size| *size, 16, 9);
        assert_eq!(jumped.at(77), all[77]);
        assert_eq!(jumped.at(3), all[3]);
        assert_ne!(Shuffled::new(lengths(500), |size| *size, 16, 10).at(3), all[3]);
        assert_ne!(all[0], all[walked.per_epoch()], "epochs differ");
    }
}
