//! The rates of the cost models, measured: calls of many sizes by every algorithm, and the rates that predict their times.
//!
//! Cost models say how often an algorithm does what ([`Work`]); a time is the sum of these counts by their rates. So the rates
//! follow from times by least squares: of relative errors, since a call of a microsecond is chosen as carefully as one of a
//! second; not negative, since nothing gives time back; and with little regard for single points that are far off, since a
//! busy machine disturbs some.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use longspan_kernels::{Algorithm, Dims, Mask, Order, Plan, Purpose, Rate, Rates, Work};
use serde::{Deserialize, Serialize};

use crate::conformance;
use crate::error::Error;
use crate::machine::Machine;
use crate::registry::{Candidate, Entry};
use crate::statistics::Spread;
use crate::sweep::{OrderName, Progress, Watch};
use crate::timing::{processor_seconds, seconds};
use crate::workload::{Buffers, Pass, Subject};

/// The sizes of the measured calls, and how long that may take.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Tokens.
    pub lengths: Vec<usize>,
    /// Numbers in one query, key or value of one head.
    pub widths: Vec<usize>,
    /// Heads, taken in turn from size to size.
    pub heads: Vec<usize>,
    /// Time for all of it on a machine that has nothing else to do, in seconds.
    pub seconds: f64,
    /// A call that is predicted to take longer than this is left out, in seconds.
    pub longest_call: f64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            // Close together where one algorithm passes another.
            lengths: vec![4, 12, 32, 64, 96, 144, 216, 320, 640, 1280, 3072],
            widths: vec![16, 64, 128],
            heads: vec![1, 4],
            seconds: 60.0,
            longest_call: 0.005,
        }
    }
}

/// One algorithm at one size.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// What it does.
    pub work: Work,
    /// Seconds of a forward call.
    pub forward: f64,
    /// Seconds of a forward and a backward call.
    pub both: f64,
}

impl Sample {
    /// The seconds that count for a purpose.
    pub fn seconds(&self, purpose: Purpose) -> f64 {
        match purpose {
            Purpose::Output => self.forward,
            Purpose::Gradient => self.both,
        }
    }
}

/// One mechanism at one size by each algorithm that was not left out.
#[derive(Debug, Clone, PartialEq)]
pub struct Point {
    /// The entry's name.
    pub mechanism: String,
    /// The mask.
    pub order: OrderName,
    /// The sizes.
    pub dims: Dims,
    /// The cost model's answer.
    pub plan: Plan,
    /// What was measured.
    pub samples: Vec<Sample>,
}

/// A size at which a mechanism is to be measured.
struct Case<'e> {
    entry: &'e Entry,
    order: OrderName,
    dims: Dims,
}

fn cases<'e>(entries: &'e [Entry], settings: &Settings) -> Vec<Case<'e>> {
    let mut cases = Vec::new();
    for entry in entries {
        for order in [OrderName::Causal, OrderName::Bidirectional] {
            // Where there is no choice to make, fewer sizes do.
            let step = if entry.candidates().len() > 1 { 1 } else { 3 };
            for (i, &length) in settings.lengths.iter().enumerate().step_by(step) {
                for (j, &width) in settings.widths.iter().enumerate() {
                    let heads = settings.heads[(i + j) % settings.heads.len()];
                    cases.push(Case { entry, order, dims: Dims::square(1, heads, length, width) });
                }
            }
        }
    }
    cases
}

