//! The mechanisms that can be measured: one line each.

use std::fmt;
use std::sync::Arc;

use longspan_kernels::aft::Variant;
use longspan_kernels::{
    Aft, Algorithm, Bias, Fourier, Gate, GatedAttention, Kernel, KernelizedAttention, LearnedGates, Score, Shaw,
    ShortConvolution, SoftmaxAttention, Toeplitz, Update,
};

use crate::error::Error;

/// Every mechanism, in the order of tables and colours. A new one is one line here.
pub fn registry() -> Vec<Entry> {
    let shaw = |radius| move |algorithm, _| kernelized(Score::Combined(Shaw::new(radius)), algorithm);
    let relative = |radius| move |algorithm, _| kernelized(Score::Relative(Shaw::new(radius)), algorithm);
    let toeplitz = |algorithm, reach| Toeplitz { algorithm, ..Toeplitz::new(Bias::symmetric(reach)) };
    let clipped = |radius| move |algorithm, _| Toeplitz { algorithm, ..Toeplitz::new(Bias::clipped(radius)) };
    let local = |_, reach| Aft::new(Variant::Local { window: 64, length: Some(reach) });
    // Of the rank that keeps the parameters, too, linear in the length.
    let full = |_, reach| Aft::new(Variant::Full { length: reach, rank: Some(64) });
    let conv = |_, _| Aft::new(Variant::Conv { taps: 33, normalized: true });
    vec![
        Entry::new("kernelized", "Kernelized", |algorithm, _| kernelized(Score::Content, algorithm)),
        Entry::new("shaw-16", "Kernelized + Shaw, radius 16", shaw(16)),
        Entry::new("shaw-64", "Kernelized + Shaw, radius 64", shaw(64)),
        Entry::new("fourier", "Fourier positions", |algorithm, _| {
            kernelized(Score::Fourier(Fourier::default()), algorithm)
        }),
        Entry::new("toeplitz", "Toeplitz bias", toeplitz),
        Entry::new("toeplitz-clip-64", "Toeplitz bias, clipped at 64", clipped(64)).on_request(),
        Entry::new("aft-simple", "AFT-simple", |_, _| Aft::new(Variant::Simple)),
        Entry::new("aft-local-64", "AFT-local, window 64", local),
        Entry::new("aft-conv-33", "AFT-conv, 33 taps", conv),
        Entry::new("aft-full", "AFT-full, rank 64", full),
        Entry::new(BASELINE, "Softmax", |_, reach| SoftmaxAttention { capacity: reach, ..SoftmaxAttention::default() }),
        Entry::new("softmax-512", "Softmax, window 512", |_, _| SoftmaxAttention {
            window: Some(512),
            ..SoftmaxAttention::default()
        })
        .on_request(),
        Entry::new("short-convolution", "Short convolution, 4 taps", |_, _| ShortConvolution::default())
            .signed()
            .on_request(),
        Entry::new("gated", "Gated, a gate a head", |_, _| gated(Update::Sum, Gate::Head)).signed().on_request(),
        Entry::new("gla", "Gated, a gate a channel", |_, _| gated(Update::Sum, Gate::Channel)).signed().on_request(),
        Entry::new("delta", "Delta rule", |_, _| gated(Update::Delta, Gate::None)).subtracts().on_request(),
        Entry::new("gated-delta", "Gated delta rule", |_, _| gated(Update::Delta, Gate::Head)).subtracts().on_request(),
        Entry::new("kda", "Gated delta rule, a gate a channel", |_, _| gated(Update::Delta, Gate::Channel))
            .subtracts()
            .on_request(),
        Entry::new("shaw-10", "Kernelized + Shaw, radius 10", shaw(10)).on_request(),
        Entry::new("relative-10", "Shaw alone, radius 10", relative(10)).on_request(),
        Entry::new("toeplitz-clip-16", "Toeplitz bias, clipped at 16", clipped(16)).on_request(),
    ]
}

fn kernelized(score: Score, algorithm: Algorithm) -> KernelizedAttention {
    KernelizedAttention { score, algorithm, ..KernelizedAttention::default() }
}

fn gated(update: Update, gate: Gate) -> LearnedGates {
    let attention = GatedAttention { update, gate, ..GatedAttention::default() };
    LearnedGates { attention, ..LearnedGates::default() }
}

/// The mechanism that all others are compared with, wherever it is measured too.
pub const BASELINE: &str = "softmax";

/// A mechanism in both number types.
type Pair = (Arc<dyn Kernel<f32>>, Arc<dyn Kernel<f64>>);

/// Builds a mechanism for an algorithm that is to be forced, and for calls of at most so many tokens: learned tables may
/// have an entry for each.
type Make = Arc<dyn Fn(Algorithm, usize) -> Pair + Send + Sync>;

