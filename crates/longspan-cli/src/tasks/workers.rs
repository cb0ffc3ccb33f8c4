//! Threads that each take a part of a batch.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::{Result, anyhow};
use rayon::{ThreadPool, ThreadPoolBuilder};

/// So many threads for every batch, whatever it holds: items become as many parts as there are threads, or as there are items if
/// those are fewer, and the threads are shared out evenly. So many short sequences run side by side, one a thread, and one long
/// sequence runs on all threads.
///
/// How sums are ordered depends on the number of parts, not on who finishes first.
pub struct Workers {
    pub count: usize,
    /// The pools for the numbers of parts that were wanted last, the latest first.
    pools: Mutex<VecDeque<Arc<[ThreadPool]>>>,
}

/// Sets of pools that are kept: of a whole batch, of the last one of an epoch, and of something between.
const KEPT: usize = 3;

impl Workers {
    pub fn new(count: usize) -> Result<Self> {
        let workers = Self { count: count.max(1), pools: Mutex::default() };
        // What the machine does not allow is told before work begins.
        workers.pools(workers.count)?;
        Ok(workers)
    }

    /// One a core, at most 8: beyond that the parts of a batch become small.
    pub fn usual_count() -> usize {
        thread::available_parallelism().map_or(1, usize::from).min(8)
    }

    /// A pool for each of so many parts; the first have a thread more where the threads cannot be shared out evenly.
    fn pools(&self, parts: usize) -> Result<Arc<[ThreadPool]>> {
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = pools.iter().position(|pools| pools.len() == parts) {
            let found = pools.remove(place).unwrap_or_default();
            pools.push_front(Arc::clone(&found));
            return Ok(found);
        }
        let threads = |part| (self.count + parts - 1 - part) / parts;
        let made: Arc<[ThreadPool]> = (0..parts)
            .map(|part| ThreadPoolBuilder::new().num_threads(threads(part)).build())
            .collect::<Result<_, _>>()
            .map_err(|error| anyhow!("cannot start {} threads: {error}; lower --set workers=…", self.count))?;
        pools.push_front(Arc::clone(&made));
        pools.truncate(KEPT);
        Ok(made)
    }

    /// Runs `work` on the parts of `items`, each with its number, at the same time; results in the order of the parts.
    pub fn run<T: Sync, R: Send>(&self, items: &[T], work: impl Fn(usize, &[T]) -> Result<R> + Sync) -> Result<Vec<R>> {
        self.run_in(self.count, items, work)
    }

    /// Runs `work` on every item, each thread on the next one that no other has begun, so that none waits long for the others where the
    /// longest items come first; results in the order of the items.
    pub fn each<T: Sync, R: Send>(&self, items: &[T], work: impl Fn(&T) -> Result<R> + Sync) -> Result<Vec<R>> {
        let next = AtomicUsize::new(0);
        let found = self.run(&items[..items.len().min(self.count)], |_, _| {
            let mut found = Vec::new();
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(item) = items.get(at) else { return Ok(found) };
                // Where one fails the others need not go on.
                let result = work(item).inspect_err(|_| next.store(items.len(), Ordering::Relaxed))?;
                found.push((at, result));
            }
        })?;
        let mut found: Vec<(usize, R)> = found.into_iter().flatten().collect();
        found.sort_by_key(|(at, _)| *at);
        Ok(found.into_iter().map(|(_, result)| result).collect())
    }

    /// The same as [`run`](Self::run) in so many parts at most.
    pub fn run_in<T: Sync, R: Send>(
        &self,
        parts: usize,
        items: &[T],
        work: impl Fn(usize, &[T]) -> Result<R> + Sync,
    ) -> Result<Vec<R>> {
        let part = items.len().div_ceil(parts).max(1);
        let pools = self.pools(items.len().div_ceil(part).max(1))?;
        let mut results: Vec<Option<Result<R>>> = items.chunks(part).map(|_| None).collect();
        let work = &work;
        let jobs = items
            .chunks(part)
            .zip(&mut results)
            .enumerate()
            .map(|(n, (part, result))| move || *result = Some(work(n, part)));
        side_by_side(jobs.zip(&*pools));
        results.into_iter().flatten().collect()
    }
}

/// Runs every job in its pool, all at the same time.
fn side_by_side<'p, J: FnOnce() + Send>(mut jobs: impl Iterator<Item = (J, &'p ThreadPool)>) {
    if let Some((job, pool)) = jobs.next() {
        pool.in_place_scope(|scope| {
            scope.spawn(|_| job());
            side_by_side(jobs);
        });
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    #[test]
    fn all_threads_work_on_few_items_and_on_many() {
        let workers = Workers::new(5).unwrap();
        for (items, expected) in
            [(0, vec![]), (1, vec![5]), (2, vec![3, 2]), (3, vec![2, 2, 1]), (5, vec![1; 5]), (100, vec![1; 5])]
        {
            let items: Vec<usize> = (0..items).collect();
            for _ in 0..2 {
                let found =
                    workers.run(&items, |n, part| Ok((n, part.to_vec(), rayon::current_num_threads()))).unwrap();
                assert_eq!(found.iter().map(|(_, _, threads)| *threads).collect::<Vec<_>>(), expected);
                assert_eq!(found.iter().flat_map(|(_, part, _)| part.clone()).collect::<Vec<_>>(), items);
                assert!(found.iter().enumerate().all(|(at, (n, _, _))| at == *n));
                let found = workers.each(&items, |item| Ok((*item, rayon::current_num_threads()))).unwrap();
                assert_eq!(found.iter().map(|(item, _)| *item).collect::<Vec<_>>(), items);
                assert!(found.iter().all(|(_, threads)| expected.contains(threads)));
            }
        }
        let pools = workers.pools.lock().unwrap();
        assert!(
            pools.len() <= KEPT
                && pools.iter().all(|pools| pools.iter().map(ThreadPool::current_num_threads).sum::<usize>() == 5)
        );
        drop(pools);
        let failed = workers.each(&[1, 2, 3], |item| if *item == 2 { bail!("two") } else { Ok(*item) });
        assert_eq!(failed.unwrap_err().to_string(), "two");
    }
}
