//! On which threads a call's tasks run: the current rayon pool, unless the caller says otherwise.
//!
//! A program that brings threads of its own (an OpenMP runtime whose threads wait for work by spinning, say) has twice as
//! many threads as cores if kernels start theirs beside them. [`on_team`] runs calls on the threads that are there,
//! [`alone`] on the caller's. The bits do not depend on it.
//!
//! A call ends before its time where [`until`] is told so.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rayon::prelude::*;

use crate::simd::Real;

/// Threads that can be asked to do the same thing at once.
pub trait Team: Sync {
    /// Threads that it has, with the one that asks. [`on_team`] asks once.
    fn size(&self) -> usize;

    /// Calls `work` once on each of up to `members` threads, and returns when all calls have.
    ///
    /// `work` does not panic. Any thread that calls it works until nothing is left, so fewer calls are slower and never wrong; without
    /// any the caller does all of the work.
    fn run(&self, members: usize, work: &(dyn Fn() + Sync));
}

#[derive(Clone, Copy)]
enum Threads {
    /// The current rayon pool's.
    Pool,
    /// A team and its size: a call lays out its memory by the number of threads, so that must not change meanwhile.
    Team(&'static dyn Team, usize),
    /// Only this one.
    Alone,
}

/// Whether calls are to end. Every thread of a call asks after each chunk of rows, so the answer should take nanoseconds.
pub type Stop = Arc<dyn Fn() -> bool + Send + Sync>;

/// What unwinds the threads of a call that is to end.
struct Stopped;

thread_local! {
    static THREADS: Cell<Threads> = const { Cell::new(Threads::Pool) };
    static STOP: Cell<Option<Stop>> = const { Cell::new(None) };
}

/// Runs `work`, whose kernels end soon after `stop` said so: then `None`, and outputs and states hold any numbers.
///
/// The thread that calls this one asks to the end, also while it waits for others of a [`Team`]. A step of one token never ends
/// early. Kernels that rayon runs on this thread while one of ours waits for its pool are not stopped; those that it runs while
/// `work` itself waits (in `rayon::join`, say) are, so let `work` be one call.
///
/// A call ends early by unwinding. In a program that is built with `panic = "abort"` nothing is stopped: the call runs to its end.
pub fn until<R>(stop: Stop, work: impl FnOnce() -> R) -> Option<R> {
    match catch_unwind(AssertUnwindSafe(|| with_stop(Some(stop), work))) {
        Ok(result) => Some(result),
        Err(payload) if payload.is::<Stopped>() => None,
        Err(payload) => resume_unwind(payload),
    }
}

fn with_stop<R>(stop: Option<Stop>, work: impl FnOnce() -> R) -> R {
    struct Before(Option<Stop>);
    impl Drop for Before {
        fn drop(&mut self) {
            STOP.set(self.0.take());
        }
    }
    let _before = Before(STOP.replace(stop));
    work()
}

fn current_stop() -> Option<Stop> {
    let stop = STOP.take();
    STOP.set(stop.clone());
    stop
}

/// Ends the call that this thread works for, by unwinding, if it is to end. What takes long asks between any two chunks.
#[inline]
pub fn check() {
    if cfg!(panic = "abort") {
        return;
    }
    // While the caller's code answers there is nothing to ask: it may call kernels itself.
    if let Some(stop) = STOP.take() {
        let ends = stop();
        STOP.set(Some(stop));
        if ends {
            resume_unwind(Box::new(Stopped));
        }
    }
}

/// More threads than any machine has: memory is laid out for each.
const MOST_THREADS: usize = 1 << 12;

/// Runs `work`, whose kernels run on a team.
pub fn on_team<R>(team: &dyn Team, work: impl FnOnce() -> R) -> R {
    let size = team.size().clamp(1, MOST_THREADS);
    // SAFETY: `on` takes the reference out of this thread's storage again before it returns or unwinds, and nothing copies it elsewhere.
    let team = unsafe { std::mem::transmute::<&dyn Team, &'static dyn Team>(team) };
    on(Threads::Team(team, size), work)
}

/// Runs `work`, whose kernels run on this thread alone: for calls that are over before another thread would be awake.
pub fn alone<R>(work: impl FnOnce() -> R) -> R {
    on(Threads::Alone, work)
}

fn on<R>(threads: Threads, work: impl FnOnce() -> R) -> R {
    struct Before(Threads);
    impl Drop for Before {
        fn drop(&mut self) {
            THREADS.set(self.0);
        }
    }
    let _before = Before(THREADS.replace(threads));
    work()
}

/// Threads that a call made here would use.
pub fn count() -> usize {
    match THREADS.get() {
        Threads::Pool => rayon::current_num_threads(),
        Threads::Team(_, size) => size,
        Threads::Alone => 1,
    }
}

/// Calls `work` once on each of up to `members` threads at once, at least on one. Compiled once, not for every piece of work.
fn on_members(members: usize, work: &(dyn Fn() + Sync)) {
    let threads = THREADS.get();
    if members <= 1 || matches!(threads, Threads::Alone) {
        return work();
    }
    let stop = current_stop();
    let work = || with_stop(stop.clone(), work);
    match threads {
        Threads::Alone => work(),
        // What else rayon runs on this thread while it waits is not to be stopped.
        Threads::Pool => {
            with_stop(None, || (0..members).into_par_iter().with_max_len(1).for_each(|_| work()));
        }
        Threads::Team(team, _) => {
            let panic = Mutex::new(None);
            let (begun, ended) = (AtomicUsize::new(0), AtomicUsize::new(0));
            let caller = thread::current().id();
            // A member has no team of its own.
            team.run(members, &|| {
                begun.fetch_add(1, Ordering::Relaxed);
                if let Err(payload) = catch_unwind(AssertUnwindSafe(|| alone(work))) {
                    *panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(payload);
                }
                ended.fetch_add(1, Ordering::Relaxed);
                if let Some(stop) = stop.as_ref().filter(|_| thread::current().id() == caller) {
                    // Nothing is left for one that begins later.
                    ask_until(stop, || ended.load(Ordering::Relaxed) == begun.load(Ordering::Relaxed));
                }
            });
            if begun.into_inner() == 0 {
                return alone(work);
            }
            if let Some(payload) = panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
                resume_unwind(payload);
            }
        }
    }
}

/// Asks whether to end until `done`, as members do that have work.
fn ask_until(stop: &Stop, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        stop();
        // As long as threads spin that wait for each other.
        if start.elapsed() < Duration::from_millis(1) {
            std::hint::spin_loop();
        } else {
            thread::sleep(Duration::from_micros(100));
        }
    }
}