/// Checks every kernel, then measures all sizes on the current rayon pool, which should have one thread; `None` if asked to
/// stop.
///
/// # Errors
/// For a kernel that is wrong, or that refuses a call.
pub fn measure(entries: &[Entry], settings: &Settings, watch: Watch<'_>) -> Result<Option<Vec<Point>>, Error> {
    let candidates: Vec<Vec<Candidate>> = entries.iter().map(Entry::candidates).collect();
    let cases = cases(entries, settings);
    let checks = 2 * candidates.iter().map(Vec::len).sum::<usize>();
    let mut progress = Progress { done: 0, total: checks + cases.len(), label: String::new() };
    for candidate in candidates.iter().flatten() {
        for order in [OrderName::Causal, OrderName::Bidirectional] {
            progress.label = format!("checking {candidate}, {}", order.name());
            if watch(&progress).is_break() {
                return Ok(None);
            }
            conformance::verify(candidate, CHECKED_WIDTH, order.order())?;
            progress.done += 1;
        }
    }
    let share = Duration::from_secs_f64(settings.seconds / cases.len().max(1) as f64);
    let mut points = Vec::new();
    for case in &cases {
        progress.label = format!("{}, {}, {} tokens", case.entry.name, case.order.name(), case.dims.queries);
        if watch(&progress).is_break() {
            return Ok(None);
        }
        points.extend(point(case, settings, share)?);
        progress.done += 1;
    }
    progress.label = "done".to_owned();
    let _ = watch(&progress);
    Ok(Some(points))
}

/// Width of a head when kernels are checked.
const CHECKED_WIDTH: usize = 16;
/// Least seconds of one measurement: some hundred readings of the clock.
const LEAST: f64 = 5e-5;
/// Turns of a point, at least and at most.
const ROUNDS: (usize, usize) = (5, 40);

/// An algorithm while it is measured: its subjects, calls a measurement and best times, forward and with the backward.
struct Runner {
    candidate: Candidate,
    work: Work,
    subjects: [Subject; 2],
    calls: [usize; 2],
    best: [f64; 2],
}

/// One size, measured; `None` for an entry without algorithms.
fn point(case: &Case<'_>, settings: &Settings, share: Duration) -> Result<Option<Point>, Error> {
    let Case { entry, order, dims } = case;
    let length = dims.queries;
    let mask = Mask { order: order.order(), ..Mask::default() };
    let candidates = entry.candidates();
    let Some(first) = candidates.first() else { return Ok(None) };
    let plan = first.automatic(length).plan(dims, &mask);
    let passes = [Pass::Forward, Pass::ForwardBackward];
    let mut buffers = passes.map(|pass| Buffers::new(*dims, pass));
    let mut runners = Vec::new();
    for candidate in candidates {
        let Some(estimate) = plan.estimates.iter().find(|estimate| estimate.algorithm == candidate.algorithm) else {
            continue;
        };
        if estimate.seconds(Purpose::Output) > settings.longest_call {
            continue;
        }
        let mechanism = candidate.single(length);
        let subjects = passes.map(|pass| Subject::new(Arc::clone(&mechanism), dims, pass));
        runners.push(Runner { candidate, work: estimate.work, subjects, calls: [1; 2], best: [f64::INFINITY; 2] });
    }
    let started = Instant::now();
    for round in 0..ROUNDS.1 {
        if round >= ROUNDS.0 && started.elapsed() >= share {
            break;
        }
        for runner in &mut runners {
            for (pass, buffers) in buffers.iter_mut().enumerate() {
                let time = runner.take(pass, buffers, order.order()).map_err(|source| Error::Kernel {
                    candidate: runner.candidate.to_string(),
                    length,
                    source,
                })?;
                if round == 0 {
                    // The first grows scratch; it says how many calls make a measurement.
                    runner.calls[pass] = (LEAST / time.max(1e-9)).ceil().clamp(1.0, 1e4) as usize;
                } else {
                    runner.best[pass] = runner.best[pass].min(time);
                }
            }
        }
    }
    let samples = runners
        .into_iter()
        .map(|runner| Sample {
            algorithm: runner.candidate.algorithm,
            work: runner.work,
            forward: runner.best[0],
            both: runner.best[1],
        })
        .collect();
    Ok(Some(Point { mechanism: entry.name.to_owned(), order: *order, dims: *dims, plan, samples }))
}