/// One mechanism with its options, under a name of its own.
#[derive(Clone)]
pub struct Entry {
    /// What `--mechanisms` takes and tables show: lower case, no commas.
    pub name: &'static str,
    /// What plots show.
    pub title: &'static str,
    /// Whether it is measured when no mechanisms are named.
    pub usual: bool,
    signed: bool,
    subtracts: bool,
    make: Make,
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entry").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Entry {
    /// A mechanism that `make` builds for each algorithm that is to be forced and for the most tokens that its calls have.
    pub fn new<M>(
        name: &'static str,
        title: &'static str,
        make: impl Fn(Algorithm, usize) -> M + Send + Sync + 'static,
    ) -> Self
    where
        M: Kernel<f32> + Kernel<f64> + 'static,
    {
        // Built twice, so that a mechanism need not be `Clone`.
        let make =
            move |algorithm, reach| -> Pair { (Arc::new(make(algorithm, reach)), Arc::new(make(algorithm, reach))) };
        Self { name, title, usual: true, signed: false, subtracts: false, make: Arc::new(make) }
    }

    /// Measured only if asked for.
    #[must_use]
    pub fn on_request(self) -> Self {
        Self { usual: false, ..self }
    }

    /// Of weights that are linear in queries, keys and what is learned, and so have either sign.
    #[must_use]
    pub fn signed(self) -> Self {
        Self { signed: true, ..self }
    }

    /// Of states that subtract what they gave before: inputs without signs bound no rounding, only the largest output does.
    #[must_use]
    pub fn subtracts(self) -> Self {
        Self { subtracts: true, ..self }
    }

    /// The mechanism by each algorithm that can be forced.
    pub fn candidates(&self) -> Vec<Candidate> {
        // Which algorithms there are does not depend on the length.
        let (single, _) = (self.make)(Algorithm::Auto, 1);
        let candidate = |&algorithm| {
            let Self { name, signed, subtracts, .. } = *self;
            Candidate { name, algorithm, signed, subtracts, make: Arc::clone(&self.make) }
        };
        single.algorithms().iter().map(candidate).collect()
    }
}

/// One mechanism by one algorithm: what is checked and then timed.
#[derive(Clone)]
pub struct Candidate {
    /// The entry's name.
    pub name: &'static str,
    /// The algorithm that is forced.
    pub algorithm: Algorithm,
    /// As [`Entry::subtracts`] says.
    pub subtracts: bool,
    /// As [`Entry::signed`] says.
    pub(crate) signed: bool,
    make: Make,
}

impl Candidate {
    /// What is timed, for calls of at most `reach` tokens.
    pub fn single(&self, reach: usize) -> Arc<dyn Kernel<f32>> {
        (self.make)(self.algorithm, reach).0
    }

    /// The same in f64, for the check.
    pub fn double(&self, reach: usize) -> Arc<dyn Kernel<f64>> {
        (self.make)(self.algorithm, reach).1
    }

    /// What a kernel says that refuses a call of `length` tokens.
    pub(crate) fn refused(&self, length: usize) -> impl Fn(longspan_kernels::Error) -> Error {
        move |source| Error::Kernel { candidate: self.to_string(), length, source }
    }

    /// The mechanism with its algorithm chosen by cost.
    pub fn automatic(&self, reach: usize) -> Arc<dyn Kernel<f32>> {
        (self.make)(Algorithm::Auto, reach).0
    }
}

impl fmt::Debug for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Candidate({self})")
    }
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} by {}", self.name, self.algorithm)
    }
}

/// The entries of these names, in the registry's order; the usual ones for none.
///
/// # Errors
/// For a name that no entry has.
pub fn select(entries: &[Entry], names: &[String]) -> Result<Vec<Entry>, Error> {
    if let Some(unknown) = names.iter().find(|name| !entries.iter().any(|entry| entry.name == **name)) {
        let known = entries.iter().map(|entry| entry.name).collect::<Vec<_>>().join(", ");
        return Err(Error::UnknownMechanism { name: unknown.clone(), known });
    }
    let wanted = |entry: &&Entry| {
        if names.is_empty() { entry.usual } else { names.iter().any(|name| name == entry.name) }
    };
    Ok(entries.iter().filter(wanted).cloned().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_fit_a_table_of_commas() {
        let entries = registry();
        for (n, entry) in entries.iter().enumerate() {
            assert!(entry.name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'));
            assert!(entries[n + 1..].iter().all(|other| other.name != entry.name && other.title != entry.title));
            assert!(!entry.candidates().is_empty());
        }
    }

    #[test]
    fn names_select_and_unknown_ones_are_told() {
        let entries = registry();
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        let selected = select(&entries, &names(&["shaw-64", "kernelized"])).unwrap();
        assert_eq!(selected.iter().map(|entry| entry.name).collect::<Vec<_>>(), ["kernelized", "shaw-64"]);
        assert!(select(&entries, &[]).unwrap().iter().all(|entry| entry.usual));
        let error = select(&entries, &names(&["sofmax"])).unwrap_err().to_string();
        assert!(error.contains("sofmax") && error.contains("kernelized, shaw-16"), "{error}");
    }
}