/// Runs `body(item)` for every item. Which thread takes which item is left to chance, so results must not depend on it.
pub fn share<I: Send>(items: impl ExactSizeIterator<Item = I> + Send, body: impl Fn(I) + Sync) {
    share_with(items, || (), |item, ()| body(item));
}

/// Runs `body(item, memory)` for every item as [`share`] does, each thread with memory of its own.
pub fn share_with<I: Send, M>(
    items: impl ExactSizeIterator<Item = I> + Send,
    memory: impl Fn() -> M + Sync,
    body: impl Fn(I, &mut M) + Sync,
) {
    let members = count().min(items.len());
    let items = Mutex::new(items);
    // Only the iterator's own code runs under the lock.
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    on_members(members, &|| {
        let mut memory = memory();
        while let Some(item) = next() {
            check();
            body(item, &mut memory);
        }
    });
}

/// Runs `body(item, piece)` for every item as [`share`] does, each thread with a piece of `memory` of its own, so long; on at
/// most as many threads as there are pieces, and there is at least one.
pub fn share_memory<I: Send, T: Send>(
    items: impl ExactSizeIterator<Item = I> + Send,
    memory: &mut [T],
    piece: usize,
    body: impl Fn(I, &mut [T]) + Sync,
) {
    if piece == 0 {
        return share(items, |item| body(item, &mut []));
    }
    assert!(memory.len() >= piece, "memory for no thread");
    let members = count().min(items.len()).min(memory.len() / piece);
    let (items, pieces) = (Mutex::new(items), Mutex::new(memory.chunks_exact_mut(piece)));
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    on_members(members, &|| {
        let own = pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
        let Some(own) = own else { return };
        while let Some(item) = next() {
            check();
            body(item, own);
        }
    });
}

/// Numbers below which handing parts of a short pass over them to other threads costs more than it saves: a hand-over takes a few
/// microseconds, from outside the pool some forty, in which one thread passes over about this many.
const FEW: usize = 1 << 17;

/// Runs `body(item)` for every item of a pass over so many numbers: as [`share`] does, or, where they are few, on this thread
/// alone, which allocates nothing.
#[inline]
pub fn share_many<I: Send>(numbers: usize, items: impl Iterator<Item = I>, body: impl Fn(I) + Sync) {
    share_many_with(numbers, items, || (), |item, ()| body(item));
}

