//! The figures that the project set itself, against the machine's own limits measured in the same turns; and how time and
//! memory grow.

use std::ops::ControlFlow;

use longspan_kernels::{Dims, Mask, Order};
use serde::{Deserialize, Serialize};

use crate::conformance;
use crate::error::Error;
use crate::machine::{Limits, Rates};
use crate::quantity::{bytes, flop_rate, time, times, tokens};
use crate::registry::{Candidate, Entry};
use crate::statistics::{Fit, Spread};
use crate::sweep::{Progress, Watch, doubling};
use crate::table::Table;
use crate::timing::try_seconds;
use crate::workload::{Buffers, Pass, Subject};

/// Entries with their targets: causal forward, as a multiple of product and copy.
const TARGETS: [(&str, f64); 2] = [("kernelized", 1.5), ("shaw-64", 2.5)];
/// Bytes beyond inputs and outputs that such a call may take.
pub const EXTRA_TARGET: usize = 2_000_000;

/// Sizes of the goals, and how much is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GoalSettings {
    /// Heads.
    pub heads: usize,
    /// Numbers in one query, key or value of one head.
    pub head_dim: usize,
    /// Length of the timed calls.
    pub length: usize,
    /// Turns.
    pub rounds: usize,
    /// First length of the growth.
    pub growth_from: usize,
    /// Last length of the growth.
    pub growth_to: usize,
}

impl Default for GoalSettings {
    fn default() -> Self {
        Self { heads: 8, head_dim: 64, length: 4096, rounds: 31, growth_from: 1 << 10, growth_to: 1 << 18 }
    }
}

impl GoalSettings {
    /// The same with no call longer than `length`.
    #[must_use]
    pub fn up_to(self, length: usize) -> Self {
        let growth_from = if length < 4 * self.growth_from { (length / 8).max(1) } else { self.growth_from };
        Self { length: self.length.min(length), growth_from, growth_to: self.growth_to.min(length), ..self }
    }
}

/// One figure against its target.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Goal {
    /// The entry's name; causal, forward.
    pub mechanism: String,
    /// Seconds of a call.
    pub seconds: Spread,
    /// Floating-point operations by the cost model.
    pub flops: f64,
    /// Time over that of the same flops at the machine's best product rate plus the copy.
    pub ratio: f64,
    /// The same at the rate of streaming tiles.
    pub ratio_to_tiles: f64,
    /// What `ratio` shall be at most.
    pub target: f64,
    /// Bytes beyond inputs and outputs.
    pub extra_bytes: usize,
}

impl Goal {
    /// Whether time and memory are within their targets.
    pub fn reached(&self) -> bool {
        self.ratio <= self.target && self.extra_bytes <= EXTRA_TARGET
    }
}

/// One length of a growth.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct GrowthPoint {
    /// Tokens.
    pub length: usize,
    /// Median of a call.
    pub seconds: f64,
    /// Inputs, outputs and all that a call takes beside them.
    pub bytes: usize,
    /// What it takes beside them.
    pub extra_bytes: usize,
}

/// How a causal forward call grows with length.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Growth {
    /// The entry's name.
    pub mechanism: String,
    /// The measured lengths.
    pub points: Vec<GrowthPoint>,
    /// Of seconds; `None` for fewer than three lengths.
    pub time: Option<Fit>,
    /// Of all bytes.
    pub memory: Option<Fit>,
}

/// All goals with what they were measured by.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Goals {
    /// Sizes.
    pub settings: GoalSettings,
    /// Threads.
    pub threads: usize,
    /// The machine's products and copy.
    pub rates: Rates,
    /// Against targets.
    pub goals: Vec<Goal>,
    /// How they grow.
    pub growths: Vec<Growth>,
}

impl Goals {
    /// The sizes of the timed calls.
    pub(crate) fn sizes(&self) -> String {
        let GoalSettings { heads, head_dim, length, .. } = self.settings;
        format!("B=1 H={heads} L={} d={head_dim}, f32, {} threads", tokens(length), self.threads)
    }

    /// What the machine's own products and copies take.
    pub(crate) fn limits(&self) -> String {
        let rates = &self.rates;
        format!(
            "Products: {} in streaming 64³ tiles{}.\nCopy of inputs and outputs: {}, {:.1} GB/s.",
            flop_rate(rates.tiles),
            rates.large.map_or_else(String::new, |large| format!(", {} in one of 1024³", flop_rate(large))),
            time(rates.copy_seconds),
            rates.copy / 1e9
        )
    }