impl Runner {
    /// Seconds of one call of a pass.
    fn take(&mut self, pass: usize, buffers: &mut Buffers, order: Order) -> Result<f64, longspan_kernels::Error> {
        let (subject, calls) = (&mut self.subjects[pass], self.calls[pass]);
        let mut result = Ok(());
        let mut run = || result = (0..calls).try_for_each(|_| subject.run(buffers, order));
        // Only where this thread does all the work does its time tell anything.
        let time = if rayon::current_num_threads() == 1 { processor_seconds(&mut run) } else { seconds(&mut run) };
        result.map(|()| time / calls as f64)
    }
}

/// Errors beyond this, relative, count by their size and not by its square.
const FAR: f64 = 0.05;
/// Rounds of that.
const REWEIGHTED: usize = 8;

/// The rates by which the work of all samples takes their time best, for each purpose on its own; a rate that no sample
/// depends on stays as `before` has it.
pub fn fit(points: &[Point], before: &Rates) -> Rates {
    Purpose::ALL.into_iter().fold(before.clone(), |rates, purpose| fit_for(purpose, points, &rates))
}

fn fit_for(purpose: Purpose, points: &[Point], before: &Rates) -> Rates {
    let samples: Vec<&Sample> = points.iter().flat_map(|point| &point.samples).collect();
    let samples: Vec<&Sample> = samples.into_iter().filter(|sample| sample.seconds(purpose) > 0.0).collect();
    let used: Vec<Rate> = Rate::ALL
        .iter()
        .copied()
        .filter(|rate| samples.iter().any(|sample| sample.work.counts().iter().any(|(used, _)| used == rate)))
        .collect();
    // One row a sample: counts over its time, so that a right prediction is 1.
    let rows: Vec<Vec<(usize, f64)>> = samples
        .iter()
        .map(|sample| {
            let counts = sample.work.counts().iter();
            let place = |rate: &Rate| used.iter().position(|used| used == rate);
            counts.filter_map(|(rate, count)| Some((place(rate)?, count / sample.seconds(purpose)))).collect()
        })
        .collect();
    let mut weights = vec![1.0; rows.len()];
    let mut solution: Vec<f64> = used.iter().map(|&rate| before.get(rate, purpose)).collect();
    for _ in 0..REWEIGHTED {
        solution = non_negative_least_squares(&rows, &weights, solution);
        for (row, weight) in rows.iter().zip(&mut weights) {
            let predicted: f64 = row.iter().map(|&(at, x)| x * solution[at]).sum();
            *weight = FAR / (predicted - 1.0).abs().max(FAR);
        }
    }
    // A solution is finite and not negative; one that is not would leave the rate as it was.
    used.iter()
        .zip(solution)
        .fold(before.clone(), |rates, (&rate, seconds)| rates.clone().with(rate, purpose, seconds).unwrap_or(rates))
}

/// Sweeps over all unknowns.
const SWEEPS: usize = 100_000;
/// A sweep that changes no unknown by more than this, in units of its column's length, is the last.
const SETTLED: f64 = 1e-12;

/// The `x ≥ 0` for which the weighted sum of `(row · x − 1)²` is least, by descent along one coordinate after the other.
fn non_negative_least_squares(rows: &[Vec<(usize, f64)>], weights: &[f64], mut x: Vec<f64>) -> Vec<f64> {
    let n = x.len();
    // In units in which columns have length 1: seconds a call and seconds a flop are nine powers of ten apart.
    let mut scale = vec![0.0f64; n];
    for (row, weight) in rows.iter().zip(weights) {
        row.iter().for_each(|&(at, value)| scale[at] += weight * value * value);
    }
    scale.iter_mut().for_each(|scale| *scale = if *scale > 0.0 { scale.sqrt() } else { 1.0 });
    let mut gram = vec![0.0; n * n];
    let mut right = vec![0.0; n];
    for (row, weight) in rows.iter().zip(weights) {
        for &(i, a) in row {
            right[i] += weight * a / scale[i];
            for &(j, b) in row {
                gram[i * n + j] += weight * a * b / (scale[i] * scale[j]);
            }
        }
    }
    x.iter_mut().zip(&scale).for_each(|(x, scale)| *x *= scale);
    for _ in 0..SWEEPS {
        let mut change = 0.0f64;
        for i in 0..n {
            let row = &gram[i * n..][..n];
            if row[i] <= 0.0 {
                continue;
            }
            let slope = row.iter().zip(&x).map(|(a, x)| a * x).sum::<f64>() - right[i];
            let next = (x[i] - slope / row[i]).max(0.0);
            change = change.max((next - x[i]).abs());
            x[i] = next;
        }
        if change < SETTLED {
            break;
        }
    }
    x.iter_mut().zip(&scale).for_each(|(x, scale)| *x /= scale);
    x
}