/// The same, each thread with memory of its own.
#[inline]
pub fn share_many_with<I: Send, M>(
    numbers: usize,
    items: impl Iterator<Item = I>,
    memory: impl Fn() -> M + Sync,
    body: impl Fn(I, &mut M) + Sync,
) {
    if numbers < FEW {
        let mut memory = memory();
        items.for_each(|item| body(item, &mut memory));
    } else {
        let items: Vec<I> = items.collect();
        share_with(items.into_iter(), memory, body);
    }
}

/// Runs `body(task, scratch)` for every task, each worker with `per_worker` numbers of its own. Which worker takes which
/// task is left to chance, so results must not depend on it.
pub fn parallel<T: Real>(tasks: usize, scratch: &mut [T], per_worker: usize, body: impl Fn(usize, &mut [T]) + Sync) {
    run_tasks(tasks, scratch, per_worker, &body);
}

/// [`parallel`], compiled once for each number type.
fn run_tasks<T: Real>(tasks: usize, scratch: &mut [T], per_worker: usize, body: &(dyn Fn(usize, &mut [T]) + Sync)) {
    let next = AtomicUsize::new(0);
    let work = |scratch: &mut [T]| {
        loop {
            let task = next.fetch_add(1, Ordering::Relaxed);
            if task >= tasks {
                break;
            }
            check();
            body(task, scratch);
        }
    };
    let workers = (scratch.len() / per_worker.max(1)).min(tasks).min(count());
    // Tasks that want no memory have next to nothing to do.
    if workers <= 1 || per_worker == 0 {
        work(scratch);
    } else {
        let parts = Mutex::new(scratch.chunks_exact_mut(per_worker));
        on_members(workers, &|| {
            let part = parts.lock().unwrap_or_else(PoisonError::into_inner).next();
            part.into_iter().for_each(&work);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Has as many threads as it says, started for each piece of work.
    struct Started(usize);

    impl Team for Started {
        fn size(&self) -> usize {
            self.0
        }

        fn run(&self, members: usize, work: &(dyn Fn() + Sync)) {
            assert!(members <= self.0, "asked for {members} of {} threads", self.0);
            std::thread::scope(|scope| {
                for _ in 1..members {
                    scope.spawn(work);
                }
                work();
            });
        }
    }

    /// Leaves all work undone, and says another size each time.
    struct Idle(AtomicUsize);

    impl Team for Idle {
        fn size(&self) -> usize {
            self.0.fetch_add(1, Ordering::Relaxed)
        }

        fn run(&self, _: usize, _: &(dyn Fn() + Sync)) {}
    }

    /// Gives one thread, whatever it was asked for.
    struct Busy;

    impl Team for Busy {
        fn size(&self) -> usize {
            4
        }

        fn run(&self, _: usize, work: &(dyn Fn() + Sync)) {
            work();
        }
    }

    fn everything_runs_once() {
        let mut done = vec![0; 1000];
        share_with(
            done.chunks_mut(7).enumerate(),
            || 0,
            |(n, chunk): (usize, &mut [usize]), seen| {
                *seen += 1;
                chunk.iter_mut().for_each(|x| *x += n);
            },
        );
        assert!(done.iter().enumerate().all(|(at, &n)| n == at / 7));

        let mut memory = vec![0; 30];
        share_memory(done.chunks_mut(7).enumerate(), &mut memory, 10, |(n, chunk), piece: &mut [i32]| {
            assert_eq!(piece.len(), 10);
            chunk.iter_mut().for_each(|x| *x += n + 1);
        });
        assert!(done.iter().enumerate().all(|(at, &n)| n == 2 * (at / 7) + 1));

        // Room for more workers than there are threads.
        let mut scratch = vec![0.0f32; 16 * 20];
        let runs: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
        parallel(100, &mut scratch, 16, |task, part| {
            assert!(part.len() >= 16);
            runs[task].fetch_add(1, Ordering::Relaxed);
        });
        assert!(runs.iter().all(|runs| runs.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn every_task_runs_once_on_whatever_threads() {
        everything_runs_once();
        alone(everything_runs_once);
        on_team(&Started(3), everything_runs_once);
        on_team(&Busy, everything_runs_once);
        on_team(&Idle(AtomicUsize::new(4)), everything_runs_once);
    }

    #[test]
    fn a_team_is_asked_for_its_size_once() {
        for size in [0, 1, 7, usize::MAX] {
            on_team(&Idle(AtomicUsize::new(size)), || {
                assert_eq!(count(), size.clamp(1, MOST_THREADS));
                assert_eq!(count(), size.clamp(1, MOST_THREADS));
            });
        }
    }

    #[test]
    fn what_rayon_runs_while_a_call_waits_is_not_stopped() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let (done, begun, stop) = (AtomicUsize::new(0), AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
        let asked = Arc::clone(&stop);
        let (done, begun) = (&done, &begun);
        let deadline = Instant::now() + Duration::from_secs(20);
        pool.scope(|scope| {
            let caller = thread::current().id();
            until(Arc::new(move || asked.load(Ordering::Relaxed) == 1), || {
                share(0..2, |_| {
                    if thread::current().id() == caller {
                        // Then this thread has nothing left, waits for the other, and takes its jobs.
                        while begun.load(Ordering::Relaxed) == 0 && Instant::now() < deadline {
                            thread::yield_now();
                        }
                        return;
                    }
                    stop.store(1, Ordering::Relaxed);
                    for _ in 0..8 {
                        scope.spawn(|_| share(0..8, |_| _ = done.fetch_add(1, Ordering::Relaxed)));
                    }
                    begun.store(1, Ordering::Relaxed);
                    while done.load(Ordering::Relaxed) < 64 && Instant::now() < deadline {
                        thread::yield_now();
                    }
                });
            });
        });
        assert_eq!(done.load(Ordering::Relaxed), 64);
    }

    #[test]
    fn members_are_alone_and_the_caller_is_what_it_was() {
        static TEAM: Started = Started(3);
        on_team(&TEAM, || {
            assert_eq!(count(), 3);
            let counts = Mutex::new(Vec::new());
            on_members(3, &|| counts.lock().unwrap().push(count()));
            assert_eq!(counts.into_inner().unwrap(), [1, 1, 1]);
            assert_eq!(count(), 3);
            alone(|| assert_eq!(count(), 1));
            assert_eq!(count(), 3);
        });
        assert_eq!(count(), rayon::current_num_threads());
    }

    #[test]
    fn every_thread_ends_when_it_is_told_to_and_the_next_call_does_not() {
        static TEAM: Started = Started(3);
        let endless = || {
            share(0..usize::MAX, |_| {
                thread::sleep(Duration::from_micros(10));
            });
        };
        let run = |on: &dyn Fn()| {
            let asked = Arc::new(AtomicUsize::new(0));
            let count = Arc::clone(&asked);
            let stop: Stop = Arc::new(move || count.fetch_add(1, Ordering::Relaxed) >= 100);
            assert!(until(stop, on).is_none());
            assert!(asked.load(Ordering::Relaxed) > 100);
        };
        run(&endless);
        run(&|| alone(endless));
        run(&|| on_team(&TEAM, endless));
        everything_runs_once();
        assert_eq!(until(Arc::new(|| false), || 7), Some(7));
    }

    #[test]
    fn the_caller_asks_while_another_has_the_last_item() {
        static TEAM: Started = Started(2);
        let caller = thread::current().id();
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let stop: Stop = Arc::new(move || {
            if thread::current().id() == caller {
                count.fetch_add(1, Ordering::Relaxed);
            }
            count.load(Ordering::Relaxed) >= 100
        });
        let both = std::sync::Barrier::new(2);
        let ended = until(stop, || {
            on_team(&TEAM, || {
                on_members(2, &|| {
                    both.wait();
                    while thread::current().id() != caller {
                        check();
                    }
                });
            });
        });
        assert!(ended.is_none());
    }

    #[test]
    fn what_answers_may_call_kernels() {
        let stop: Stop = Arc::new(|| {
            everything_runs_once();
            true
        });
        assert!(until(stop, || share(0..10, |_| ())).is_none());
    }

    #[test]
    fn a_panic_reaches_the_caller_after_all_members_are_done() {
        static TEAM: Started = Started(4);
        let done = AtomicUsize::new(0);
        let result = catch_unwind(AssertUnwindSafe(|| {
            on_team(&TEAM, || {
                share(0..100, |n| {
                    assert_ne!(n, 17);
                    done.fetch_add(1, Ordering::Relaxed);
                });
            });
        }));
        assert!(result.is_err());
        assert_eq!(done.load(Ordering::Relaxed), 99);
        assert_eq!(count(), rayon::current_num_threads());
    }
}