    /// Each figure against its target.
    pub(crate) fn table(&self) -> Table {
        let rows = self.goals.iter().map(|goal| {
            vec![
                goal.mechanism.clone(),
                time(goal.seconds.median),
                format!("{:.3}", goal.flops / 1e9),
                format!("{:.2}, goal {:.1}", goal.ratio, goal.target),
                format!("{:.2}", goal.ratio_to_tiles),
                format!("{}, goal {}", bytes(goal.extra_bytes as f64), bytes(EXTRA_TARGET as f64)),
                if goal.reached() { "reached" } else { "missed" }.to_owned(),
            ]
        });
        let head = ["", "time", "GFLOP", "× roofline", "× roofline of tiles", "extra memory", ""];
        Table::new(1, &head, rows)
    }

    /// How time and memory grow: as a power of the length and as a line.
    pub(crate) fn fits(&self) -> Table {
        let rows = self.growths.iter().flat_map(|growth| {
            let range = growth.points.first().zip(growth.points.last());
            let range = range.map_or_else(String::new, |(a, b)| format!("{} – {}", tokens(a.length), tokens(b.length)));
            let fits = [("time", growth.time, time as fn(f64) -> String), ("memory", growth.memory, bytes)];
            fits.into_iter().filter_map(move |(quantity, fit, show)| {
                let fit = fit?;
                let start = if fit.fixed < 0.0 { format!("−{}", show(-fit.fixed)) } else { show(fit.fixed) };
                Some(vec![
                    growth.mechanism.clone(),
                    quantity.to_owned(),
                    range.clone(),
                    format!("L^{:.3}", fit.power),
                    times(fit.power_worst),
                    format!("{start} + {} · L", show(fit.per_token)),
                    format!("{:.0} %", 100.0 * fit.line_worst),
                    format!("{:.4}", fit.r_squared),
                ])
            })
        });
        Table::new(2, &["", "", "tokens", "power", "off by", "line", "off by", "R²"], rows)
    }

    /// For a terminal.
    pub(crate) fn to_text(&self) -> String {
        let names: Vec<&str> = self.growths.iter().map(|growth| growth.mechanism.as_str()).collect();
        let points = self.growths.iter().flat_map(|growth| {
            growth.points.iter().map(|point| {
                vec![
                    growth.mechanism.clone(),
                    tokens(point.length),
                    time(point.seconds),
                    time(point.seconds / point.length as f64),
                    bytes(point.extra_bytes as f64),
                ]
            })
        });
        format!(
            "\ngoals: causal forward, {}, medians of alternating runs\n{}\n{}\
             \ngrowth of {}, causal forward\n{}\n{}",
            self.sizes(),
            self.limits(),
            self.table().to_text(),
            names.join(" and "),
            self.fits().to_text(),
            Table::new(1, &["", "tokens", "time", "a token", "extra memory"], points).to_text()
        )
    }
}

/// A candidate that has passed its check, with its times.
struct Runner<'c> {
    candidate: &'c Candidate,
    target: f64,
    subject: Subject,
    extra_bytes: usize,
    times: Vec<f64>,
}