/// How well rates predict and choose, for one mechanism.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Judgement {
    /// The entry's name.
    pub mechanism: String,
    /// Predicted over measured times of forward calls.
    pub predicted: Spread,
    /// The same for forward and backward together.
    pub predicted_both: Spread,
    /// The choice for forward calls; `None` where there is none.
    pub forward: Option<Choices>,
    /// The choice for forward and backward together.
    pub both: Option<Choices>,
}

/// How a choice fares.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Choices {
    /// Sizes at which more than one algorithm was measured.
    pub points: usize,
    /// Of these, those where the choice took at most 1.1 × the time of the best.
    pub within_a_tenth: usize,
    /// The largest time of the choice over that of the best.
    pub worst: f64,
    /// Length, width and mask of that.
    pub worst_at: (usize, usize, OrderName),
}

/// Judges rates by what was measured, mechanism by mechanism.
pub fn judge(points: &[Point], rates: &Rates) -> Vec<Judgement> {
    let names = crate::report::distinct(points.iter().map(|point| point.mechanism.as_str()));
    names
        .into_iter()
        .filter_map(|name| {
            let own: Vec<&Point> = points.iter().filter(|point| point.mechanism == name).collect();
            let samples = || own.iter().flat_map(|point| &point.samples);
            let predicted = |purpose| {
                let ratio = |sample: &Sample| sample.work.seconds(rates, purpose) / sample.seconds(purpose);
                Spread::of(&samples().map(ratio).collect::<Vec<f64>>())
            };
            Some(Judgement {
                mechanism: name.to_owned(),
                predicted: predicted(Purpose::Output)?,
                predicted_both: predicted(Purpose::Gradient)?,
                forward: choices(&own, rates, Purpose::Output),
                both: choices(&own, rates, Purpose::Gradient),
            })
        })
        .collect()
}

fn choices(points: &[&Point], rates: &Rates, purpose: Purpose) -> Option<Choices> {
    let time = |sample: &Sample| sample.seconds(purpose);
    let mut result: Option<Choices> = None;
    for point in points.iter().filter(|point| point.samples.len() > 1) {
        let chosen = point.plan.cheapest(rates, purpose)?;
        // What was left out for its length cannot be judged; it is not chosen either.
        let Some(taken) = point.samples.iter().find(|sample| sample.algorithm == chosen) else { continue };
        let best = point.samples.iter().map(time).fold(f64::INFINITY, f64::min);
        let ratio = time(taken) / best;
        let at = (point.dims.queries, point.dims.head_dim, point.order);
        let choices = result.get_or_insert(Choices { points: 0, within_a_tenth: 0, worst: 0.0, worst_at: at });
        choices.points += 1;
        choices.within_a_tenth += usize::from(ratio <= 1.1);
        if ratio > choices.worst {
            (choices.worst, choices.worst_at) = (ratio, at);
        }
    }
    result
}

