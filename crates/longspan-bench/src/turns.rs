//! Mechanisms that take turns in one process, forward and backward timed apart: what the programs in `benches/` have in common.

use std::sync::Arc;

use longspan_kernels::{Dims, Mechanism, Order};

use crate::statistics::Spread;
use crate::timing::{processor_seconds, seconds};
use crate::workload::{Buffers, Pass, Subject};

/// What a benchmark program was asked for: `[--quick] [--processor] [--threads N] [--length L] [NAME]`.
#[derive(Debug, Clone)]
pub struct Options {
    /// Fewer rounds.
    pub quick: bool,
    /// Processor time of one thread, which a machine with other work can tell too.
    pub processor: bool,
    /// Threads; one with `processor`.
    pub threads: usize,
    /// Tokens.
    pub length: usize,
    name: Option<String>,
}

impl Options {
    /// The arguments of this program.
    ///
    /// # Errors
    /// An option that there is not, or one without its number.
    pub fn of_program() -> Result<Self, String> {
        let mut options = Self { quick: false, processor: false, threads: 2, length: 4096, name: None };
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
                "--length" => options.length = number()?,
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

    /// Whether the subject of this name is to be measured.
    pub fn wants(&self, name: &str) -> bool {
        self.name.as_ref().is_none_or(|wanted| name.contains(wanted.as_str()))
    }

    /// Seconds of one run by the clock that was asked for.
    pub fn clock(&self, body: &mut dyn FnMut()) -> f64 {
        if self.processor { processor_seconds(body) } else { seconds(body) }
    }
}

/// A mechanism with memory of its own, and the times of its runs.
pub struct Turn {
    order: Order,
    subject: Subject,
    buffers: Buffers,
    /// Seconds of forward calls and of backward ones.
    pub times: [Vec<f64>; 2],
}

impl Turn {
    /// With the same numbers as every other of these sizes; without `backward`, forward calls alone.
    pub fn new(mechanism: Arc<dyn Mechanism<f32>>, dims: Dims, order: Order, backward: bool) -> Self {
        let pass = if backward { Pass::ForwardBackward } else { Pass::Forward };
        let subject = Subject::new(mechanism, &dims, pass);
        Self { order, subject, buffers: Buffers::new(dims, pass), times: Default::default() }
    }

    /// Runs once.
    ///
    /// # Panics
    /// If the mechanism refuses the call: a mistake of the program.
    pub fn run(&mut self, clock: &dyn Fn(&mut dyn FnMut()) -> f64) {
        let times = self.subject.timed(&mut self.buffers, self.order, clock).expect("the benchmark's call makes sense");
        for (all, time) in self.times.iter_mut().zip(times) {
            all.extend(time);
        }
    }

    /// The medians of the times so far, forward and backward; 0 where nothing ran.
    pub fn medians(&self) -> [f64; 2] {
        self.times.each_ref().map(|times| Spread::of(times).map_or(0.0, |spread| spread.median))
    }

    /// The least: whatever else the machine does only ever adds time.
    pub fn least(&self) -> [f64; 2] {
        self.times.each_ref().map(|times| times.iter().copied().fold(f64::INFINITY, f64::min))
    }
}
