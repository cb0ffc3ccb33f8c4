//! The same bits on any number of threads.

use longspan_kernels::threads::{Team, on_team};
use rayon::ThreadPoolBuilder;

use crate::case::{Case, Inputs, KeyMask};
use crate::compare::{Failure, same_bits};
use crate::execute;
use crate::subject::{Number, Subject};

/// Runs `work` with kernels on so many threads of a pool; for a detector of data races, on threads that are started for each piece of
/// their work, since it sees where these begin and end (`.ci/sanitize`).
pub fn on_threads<R: Send>(threads: usize, work: impl FnOnce() -> R + Send) -> R {
    if cfg!(longspan_races) {
        return on_team(Box::leak(Box::new(Started(threads))), work);
    }
    let pool = ThreadPoolBuilder::new().num_threads(threads).build();
    pool.unwrap_or_else(|error| panic!("no pool of {threads} threads: {error}")).install(work)
}

/// Has as many threads as it says, started for each piece of work.
struct Started(usize);

impl Team for Started {
    fn size(&self) -> usize {
        self.0
    }

    fn run(&self, members: usize, work: &(dyn Fn() + Sync)) {
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..members).map(|_| scope.spawn(work)).collect();
            work();
            // A scope alone would wait for them without the system's `join`, which is what the detector knows.
            others.into_iter().for_each(|other| other.join().expect("members do not panic"));
        });
    }
}

/// Outputs, gradients and states on 1, 2, 3 and 8 threads.
pub fn threads_do_not_matter<T: Number>(subject: &Subject, case: &Case) -> Result<(), Failure> {
    threads_do_not_matter_of(subject, case, &execute::random(subject, case).cast::<T>())
}

/// The same on given numbers.
pub fn threads_do_not_matter_of<T: Number>(subject: &Subject, case: &Case, inputs: &Inputs<T>) -> Result<(), Failure> {
    let with_state = case.causal && case.offset == 0 && !matches!(case.keys, KeyMask::Packed { .. });
    let on = |threads: usize| -> Result<Vec<Vec<T>>, Failure> {
        on_threads(threads, || {
            let forward = execute::forward(subject, case, inputs)?;
            let mut all = execute::backward(subject, case, inputs, &forward)?.gradients;
            all.extend([forward.out, forward.denominators]);
            if with_state {
                all.push(execute::forward_state(subject, case, inputs, None)?.1.numbers().to_vec());
            }
            Ok(all)
        })
    };
    let one = on(1)?;
    for threads in [2, 3, 8] {
        for (n, (got, expected)) in on(threads)?.iter().zip(&one).enumerate() {
            let what = format!("tensor {n} on {threads} threads (gradients, out, denominators, state)");
            same_bits(&what, got, expected)?;
        }
    }
    Ok(())
}