/// A table of judgements, before beside after.
pub fn to_text(before: &[Judgement], after: &[Judgement]) -> String {
    let names = before.iter().chain(after).map(|judgement| judgement.mechanism.len());
    let width = names.max().unwrap_or(0) + 2;
    let mut text = format!(
        "{:<width$} {:>24} {:>35} {:>24} {:>35}\n",
        "", "predicted / measured", "choice, forward", "the same, with backward", "choice, forward + backward"
    );
    for (name, judgements) in [("before", before), ("after", after)] {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{name}");
        for judgement in judgements {
            let spread = |Spread { median, lower, upper, .. }: Spread| format!("{median:.2} ({lower:.2} – {upper:.2})");
            let cell = |choices: &Option<Choices>| choices.as_ref().map_or("one algorithm".to_owned(), Choices::text);
            let _ = writeln!(
                text,
                "{:<width$} {:>24} {:>35} {:>24} {:>35}",
                format!("  {}", judgement.mechanism),
                spread(judgement.predicted),
                cell(&judgement.forward),
                spread(judgement.predicted_both),
                cell(&judgement.both)
            );
        }
        let total = |part: fn(&Judgement) -> Option<Choices>| {
            let all = judgements.iter().filter_map(part);
            all.fold((0, 0, 0.0f64), |(near, all, worst), c| {
                (near + c.within_a_tenth, all + c.points, worst.max(c.worst))
            })
        };
        let cell = |(near, all, worst): (usize, usize, f64)| format!("{near} of {all}, worst {worst:.2} ×");
        let _ = writeln!(
            text,
            "{:<width$} {:>24} {:>35} {:>24} {:>35}",
            "  all",
            "",
            cell(total(|judgement| judgement.forward)),
            "",
            cell(total(|judgement| judgement.both))
        );
    }
    text.push_str(
        "N of M: sizes where the choice of `auto` took at most 1.1 × the time of the best forced algorithm;\n\
         (length·width, c: causal, b: bidirectional)\n",
    );
    text
}

impl Choices {
    fn text(&self) -> String {
        let (length, width, order) = self.worst_at;
        let order = if order == OrderName::Causal { "c" } else { "b" };
        format!("{} of {}, worst {:.2} × ({length}·{width}{order})", self.within_a_tenth, self.points, self.worst)
    }
}

/// The version of the file's form. A file of another one is outdated.
pub const FORMAT: u32 = 2;

/// Measured rates, as a file holds them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// [`FORMAT`].
    pub format: u32,
    /// Version of the program that measured.
    pub version: String,
    /// The day, in universal time.
    pub measured: String,
    /// Where it was measured.
    pub machine: Machine,
    /// Every rate by its name, in picoseconds: forward, and forward with backward.
    pub picoseconds: BTreeMap<String, [f64; 2]>,
}

/// Seconds in a picosecond.
const PICO: f64 = 1e-12;

impl Calibration {
    /// Of rates that were measured here and now.
    pub fn new(rates: &Rates) -> Self {
        // Digits that a measurement does not have are left out.
        let rounded = |x: f64| format!("{x:.4e}").parse().unwrap_or(x);
        Self {
            format: FORMAT,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            measured: today(),
            machine: Machine::here(),
            picoseconds: rates
                .iter()
                .map(|(rate, seconds)| (rate.name().to_owned(), seconds.map(|seconds| rounded(seconds / PICO))))
                .collect(),
        }
    }

    /// The rates, if all are there and make sense.
    ///
    /// # Errors
    /// As [`Rates::from_names`].
    pub fn rates(&self) -> Result<Rates, longspan_kernels::Error> {
        let seconds = |picoseconds: &[f64; 2]| picoseconds.map(|picoseconds| picoseconds * PICO);
        Rates::from_names(self.picoseconds.iter().map(|(name, picoseconds)| (name.as_str(), seconds(picoseconds))))
    }

    /// Whether it was measured on a machine like this one, with the same instructions.
    pub fn fits(&self, machine: &Machine) -> bool {
        self.machine.processor == machine.processor && self.machine.instructions == machine.instructions
    }
}

/// The day in universal time, `2026-11-21`.
fn today() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let (year, month, day) = date(seconds / 86_400);
    format!("{year}-{month:02}-{day:02}")
}

