//! What the programs in `benches/` share: mechanisms that take turns with each other and with the machine's own products and
//! copies, in one process, forward and backward timed apart.

use std::sync::Arc;

use longspan_kernels::{Dims, Kernel, Order};

use crate::error::Error;
use crate::machine::{Limits, Rates};
use crate::on_threads;
use crate::statistics::Spread;
use crate::timing::{processor_seconds, seconds};
use crate::workload::{Buffers, Pass, Subject};

/// Heads of the benchmarks' calls.
pub const HEADS: usize = 8;
/// Numbers in one query, key or value of one head.
pub const HEAD_DIM: usize = 64;

/// What a benchmark program was asked for: `[--quick] [--processor] [--threads N] [--length L] [NAME]`.
#[derive(Debug, Clone)]
pub struct Options {
    /// Fewer rounds.
    pub quick: bool,
    /// Processor time of one thread, which other programs on the machine disturb less.
    pub processor: bool,
    /// Threads; one with `processor`.
    pub threads: usize,
    /// Tokens.
    pub length: usize,
    /// Whether that was asked for.
    pub length_is_given: bool,
    name: Option<String>,
}

impl Options {
    /// The arguments of this program.
    ///
    /// # Errors
    /// For an unknown option, or one without its number.
    pub fn of_program() -> Result<Self, String> {
        let mut options =
            Self { quick: false, processor: false, threads: 2, length: 4096, length_is_given: false, name: None };
        // Cargo adds `--bench`.
        let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
        while let Some(argument) = arguments.next() {
            let mut number = || {
                let number = arguments.next().and_then(|text| text.parse().ok()).filter(|&number| number > 0);
                number.ok_or_else(|| format!("{argument}: expected a number from 1 on after it"))
            };
            match argument.as_str() {
                "--quick" => options.quick = true,
                "--processor" => options.processor = true,
                "--threads" => options.threads = number()?,
                "--length" => (options.length, options.length_is_given) = (number()?, true),
                _ if argument.starts_with("--") => {
                    return Err(format!(
                        "{argument}: expected --quick, --processor, --threads N, --length L or a name"
                    ));
                }
                _ => options.name = Some(argument),
            }
        }
        if options.processor {
            options.threads = 1;
        }
        Ok(options)
    }

    /// The sizes of a call: one sequence.
    pub fn dims(&self) -> Dims {
        Dims::square(1, HEADS, self.length, HEAD_DIM)
    }

    /// Whether mechanisms of this name were asked for.
    pub fn wants(&self, name: &str) -> bool {
        self.name.as_ref().is_none_or(|wanted| name.contains(wanted.as_str()))
    }

    /// Each mechanism whose name was asked for, under a causal mask and then in both directions.
    pub fn turns<M: Kernel<f32> + Clone + 'static>(&self, mechanisms: &[(&str, M)]) -> Vec<Turn<M>> {
        let turns = [Order::Causal, Order::Bidirectional].into_iter().flat_map(|order| {
            mechanisms.iter().filter(|(name, _)| self.wants(name)).map(move |(name, mechanism)| {
                let name = if order == Order::Causal { format!("{name}, masked") } else { (*name).to_owned() };
                Turn::new(name, mechanism.clone(), self.dims(), order, Pass::ForwardBackward)
            })
        });
        turns.collect()
    }

    /// Runs `body` on as many threads as were asked for.
    ///
    /// # Errors
    /// If the threads cannot be started, or what `body` says.
    pub fn run(&self, body: impl FnOnce() -> Result<(), Error> + Send) -> Result<(), String> {
        on_threads(self.threads, body).and_then(|result| result).map_err(|error| error.to_string())
    }

    /// Seconds of one run by the clock that was asked for.
    pub fn clock(&self, body: &mut dyn FnMut()) -> f64 {
        if self.processor { processor_seconds(body) } else { seconds(body) }
    }
}

/// Runs `rounds` rounds of one call of each mechanism, and `measure` after each. A first round warms up and does not count.
/// What is measured stands between the calls: a large product clears the caches for the next one.
///
/// # Errors
/// If a mechanism refuses its call.
pub fn alternate<M>(
    turns: &mut [Turn<M>],
    mut limits: Limits,
    rounds: usize,
    clock: Clock<'_>,
    measure: fn(&mut Limits),
) -> Result<Rates, Error> {
    for turn in turns.iter_mut() {
        turn.run(clock)?;
        turn.times = Default::default();
    }
    for _ in 0..rounds {
        turns.iter_mut().try_for_each(|turn| turn.run(clock))?;
        measure(&mut limits);
    }
    Ok(limits.rates().expect("at least one round"))
}

/// Seconds of one run.
pub type Clock<'c> = &'c (dyn Fn(&mut dyn FnMut()) -> f64 + Sync);

/// A mechanism under a mask, with memory of its own and the times of its runs.
pub struct Turn<M> {
    /// For tables.
    pub name: String,
    /// What runs.
    pub mechanism: M,
    /// Its mask.
    pub order: Order,
    /// Seconds of forward calls and of backward ones.
    pub times: [Vec<f64>; 2],
    subject: Subject,
    buffers: Buffers,
}

impl<M: Kernel<f32> + Clone + 'static> Turn<M> {
    /// With the same numbers as every other of these sizes.
    pub fn new(name: String, mechanism: M, dims: Dims, order: Order, pass: Pass) -> Self {
        let subject = Subject::new(Arc::new(mechanism.clone()), &dims, pass);
        Self { name, mechanism, order, times: Default::default(), subject, buffers: Buffers::new(dims, pass) }
    }
}

impl<M> Turn<M> {
    /// Runs once.
    ///
    /// # Errors
    /// If the mechanism refuses the call.
    pub fn run(&mut self, clock: Clock<'_>) -> Result<(), Error> {
        let times = self.subject.timed(&mut self.buffers, self.order, clock).map_err(|source| self.refused(source))?;
        for (all, time) in self.times.iter_mut().zip(times) {
            all.extend(time);
        }
        Ok(())
    }

    /// What a kernel said, with the name and length of this call.
    pub fn refused(&self, source: longspan_kernels::Error) -> Error {
        Error::Kernel { candidate: self.name.clone(), length: self.buffers.dims.queries, source }
    }

    /// The medians of the times so far, forward and backward; 0 where nothing ran.
    pub fn medians(&self) -> [f64; 2] {
        self.times.each_ref().map(|times| Spread::of(times).map_or(0.0, |spread| spread.median))
    }

    /// The least of the times so far: other programs on the machine only ever add time.
    pub fn least(&self) -> [f64; 2] {
        self.times.each_ref().map(|times| times.iter().copied().fold(f64::INFINITY, f64::min))
    }
}
