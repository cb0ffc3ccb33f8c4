//! The same bits on any number of threads.

use crate::case::{Case, Inputs, KeyMask};
use crate::compare::{Failure, same_bits};
use crate::execute;
use crate::subject::{Number, Subject};

/// A pool of so many threads.
pub(crate) fn pool(threads: usize) -> Result<rayon::ThreadPool, Failure> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    pool.map_err(|error| Failure(format!("no pool of {threads} threads: {error}")))
}

/// Outputs, gradients and states on 1, 2, 3 and 8 threads.
pub fn threads_do_not_matter<T: Number>(subject: &Subject, case: &Case) -> Result<(), Failure> {
    threads_do_not_matter_of(subject, case, &execute::random(subject, case).cast::<T>())
}

/// The same on given numbers.
pub fn threads_do_not_matter_of<T: Number>(subject: &Subject, case: &Case, inputs: &Inputs<T>) -> Result<(), Failure> {
    let with_state = case.causal && case.offset == 0 && !matches!(case.keys, KeyMask::Packed { .. });
    let on = |threads: usize| -> Result<Vec<Vec<T>>, Failure> {
        pool(threads)?.install(|| {
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
