//! Mechanisms × algorithms × masks × passes over lengths.
//!
//! All that share mask, pass and length run alternately, and the machine's products and copy with them, so that a disturbance
//! affects all of them. A series ends before a call would take too long or too much memory; the report says so.

mod settings;

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use longspan_kernels::{Algorithm, Dims, Mask};
use serde::{Deserialize, Serialize};
pub(crate) use settings::doubling;
pub use settings::{OrderName, Settings};

use crate::conformance::{self, Abilities};
use crate::error::Error;
use crate::machine::Limits;
use crate::memory;
use crate::registry::{Candidate, Entry};
use crate::statistics::Spread;
use crate::timing::try_seconds;
use crate::workload::{Buffers, OneToken, Pass, Subject, parameter_bytes};

/// One measured point.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// As [`Settings::set`].
    pub set: String,
    /// The entry's name.
    pub mechanism: String,
    /// How it was computed.
    pub algorithm: String,
    /// Whether the cost model would have chosen this algorithm.
    pub chosen: bool,
    /// The mask.
    pub order: OrderName,
    /// What was timed.
    pub pass: Pass,
    /// Independent sequences.
    pub batch: usize,
    /// Heads.
    pub heads: usize,
    /// Numbers in one query, key or value of one head.
    pub head_dim: usize,
    /// Threads.
    pub threads: usize,
    /// Tokens; for [`Pass::Decode`], those before the timed one.
    pub length: usize,
    /// Seconds of a call into memory that the caller keeps.
    pub seconds: Spread,
    /// Seconds of a call that allocates its outputs.
    pub fresh_seconds: Option<f64>,
    /// Floating-point operations by the cost model, forward only.
    pub flops: Option<f64>,
    /// Seconds for these as products of streaming tiles, plus a copy of inputs and outputs, measured in the same turns.
    pub roofline_seconds: Option<f64>,
    /// Bytes of inputs and outputs, parameters included; for [`Pass::Decode`], of the state.
    pub call_bytes: usize,
    /// Bytes beyond those at the peak of a call.
    pub extra_bytes: usize,
}

/// Set, mask and pass.
pub type Key<'r> = (&'r str, OrderName, Pass);

impl Row {
    /// What it shares with the rows that it may be compared with.
    pub fn key(&self) -> Key<'_> {
        (&self.set, self.order, self.pass)
    }

    /// The time as a multiple of the roofline.
    pub fn rooflines(&self) -> Option<f64> {
        self.roofline_seconds.map(|roofline| self.seconds.median / roofline)
    }

    /// The sizes of the call.
    pub(crate) fn sizes(&self) -> String {
        format!("B={} H={} d={}, f32, {} threads", self.batch, self.heads, self.head_dim, self.threads)
    }
}

/// Where a series ended before the longest length.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ending {
    /// As [`Settings::set`].
    pub set: String,
    /// The entry's name.
    pub mechanism: String,
    /// How it was computed.
    pub algorithm: String,
    /// The mask.
    pub order: OrderName,
    /// What was timed.
    pub pass: Pass,
    /// The first length that is missing; 0 where there is none at all.
    pub length: usize,
    /// Why.
    pub reason: String,
}

/// How far a benchmark has come.
#[derive(Debug, Clone, PartialEq)]
pub struct Progress {
    /// Parts done.
    pub done: usize,
    /// Parts in all; series that end early make the last ones short.
    pub total: usize,
    /// What is being done.
    pub label: String,
}

/// Called with the progress; may ask to stop, and what was measured until then is kept.
pub type Watch<'w> = &'w mut (dyn FnMut(&Progress) -> ControlFlow<()> + Send);

/// What a sweep gave.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Sweep {
    /// All points.
    pub rows: Vec<Row>,
    /// What is missing.
    pub endings: Vec<Ending>,
    /// Whether someone asked to stop.
    pub interrupted: bool,
}

/// A series on its way through the lengths.
struct Series<'c> {
    candidate: &'c Candidate,
    /// Seconds and extra bytes at the last two lengths.
    history: Vec<(f64, usize)>,
    alive: bool,
}

