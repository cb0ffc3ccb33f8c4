//! Where the batches of a run come from.

use anyhow::{Result, bail};
use sha2::{Digest, Sha256};

use super::batches::Batches;
use super::lines;
use super::split::evenly;
use super::task::{Data, Task};
use crate::run::config::{Config, TaskSettings};
use crate::run::seal::{hex, sha256};

/// The hash of what a run learns from and, behind it, those of its files for development and scores, which runs of earlier versions lack.
pub fn hashes<S: TaskSettings>(learned: Sha256, config: &Config<S>) -> Result<String> {
    let mut all = hex(&learned.finalize());
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
/// step depends on the seed and the step alone.
pub struct Shuffled<E> {
    pub examples: Vec<E>,
    batches: Batches,
    batch_size: usize,
}

impl<E> Shuffled<E> {
    /// Batches of `batch_size` examples, whose sizes (tokens predicted, tokens read) `size` gives.
    pub fn new(examples: Vec<E>, size: impl Fn(&E) -> (usize, usize), batch_size: usize, seed: u64) -> Self {
        let batches = Batches::new(examples.iter().map(size).collect(), batch_size, seed);
        Self { examples, batches, batch_size }
    }
}

impl<E> Feed for Shuffled<E> {
    type Example = E;

    fn per_epoch(&self) -> usize {
        self.batches.per_epoch()
    }

    fn tokens(&self) -> f64 {
        self.batches.tokens()
    }

    fn batch(&mut self, step: usize) -> Result<Vec<&E>> {
        Ok(self.batches.at(step).iter().map(|&place| &self.examples[place]).collect())
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
) -> Result<Data<T>> {
    let (most, own) =
        config.common().files.map_or((usize::MAX, false), |files| (files.max_tokens, files.development.is_some()));
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
