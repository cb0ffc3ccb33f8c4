//! Threads that each take a part of a batch.

use std::thread;

use anyhow::{Result, anyhow};
use rayon::{ThreadPool, ThreadPoolBuilder};

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

    /// One a core, at most 8: beyond that the parts of a batch become small.
    pub fn usual_count() -> usize {
        thread::available_parallelism().map_or(1, usize::from).min(8)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.pools.len()
    }

    /// Runs `work` on the parts of `items`, at the same time unless `in_turn`; results in the order of the parts.
    pub fn run<T: Sync, R: Send>(
        &self,
        items: &[T],
        in_turn: bool,
        work: impl Fn(&[T]) -> Result<R> + Sync,
    ) -> Result<Vec<R>> {
        let part = items.len().div_ceil(self.pools.len()).max(1);
        if in_turn {
            return items.chunks(part).zip(&self.pools).map(|(part, pool)| pool.install(|| work(part))).collect();
        }
        thread::scope(|scope| {
            let work = &work;
            let handles: Vec<_> = items
                .chunks(part)
                .zip(&self.pools)
                .map(|(part, pool)| scope.spawn(move || pool.install(|| work(part))))
                .collect();
            handles
                .into_iter()
                .map(|handle| handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        })
    }
}