impl Series<'_> {
    /// What the next length will need, by the growth so far, which is taken to be linear at least; seconds by the cost
    /// model before anything is measured.
    fn next(&self, dims: &Dims, (pass, order): (Pass, OrderName)) -> (f64, usize) {
        match self.history.as_slice() {
            [] => (self.predicted(dims, (pass, order)), 0),
            [only] => (2.0 * only.0, 2 * only.1),
            [.., before, last] => {
                let grow = |before: f64, last: f64| last * (last / before.max(f64::MIN_POSITIVE)).clamp(2.0, 4.0);
                (grow(before.0, last.0), grow(before.1 as f64, last.1 as f64) as usize)
            }
        }
    }

    /// Seconds of a call on all threads by the cost model.
    fn predicted(&self, dims: &Dims, (pass, order): (Pass, OrderName)) -> f64 {
        if pass == Pass::Decode {
            return 0.0;
        }
        let mask = Mask { order: order.order(), ..Mask::default() };
        let plan = self.candidate.automatic(reach(dims.queries, pass)).plan(dims, &mask).ok();
        let estimate = plan.as_ref().and_then(|plan| plan.of(self.candidate.algorithm));
        estimate.map_or(0.0, |estimate| estimate.seconds(pass.purpose())) / rayon::current_num_threads() as f64
    }
}

/// Checks every candidate, then measures on the current rayon pool.
///
/// # Errors
/// For settings that make no sense and for a kernel that is wrong; then nothing has been timed.
pub fn sweep(entries: &[Entry], settings: &Settings, watch: Watch<'_>) -> Result<Sweep, Error> {
    settings.check()?;
    let candidates: Vec<Vec<Candidate>> = entries.iter().map(Entry::candidates).collect();
    let lengths = settings.lengths();
    let groups = settings.passes.iter().flat_map(|&pass| settings.orders.iter().map(move |&order| (pass, order)));
    let groups: Vec<_> = groups.filter(|&(pass, order)| pass != Pass::Decode || order == OrderName::Causal).collect();
    let checks = settings.orders.len() * candidates.iter().map(Vec::len).sum::<usize>();
    let mut progress = Progress { done: 0, total: checks + groups.len() * lengths.len(), label: String::new() };
    let mut result = Sweep::default();
    let mut abilities: HashMap<(&str, Algorithm, OrderName), Abilities> = HashMap::new();
    for candidate in candidates.iter().flatten() {
        for &order in &settings.orders {
            progress.label = format!("checking {candidate}, {}", order.name());
            if watch(&progress).is_break() {
                result.interrupted = true;
                return Ok(result);
            }
            let able = conformance::verify(candidate, settings.head_dim, order.order())?;
            abilities.insert((candidate.name, candidate.algorithm, order), able);
            progress.done += 1;
        }
    }
    for (pass, order) in groups {
        let mut series = Vec::new();
        for all in &candidates {
            for candidate in all {
                let able = abilities[&(candidate.name, candidate.algorithm, order)];
                let able = if pass == Pass::Decode { able.decodes } else { able.attends };
                // A step is the same whatever the algorithm of whole calls.
                let first = candidate.algorithm == all[0].algorithm;
                if able && (pass != Pass::Decode || first) {
                    series.push(Series { candidate, history: Vec::new(), alive: true });
                } else if !able {
                    let reason = "the mechanism does not offer it".to_owned();
                    result.endings.push(ending(settings, candidate, (pass, order), 0, reason));
                }
            }
        }
        for &length in &lengths {
            progress.label = format!("{} {pass}, {length} tokens", order.name());
            if watch(&progress).is_break() {
                result.interrupted = true;
                return Ok(result);
            }
            measure(settings, (pass, order), length, &mut series, &mut result)?;
            progress.done += 1;
        }
    }
    progress.label = "done".to_owned();
    let _ = watch(&progress);
    Ok(result)
}

fn ending(
    settings: &Settings,
    candidate: &Candidate,
    (pass, order): (Pass, OrderName),
    length: usize,
    reason: String,
) -> Ending {
    Ending {
        set: settings.set.clone(),
        mechanism: candidate.name.to_owned(),
        algorithm: candidate.algorithm.to_string(),
        order,
        pass,
        length,
        reason,
    }
}