/// Year, month and day so many days after 1 January 1970, in the Gregorian calendar, whose 400 years have 146,097 days
/// (Hinnant's algorithm, years beginning in March).
fn date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::ControlFlow;

    use crate::registry::calibrated;

    fn settings() -> Settings {
        Settings { lengths: vec![5, 40], widths: vec![8], heads: vec![1, 2], seconds: 0.01, ..Settings::default() }
    }

    /// Points of all sizes with times that follow from rates, disturbed by up to so much; every tenth is far too slow.
    fn synthetic(rates: &Rates, noise: f64) -> Vec<Point> {
        let mut random = crate::random::Random::new(11);
        let settings = Settings::default();
        let entries = calibrated();
        let mut points = Vec::new();
        for case in cases(&entries, &settings) {
            let mask = Mask { order: case.order.order(), ..Mask::default() };
            let plan = case.entry.candidates()[0].automatic(case.dims.queries).plan(&case.dims, &mask);
            let samples = plan
                .estimates
                .iter()
                // By made-up rates one of the others may be the fastest, which no choice can follow.
                .filter(|estimate| estimate.automatic)
                .map(|estimate| {
                    let [forward, both] = Purpose::ALL.map(|purpose| {
                        let slow = if noise > 0.0 && points.len() % 10 == 9 { 3.0 } else { 1.0 };
                        slow * estimate.work.seconds(rates, purpose) * (1.0 + noise * random.normal().abs())
                    });
                    Sample { algorithm: estimate.algorithm, work: estimate.work, forward, both }
                })
                .collect();
            let (mechanism, order, dims) = (case.entry.name.to_owned(), case.order, case.dims);
            points.push(Point { mechanism, order, dims, plan, samples });
        }
        points
    }

    /// Rates of another machine: each of the built-in ones times 1, 2 or 3, by turns otherwise for each purpose, none of
    /// them 0.
    fn other() -> Rates {
        let all = Rate::ALL.iter().enumerate().flat_map(|(n, &rate)| Purpose::ALL.map(|purpose| (n, rate, purpose)));
        all.fold(Rates::default(), |rates, (n, rate, purpose)| {
            let turn = if purpose == Purpose::Output { n } else { n / 3 };
            let seconds = Rates::default().get(rate, purpose) * (1 + turn % 3) as f64;
            rates.with(rate, purpose, if seconds > 0.0 { seconds } else { 1e-12 }).unwrap()
        })
    }

    #[test]
    fn rates_are_recovered_from_exact_times() {
        let wanted = other();
        let points = synthetic(&wanted, 0.0);
        let found = fit(&points, &Rates::default());
        for judgement in judge(&points, &found) {
            for Spread { median, lower, upper, .. } in [judgement.predicted, judgement.predicted_both] {
                assert!((median - 1.0).abs() < 1e-3 && (upper - lower) < 2e-3, "{judgement:?}");
            }
            for choices in [judgement.forward, judgement.both].into_iter().flatten() {
                assert_eq!(choices.within_a_tenth, choices.points, "{judgement:?}");
            }
        }
        // What decides long calls is told apart from all else.
        for rate in [Rate::NaiveFlop, Rate::ChunkedFlop, Rate::FftFlop, Rate::NaiveHead, Rate::ChunkedHead] {
            for purpose in Purpose::ALL {
                let ratio = found.get(rate, purpose) / wanted.get(rate, purpose);
                assert!((ratio - 1.0).abs() < 0.05, "{rate}, {purpose:?}: {ratio}");
            }
        }
    }

    #[test]
    fn disturbed_times_give_rates_that_choose_well() {
        let wanted = other();
        let points = synthetic(&wanted, 0.05);
        let found = fit(&points, &Rates::default());
        let truth = synthetic(&wanted, 0.0);
        for judgement in judge(&truth, &found) {
            assert!((judgement.predicted.median - 1.0).abs() < 0.15, "{judgement:?}");
            for choices in [judgement.forward, judgement.both].into_iter().flatten() {
                assert!(choices.worst < 1.15, "{judgement:?}");
            }
        }
        assert!(found.iter().flat_map(|(_, pair)| pair).all(|seconds| seconds.is_finite() && seconds >= 0.0));
    }

    #[test]
    fn a_wrong_choice_is_seen() {
        let points = synthetic(&Rates::default(), 0.0);
        for purpose in Purpose::ALL {
            let slow = Rates::default().with(Rate::ChunkedFlop, purpose, 1e-6).unwrap();
            let judged = judge(&points, &slow);
            let own = judged.iter().find(|judgement| judgement.mechanism == "kernelized").unwrap();
            let both = [own.forward.unwrap(), own.both.unwrap()];
            let (wrong, right) = (both[purpose as usize], both[1 - purpose as usize]);
            assert!(wrong.within_a_tenth < wrong.points && wrong.worst > 2.0, "{wrong:?}");
            assert_eq!(right.within_a_tenth, right.points, "{right:?}");
            assert!(to_text(&judged, &judged).contains("worst"));
        }
    }

    #[test]
    fn calls_are_measured_by_every_algorithm_and_fitted() {
        let entries: Vec<Entry> =
            calibrated().into_iter().filter(|e| ["kernelized", "softmax"].contains(&e.name)).collect();
        let measured = crate::on_threads(1, || measure(&entries, &settings(), &mut |_| ControlFlow::Continue(())));
        let points = measured.unwrap().unwrap().unwrap();
        // Two masks, two lengths; one length of the one that has no choice.
        assert_eq!(points.len(), 2 * 2 + 2);
        for point in &points {
            assert_eq!(point.samples.len(), if point.mechanism == "kernelized" { 3 } else { 1 });
            assert!(point.samples.iter().all(|s| s.forward > 0.0 && s.forward.is_finite() && s.both > s.forward));
        }
        let rates = fit(&points, &Rates::default());
        assert_ne!(rates, Rates::default());
        assert_eq!(
            Purpose::ALL.map(|purpose| rates.get(Rate::FftFlop, purpose)),
            Rate::FftFlop.built_in(),
            "what was not measured stays"
        );
    }

    #[test]
    fn a_watcher_can_stop_it() {
        let entries = calibrated();
        let mut calls = 0;
        let stopped = measure(&entries, &settings(), &mut |_| {
            calls += 1;
            if calls > 1 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert_eq!(stopped.unwrap(), None);
    }

    #[test]
    fn a_file_gives_its_rates_back_and_says_what_is_wrong_with_it() {
        let calibration = Calibration::new(&other());
        let rates = calibration.rates().unwrap();
        for (rate, seconds) in other().iter() {
            for (purpose, seconds) in Purpose::ALL.into_iter().zip(seconds) {
                assert!((rates.get(rate, purpose) / seconds - 1.0).abs() < 1e-4, "{rate}");
            }
        }
        assert!(calibration.fits(&Machine::here()));
        let text = serde_json::to_string(&calibration).unwrap();
        assert_eq!(serde_json::from_str::<Calibration>(&text).unwrap(), calibration);
        let mut foreign = calibration.clone();
        foreign.picoseconds.insert("kernelized.naive.coffee".to_owned(), [1.0; 2]);
        assert!(foreign.rates().unwrap_err().to_string().contains("coffee"));
        let mut broken = calibration;
        broken.picoseconds.insert(Rate::NaiveFlop.name().to_owned(), [1.0, -1.0]);
        assert!(broken.rates().unwrap_err().to_string().contains(Rate::NaiveFlop.name()));
    }

    #[test]
    fn days_are_counted_as_calendars_do() {
        assert_eq!(date(0), (1970, 1, 1));
        assert_eq!(date(59), (1970, 3, 1));
        assert_eq!(date(11_016), (2000, 2, 29));
        assert_eq!(date(20_778), (2026, 11, 21));
    }
}
