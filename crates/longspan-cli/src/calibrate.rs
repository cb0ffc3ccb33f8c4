//! `longspan calibrate`: measures what the cost models choose algorithms by.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use longspan_bench::calibration::{self, Calibration, Judgement, Settings};
use longspan_bench::registry::calibrated;
use serde_json::json;

use crate::Outcome;
use crate::bench::watched;
use crate::progress::note;
use crate::rates;
use crate::run::write_atomic;

/// How much is measured, and where the rates go.
#[derive(Args)]
pub struct Arguments {
    /// The file to write; the one that LONGSPAN_CALIBRATION names, else longspan/calibration.toml in your settings' folder
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// About how long to measure, in seconds; longer on a busy machine
    #[arg(long, default_value_t = 60.0)]
    seconds: f64,
    /// Lengths to measure, separated by commas; 11 from 4 to 3072 if not given
    #[arg(long, value_delimiter = ',', value_name = "TOKENS")]
    lengths: Vec<usize>,
    /// Widths of a head to measure, separated by commas; 16, 64 and 128 if not given
    #[arg(long, value_delimiter = ',', value_name = "NUMBERS")]
    widths: Vec<usize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Measures, fits, shows and writes.
pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let settings = settings(arguments)?;
    let Some(path) = arguments.out.clone().or_else(rates::place) else {
        bail!("neither HOME nor XDG_CONFIG_HOME says where settings are; name the file with --out")
    };
    // Before minutes of measuring, not after.
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        fs::create_dir_all(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
    }
    if path.is_dir() {
        bail!("--out {}: that is a folder; name a file in it", path.display());
    }
    let entries = calibrated();
    // One thread: its own processor time can be told from all else that the machine does.
    let Some(points) = watched(1, |watch| Ok(calibration::measure(&entries, &settings, watch)?))? else {
        note(format_args!("interrupted: {} is as it was", path.display()));
        return Ok(Outcome::Interrupted);
    };
    let before = rates::current();
    let after = calibration::fit(&points, &before);
    let judged = [calibration::judge(&points, &before), calibration::judge(&points, &after)];
    let found = Calibration::new(&after);
    let better = near(&judged[1]) >= near(&judged[0]) * KEPT;
    let mut out = std::io::stdout().lock();
    if arguments.json {
        let [before, after] = &judged;
        writeln!(out, "{}", json!({ "before": before, "after": after, "written": better, "calibration": found }))?;
    } else {
        writeln!(out, "before: rates {}\n", rates::source().describe())?;
        write!(out, "{}", calibration::to_text(&judged[0], &judged[1]))?;
    }
    if !better {
        note(format_args!(
            "warning: by these rates fewer choices are right than before; {} is as it was; measure again on a quieter machine",
            path.display()
        ));
        return Ok(Outcome::Done);
    }
    write(&path, &found)?;
    note(format_args!("rates: {}", path.display()));
    if rates::place().as_ref() != Some(&path) {
        note(format_args!("to use them: {}={}", rates::VARIABLE, path.display()));
    }
    Ok(Outcome::Done)
}

/// Of as many right choices as before, so many must be left: the times of a busy machine are not to replace better ones.
const KEPT: f64 = 0.9;

/// Choices, for forward calls and for those with a backward, that are within a tenth of the best.
fn near(judgements: &[Judgement]) -> f64 {
    let choices = judgements.iter().flat_map(|judgement| [judgement.forward, judgement.both]).flatten();
    choices.map(|choices| choices.within_a_tenth as f64).sum()
}

fn settings(arguments: &Arguments) -> Result<Settings> {
    let usual = Settings::default();
    if !(arguments.seconds.is_finite() && arguments.seconds > 0.0) {
        bail!("--seconds {}: expected a positive time", arguments.seconds);
    }
    for (flag, sizes) in [("--lengths", &arguments.lengths), ("--widths", &arguments.widths)] {
        if sizes.contains(&0) {
            bail!("{flag} 0: expected at least 1");
        }
    }
    let or = |given: &Vec<usize>, usual: Vec<usize>| if given.is_empty() { usual } else { given.clone() };
    Ok(Settings {
        lengths: or(&arguments.lengths, usual.lengths),
        widths: or(&arguments.widths, usual.widths),
        seconds: arguments.seconds,
        ..usual
    })
}

fn write(path: &Path, found: &Calibration) -> Result<()> {
    let text = rates::to_toml(found)?;
    write_atomic(path, text.as_bytes()).map_err(|error| anyhow!("{error:#}"))
}
