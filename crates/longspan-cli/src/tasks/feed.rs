//! Where the batches of a run come from.

use anyhow::Result;

use super::batches::Batches;

/// Gives the batch of every step.
pub trait Feed {
    /// What a batch is made of.
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
    examples: Vec<E>,
    batches: Batches,
    batch_size: usize,
}

impl<E> Shuffled<E> {
    /// Batches of `batch_size` examples, whose sizes (tokens predicted, tokens read) `size` gives.
    pub fn new(examples: Vec<E>, size: impl Fn(&E) -> (usize, usize), batch_size: usize, seed: u64) -> Self {
        let batches = Batches::new(examples.iter().map(size).collect(), batch_size, seed);
        Self { examples, batches, batch_size }
    }

    /// All examples, in their own order.
    pub fn examples(&self) -> &[E] {
        &self.examples
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