/// Checks the kernels that have targets, then measures them on the current rayon pool; `None` if asked to stop.
///
/// # Errors
/// For a kernel that is wrong; then nothing has been timed.
pub fn measure(entries: &[Entry], settings: &GoalSettings, watch: Watch<'_>) -> Result<Option<Goals>, Error> {
    let candidates: Vec<(Candidate, f64)> = TARGETS
        .iter()
        .filter_map(|&(name, target)| {
            let entry = entries.iter().find(|entry| entry.name == name)?;
            Some((entry.candidates().into_iter().next()?, target))
        })
        .collect();
    let lengths = doubling(settings.growth_from, settings.growth_to);
    let mut progress =
        Progress { done: 0, total: candidates.len() * (1 + lengths.len()) + settings.rounds, label: String::new() };
    let mut tell = |progress: &mut Progress, label: String| {
        progress.label = label;
        let go_on = watch(progress);
        progress.done += 1;
        go_on
    };
    for (candidate, _) in &candidates {
        if tell(&mut progress, format!("checking {candidate}")).is_break() {
            return Ok(None);
        }
        conformance::verify(candidate, settings.head_dim, Order::Causal)?;
    }

    let dims = Dims::square(1, settings.heads, settings.length, settings.head_dim);
    let mut buffers = Buffers::new(dims, Pass::Forward);
    let mut limits = Limits::new(Buffers::bytes(&dims, Pass::Forward));
    let mut runners = Vec::new();
    for (candidate, target) in &candidates {
        let mut subject = Subject::new(candidate.single(dims.queries), &dims, Pass::Forward);
        let refused = candidate.refused(settings.length);
        let extra_bytes = subject.extra_bytes(&mut buffers, Order::Causal).map_err(refused)?;
        runners.push(Runner { candidate, target: *target, subject, extra_bytes, times: Vec::new() });
    }
    for round in 0..settings.rounds {
        let label = format!("goals at {} tokens, turn {} of {}", settings.length, round + 1, settings.rounds);
        if tell(&mut progress, label).is_break() {
            return Ok(None);
        }
        for runner in &mut runners {
            let time = try_seconds(|| runner.subject.run(&mut buffers, Order::Causal));
            runner.times.push(time.map_err(runner.candidate.refused(settings.length))?);
        }
        limits.measure_all();
    }
    let Some(rates) = limits.rates() else { return Ok(None) };
    let best = rates.large.map_or(rates.tiles, |large| large.max(rates.tiles));
    let mut goals = Vec::new();
    for runner in runners {
        let Some(spread) = Spread::of(&runner.times) else { continue };
        let algorithm = runner.candidate.algorithm;
        let plan = runner.candidate.single(dims.queries).plan(&dims, &Mask::causal()).ok();
        let flops = plan.as_ref().and_then(|plan| plan.of(algorithm)).map_or(0.0, |estimate| estimate.flops);
        let by = |rate: f64| spread.median / (flops / rate + rates.copy_seconds);
        goals.push(Goal {
            mechanism: runner.candidate.name.to_owned(),
            seconds: spread,
            flops,
            ratio: by(best),
            ratio_to_tiles: by(rates.tiles),
            target: runner.target,
            extra_bytes: runner.extra_bytes,
        });
    }
    drop(buffers);

    let mut growths: Vec<Growth> = candidates
        .iter()
        .map(|(candidate, _)| Growth {
            mechanism: candidate.name.to_owned(),
            points: Vec::new(),
            time: None,
            memory: None,
        })
        .collect();
    for &length in &lengths {
        let dims = Dims::square(1, settings.heads, length, settings.head_dim);
        let mut buffers = Buffers::new(dims, Pass::Forward);
        for ((candidate, _), growth) in candidates.iter().zip(&mut growths) {
            if tell(&mut progress, format!("growth of {}, {length} tokens", candidate.name)).is_break() {
                return Ok(None);
            }
            growth.points.push(grown(candidate, &mut buffers).map_err(candidate.refused(length))?);
        }
    }
    for growth in &mut growths {
        let curve = |quantity: fn(&GrowthPoint) -> f64| -> Vec<(f64, f64)> {
            growth.points.iter().map(|point| (point.length as f64, quantity(point))).collect()
        };
        growth.time = Fit::of(&curve(|point| point.seconds));
        growth.memory = Fit::of(&curve(|point| point.bytes as f64));
    }
    progress.label = "done".to_owned();
    let _ = watch(&progress);
    Ok(Some(Goals { settings: *settings, threads: rayon::current_num_threads(), rates, goals, growths }))
}

fn grown(candidate: &Candidate, buffers: &mut Buffers) -> Result<GrowthPoint, longspan_kernels::Error> {
    let dims = buffers.dims;
    let mut subject = Subject::new(candidate.single(dims.queries), &dims, Pass::Forward);
    let extra_bytes = subject.extra_bytes(buffers, Order::Causal)?;
    // As much work at each length, but three calls at least.
    let runs = (1 << 17) / dims.queries.max(1 << 11) + 3;
    let times = (0..runs).map(|_| try_seconds(|| subject.run(buffers, Order::Causal)));
    let times = times.collect::<Result<Vec<f64>, _>>()?;
    Ok(GrowthPoint {
        length: dims.queries,
        seconds: Spread::of(&times).map_or(0.0, |spread| spread.median),
        bytes: Buffers::bytes(&dims, Pass::Forward) + extra_bytes,
        extra_bytes,
    })
}

/// Never asks to stop.
pub fn go_on(_: &Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::registry;

    #[test]
    fn goals_are_measured_at_any_size() {
        let settings = GoalSettings { heads: 2, head_dim: 16, rounds: 3, ..GoalSettings::default() }.up_to(128);
        assert_eq!((settings.length, settings.growth_from, settings.growth_to), (128, 16, 128));
        let goals = measure(&registry(), &settings, &mut go_on).unwrap().unwrap();
        assert_eq!(goals.goals.len(), TARGETS.len());
        for goal in &goals.goals {
            assert!(goal.flops > 0.0 && goal.ratio > 0.0 && goal.ratio_to_tiles <= goal.ratio, "{goal:?}");
        }
        for growth in &goals.growths {
            assert_eq!(growth.points.iter().map(|p| p.length).collect::<Vec<_>>(), [16, 32, 64, 128]);
            assert!(growth.time.is_some() && growth.memory.is_some());
        }
    }

    #[test]
    fn the_figures_of_the_issue_are_the_default() {
        let settings = GoalSettings::default().up_to(1 << 18);
        assert_eq!(settings, GoalSettings::default());
        assert_eq!((settings.heads, settings.head_dim, settings.length), (8, 64, 4096));
        assert_eq!((settings.growth_from, settings.growth_to), (1024, 262_144));
    }

    #[test]
    fn a_watcher_can_stop_it() {
        let settings = GoalSettings::default();
        assert_eq!(measure(&registry(), &settings, &mut |_| ControlFlow::Break(())).unwrap(), None);
    }
}