/// A subject with its times.
struct Timed<'s, 'c> {
    series: &'s mut Series<'c>,
    subject: Subject,
    /// Calls in one measurement, so that the clock does not show.
    calls: usize,
    rounds: usize,
    times: Vec<f64>,
    fresh_times: Vec<f64>,
    extra_bytes: usize,
    call_bytes: usize,
    /// For decoding: where to start from.
    state: Option<longspan_kernels::State<f32>>,
}

/// Least seconds of one measurement: some thousand ticks of the clock.
const LEAST: f64 = 1e-4;
/// Most runs of one point; the median does not change much beyond.
const MOST_ROUNDS: usize = 41;
/// Tokens in one measurement of decoding, and what a state that grows may grow by.
const DECODED: usize = 32;
/// The most tokens that a measurement comes to.
fn reach(length: usize, pass: Pass) -> usize {
    // Two to warm up, then those that say how long one takes.
    if pass == Pass::Decode { length + DECODED + 2 } else { length }
}

/// Turns of the large product.
const LARGE_ROUNDS: usize = 5;

/// One length of one group: everything alive takes turns.
fn measure(
    settings: &Settings,
    (pass, order): (Pass, OrderName),
    length: usize,
    series: &mut [Series<'_>],
    result: &mut Sweep,
) -> Result<(), Error> {
    let dims = settings.dims(length);
    let shared = Buffers::bytes(&dims, pass);
    for series in series.iter_mut().filter(|series| series.alive) {
        let (time, extra) = series.next(&dims, (pass, order));
        let parameters = parameter_bytes(&*series.candidate.single(reach(length, pass)), &dims, pass);
        let bytes = shared.saturating_add(parameters).saturating_add(extra);
        let reason = if bytes > settings.memory_limit {
            let gib = |bytes: usize| bytes as f64 / f64::from(1 << 30);
            format!("would need {:.1} GiB, the limit is {:.1}", gib(bytes), gib(settings.memory_limit))
        } else if time > settings.longest_call {
            format!("would take {time:.1} s a call, the limit is {:.1}", settings.longest_call)
        } else {
            continue;
        };
        series.alive = false;
        result.endings.push(ending(settings, series.candidate, (pass, order), length, reason));
    }
    if series.iter().all(|series| !series.alive) {
        return Ok(());
    }
    let mut buffers = Buffers::new(dims, pass);
    let mut token = OneToken::new(dims);
    let mut limits = (pass == Pass::Forward).then(|| Limits::new(shared));
    let mut timed = Vec::new();
    for series in series.iter_mut().filter(|series| series.alive) {
        // An algorithm may refuse the call for its memory; then its series has ended.
        series.alive = false;
        let candidate = series.candidate;
        match prepare(settings, (pass, order), &mut buffers, &mut token, series) {
            Ok(subject) => timed.push(subject),
            Err(error) => {
                result.endings.push(ending(settings, candidate, (pass, order), length, error.to_string()));
            }
        }
    }
    let rounds = timed.iter().map(|timed| timed.rounds).max().unwrap_or(0);
    for round in 0..rounds {
        if let Some(limits) = &mut limits {
            limits.measure();
            if round < LARGE_ROUNDS {
                limits.measure_large();
            }
        }
        for timed in timed.iter_mut().filter(|timed| round < timed.rounds) {
            let candidate = timed.series.candidate;
            timed.take(settings, order, &mut buffers, &mut token).map_err(candidate.refused(length))?;
        }
    }
    let rates = limits.as_ref().and_then(Limits::rates);
    for timed in timed {
        let Some(seconds) = Spread::of(&timed.times) else { continue };
        let mask = Mask { order: order.order(), ..Mask::default() };
        let algorithm = timed.series.candidate.algorithm;
        let plan = timed.series.candidate.automatic(reach(length, pass)).plan(&dims, &mask).ok();
        let estimate = plan.as_ref().and_then(|plan| plan.of(algorithm));
        let flops = estimate.filter(|_| pass == Pass::Forward).map(|estimate| estimate.flops);
        timed.series.alive = true;
        timed.series.history.push((seconds.median, timed.extra_bytes));
        result.rows.push(Row {
            set: settings.set.clone(),
            mechanism: timed.series.candidate.name.to_owned(),
            algorithm: algorithm.to_string(),
            chosen: pass == Pass::Decode
                || plan.as_ref().is_some_and(|plan| plan.algorithm(pass.purpose()) == algorithm),
            order,
            pass,
            batch: dims.batch,
            heads: dims.heads,
            head_dim: dims.head_dim,
            threads: rayon::current_num_threads(),
            length,
            seconds,
            fresh_seconds: Spread::of(&timed.fresh_times).map(|spread| spread.median),
            flops,
            roofline_seconds: flops.zip(rates).map(|(flops, rates)| flops / rates.tiles + rates.copy_seconds),
            call_bytes: timed.call_bytes,
            extra_bytes: timed.extra_bytes,
        });
    }
    Ok(())
}

/// Builds a subject, lets it run to warm up, and sees how often it can run in its time.
fn prepare<'s, 'c>(
    settings: &Settings,
    (pass, order): (Pass, OrderName),
    buffers: &mut Buffers,
    token: &mut OneToken,
    series: &'s mut Series<'c>,
) -> Result<Timed<'s, 'c>, longspan_kernels::Error> {
    let dims = buffers.dims;
    let mechanism = series.candidate.single(reach(dims.queries, pass));
    let mut subject = Subject::new(Arc::clone(&mechanism), &dims, pass);
    let (once, extra_bytes, call_bytes, state) = if pass == Pass::Decode {
        let state = subject.prefix(buffers)?;
        let mut going = state.clone();
        subject.steps(token, &mut going, 1)?;
        let (stepped, peak) = memory::peak(|| subject.steps(token, &mut going, 1));
        stepped?;
        let once = try_seconds(|| subject.steps(token, &mut going, DECODED))? / DECODED as f64;
        (once, peak.unwrap_or(0), state.bytes(), Some(state))
    } else {
        let extra_bytes = subject.extra_bytes(buffers, order.order())?;
        let once = try_seconds(|| subject.run(buffers, order.order()))?;
        let parameters = parameter_bytes(&*mechanism, &dims, pass);
        (once, extra_bytes, Buffers::bytes(&dims, pass) + parameters, None)
    };
    let calls = if pass == Pass::Decode { DECODED } else { (LEAST / once.max(1e-9)).ceil().clamp(1.0, 1e4) as usize };
    let settings_count = if settings.fresh && pass != Pass::Decode { 2.0 } else { 1.0 };
    let rounds = settings.seconds_per_point / (once * calls as f64 * settings_count).max(1e-9);
    let rounds = (rounds as usize).clamp(3, MOST_ROUNDS);
    Ok(Timed {
        series,
        subject,
        calls,
        rounds,
        times: Vec::new(),
        fresh_times: Vec::new(),
        extra_bytes,
        call_bytes,
        state,
    })
}

impl Timed<'_, '_> {
    /// One measurement.
    fn take(
        &mut self,
        settings: &Settings,
        order: OrderName,
        buffers: &mut Buffers,
        token: &mut OneToken,
    ) -> Result<(), longspan_kernels::Error> {
        let calls = self.calls;
        if let Some(state) = &self.state {
            let mut going = state.clone();
            let time = try_seconds(|| self.subject.steps(token, &mut going, calls))?;
            self.times.push(time / calls as f64);
            return Ok(());
        }
        let order = order.order();
        let time = try_seconds(|| (0..calls).try_for_each(|_| self.subject.run(buffers, order)))?;
        self.times.push(time / calls as f64);
        if settings.fresh {
            let fresh = |_| {
                buffers.renew();
                self.subject.renew();
                self.subject.run(buffers, order)
            };
            let time = try_seconds(|| (0..calls).try_for_each(fresh))?;
            self.fresh_times.push(time / calls as f64);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::go_on;
    use crate::registry::registry;

    fn tiny() -> Settings {
        Settings {
            heads: 2,
            head_dim: 8,
            min_length: 16,
            max_length: 64,
            seconds_per_point: 1e-4,
            ..Settings::default()
        }
    }

    #[test]
    fn every_combination_is_measured_once() {
        let entries = crate::registry::select(&registry(), &["kernelized".to_owned()]).unwrap();
        let mut seen = Vec::new();
        let result = sweep(&entries, &tiny(), &mut |progress| {
            seen.push(progress.clone());
            ControlFlow::Continue(())
        })
        .unwrap();
        let algorithms = entries[0].candidates().len();
        // Two masks and two passes by every algorithm, decoding once.
        assert_eq!(result.rows.len(), 3 * (4 * algorithms + 1));
        assert_eq!(result.endings, []);
        for (n, row) in result.rows.iter().enumerate() {
            assert!(row.seconds.median > 0.0 && row.seconds.runs >= 3, "{row:?}");
            assert_eq!(row.roofline_seconds.is_some(), row.pass == Pass::Forward, "{row:?}");
            assert_eq!(row.fresh_seconds.is_some(), row.pass != Pass::Decode, "{row:?}");
            let same = |other: &&Row| {
                (&other.algorithm, other.order, other.pass, other.length)
                    == (&row.algorithm, row.order, row.pass, row.length)
            };
            assert!(result.rows[n + 1..].iter().find(same).is_none(), "{row:?} twice");
        }
        for length in [16, 32, 64] {
            let chosen = |row: &&Row| {
                row.chosen && row.length == length && row.pass == Pass::Forward && row.order == OrderName::Causal
            };
            assert_eq!(result.rows.iter().filter(chosen).count(), 1, "{length}");
        }
        let last = seen.last().unwrap();
        assert_eq!((last.done, last.label.as_str()), (last.total, "done"));
    }

    #[test]
    fn a_series_ends_before_it_takes_too_much() {
        let entries = crate::registry::select(&registry(), &["kernelized".to_owned()]).unwrap();
        let passes = vec![Pass::Forward];
        let never = Settings { memory_limit: 1000, passes: passes.clone(), ..tiny() };
        let result = sweep(&entries, &never, &mut go_on).unwrap();
        assert!(result.rows.is_empty());
        assert!(result.endings.iter().all(|ending| ending.length == 16 && ending.reason.contains("GiB")));
        let impatient = Settings { longest_call: 1e-9, passes: passes.clone(), ..tiny() };
        let result = sweep(&entries, &impatient, &mut go_on).unwrap();
        assert!(result.rows.is_empty(), "the cost model answers for the first length");
        assert!(result.endings.iter().all(|ending| ending.length == 16 && ending.reason.contains("s a call")));
        // Every pair of 2¹⁹ tokens would take the naive algorithm minutes, and this test with it.
        let long = Settings { heads: 1, min_length: 1 << 19, max_length: 1 << 19, passes, ..tiny() };
        let long = Settings { fresh: false, orders: vec![OrderName::Causal], ..long };
        let result = sweep(&entries, &long, &mut go_on).unwrap();
        assert!(result.rows.iter().any(|row| row.algorithm == "chunked"), "{:?}", result.endings);
        assert!(result.rows.iter().all(|row| row.algorithm != "naive"));
        let naive = result.endings.iter().find(|ending| ending.algorithm == "naive");
        assert!(naive.is_some_and(|ending| ending.reason.contains("s a call")), "{:?}", result.endings);
    }

    /// Softmax attention over that prefix, of which decoding needs only the state, would take minutes.
    #[test]
    fn decoding_begins_after_a_prefix_of_any_length() {
        let entries = crate::registry::select(&registry(), &["softmax".to_owned()]).unwrap();
        let lengths = Settings { heads: 1, min_length: 1 << 19, max_length: 1 << 19, ..tiny() };
        let result = sweep(&entries, &Settings { passes: vec![Pass::Decode], ..lengths }, &mut go_on).unwrap();
        assert_eq!((result.rows.len(), result.endings.len()), (1, 0), "{:?}", result.endings);
    }

    #[test]
    fn a_watcher_can_stop_it() {
        let entries = registry();
        let result = sweep(&entries, &tiny(), &mut |_| ControlFlow::Break(())).unwrap();
        assert!(result.interrupted && result.rows.is_empty());
    }

    #[test]
    fn settings_that_measure_nothing_are_refused() {
        for (settings, flag) in [
            (Settings { heads: 0, ..tiny() }, "--heads"),
            (Settings { max_length: 8, ..tiny() }, "--max-length"),
            (Settings { seconds_per_point: f64::NAN, ..tiny() }, "--seconds"),
            (Settings { longest_call: -1.0, ..tiny() }, "--longest-call"),
        ] {
            let error = sweep(&registry(), &settings, &mut go_on).unwrap_err().to_string();
            assert!(error.contains(flag), "{error}");
        }
    }
}
