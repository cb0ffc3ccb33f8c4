//! Where the rates of the cost models come from: a file that `longspan calibrate` wrote, else the kernels' own.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Result, anyhow};
use longspan_bench::calibration::{Calibration, FORMAT};
use longspan_bench::machine::Machine;
use longspan_kernels::Rates;
use serde_json::{Value, json};

use crate::progress::note;

/// Names another file than the usual one; empty, it leaves the built-in rates.
pub const VARIABLE: &str = "LONGSPAN_CALIBRATION";

/// The rates of this process.
#[derive(Debug, Clone, PartialEq)]
pub enum Source {
    /// Those of the kernels.
    BuiltIn,
    /// Those of a file.
    File(PathBuf, Box<Calibration>),
}

static SOURCE: OnceLock<Source> = OnceLock::new();

/// Where the rates of this process come from.
pub fn source() -> &'static Source {
    SOURCE.get_or_init(|| Source::BuiltIn)
}

/// The file that `LONGSPAN_CALIBRATION` names; `None` inside where it is empty, so that no file is wanted.
fn named() -> Option<Option<PathBuf>> {
    std::env::var_os(VARIABLE).map(|path| (!path.is_empty()).then(|| PathBuf::from(path)))
}

/// The usual place, in the user's folder of settings; `None` where the environment does not say where that is.
fn usual(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let folder = |name: &str| variable(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    let settings = folder("XDG_CONFIG_HOME")
        .filter(|path| path.is_absolute())
        .or_else(|| if cfg!(windows) { folder("APPDATA") } else { None })
        .or_else(|| Some(folder("HOME")?.join(".config")))?;
    Some(settings.join("longspan").join("calibration.toml"))
}

/// Where `longspan calibrate` writes to if nothing else is asked for.
pub fn place() -> Option<PathBuf> {
    named().flatten().or_else(|| usual(|name| std::env::var_os(name)))
}

/// Installs the rates of this process. A file that the environment names must be right. In the usual place a wrong one is
/// passed over with a warning: it was nobody's wish for this call.
pub fn load() -> Result<()> {
    let source = match named() {
        Some(None) => Source::BuiltIn,
        Some(Some(path)) => {
            let calibration = read(&path).map_err(|error| {
                anyhow!("{error}; write it with longspan calibrate, or unset {VARIABLE}, which names it")
            })?;
            Source::File(path, Box::new(calibration))
        }
        None => usual(|name| std::env::var_os(name)).map_or(Source::BuiltIn, |path| usual_source(&path)),
    };
    if let Source::File(_, calibration) = &source {
        calibration.rates()?.install()?;
    }
    let _ = SOURCE.set(source);
    Ok(())
}

fn usual_source(path: &Path) -> Source {
    // Most users have none.
    if matches!(fs::symlink_metadata(path), Err(error) if error.kind() == io::ErrorKind::NotFound) {
        return Source::BuiltIn;
    }
    let mend = "built-in rates are used; write it anew with longspan calibrate, or remove it";
    match read(path) {
        Ok(calibration) if calibration.fits(&Machine::here()) => Source::File(path.to_owned(), Box::new(calibration)),
        Ok(calibration) => {
            let Machine { processor, instructions, .. } = &calibration.machine;
            note(format_args!(
                "warning: {}: measured on another machine ({processor}, {instructions}); {mend}",
                path.display()
            ));
            Source::BuiltIn
        }
        Err(error) => {
            note(format!("warning: {error}; {mend}").replace('\n', " "));
            Source::BuiltIn
        }
    }
}

/// Reads a file and checks all that is in it.
fn read(path: &Path) -> Result<Calibration> {
    let text = fs::read_to_string(path).map_err(|error| anyhow!("cannot read {}: {error}", path.display()))?;
    parse(&text).map_err(|error| anyhow!("{}: {error}", path.display()))
}

fn parse(text: &str) -> Result<Calibration> {
    let table: toml::Table =
        text.parse().map_err(|error: toml::de::Error| anyhow!("not a calibration: {}", error.message()))?;
    // The form comes first: with another one all else may be otherwise too.
    match table.get("format").and_then(toml::Value::as_integer) {
        Some(format) if format == i64::from(FORMAT) => {}
        Some(format) => return Err(anyhow!("outdated: format {format}, this program reads {FORMAT}")),
        None => return Err(anyhow!("not a calibration: it does not say its format")),
    }
    let calibration: Calibration =
        table.try_into().map_err(|error: toml::de::Error| anyhow!("not a calibration: {}", error.message()))?;
    calibration.rates()?;
    Ok(calibration)
}

/// A file's contents.
pub fn to_toml(calibration: &Calibration) -> Result<String> {
    Ok(format!(
        "# What the things that attention algorithms do take on this machine; longspan calibrate wrote it, and its commands\n\
         # choose algorithms by it. Remove it to go back to the built-in rates.\n{}",
        toml::to_string(calibration)?
    ))
}

impl Source {
    /// As a phrase.
    pub fn describe(&self) -> String {
        match self {
            Self::BuiltIn => "built-in, not this machine's own; longspan calibrate measures those".to_owned(),
            Self::File(path, calibration) => {
                let Machine { processor, instructions, .. } = &calibration.machine;
                format!("calibrated {} on {processor}, {instructions} ({})", calibration.measured, path.display())
            }
        }
    }

    /// The same for programs.
    pub fn to_json(&self) -> Value {
        match self {
            Self::BuiltIn => json!({ "source": "built-in" }),
            Self::File(path, calibration) => json!({
                "source": "calibrated",
                "file": path.display().to_string(),
                "measured": calibration.measured,
                "version": calibration.version,
                "processor": calibration.machine.processor,
                "instructions": calibration.machine.instructions,
            }),
        }
    }
}

/// The rates in force, as a value of one's own.
pub fn current() -> Rates {
    Rates::current().clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_as_it_was_written() {
        let written = Calibration::new(&Rates::default());
        assert_eq!(parse(&to_toml(&written).unwrap()).unwrap(), written);
    }

    #[test]
    fn broken_outdated_and_foreign_files_say_what_they_are() {
        let text = to_toml(&Calibration::new(&Rates::default())).unwrap();
        let refused = |text: &str| parse(text).expect_err("a broken file").to_string();
        assert!(refused("").contains("does not say its format"));
        assert!(refused("rates = [").contains("not a calibration"));
        assert!(refused(&text.replace("format = 2", "format = 99")).contains("outdated: format 99"));
        assert!(refused(&text.replace("measured =", "tasted =")).contains("tasted"));
        let rate = "\"kernelized.naive.flop\"";
        assert!(text.contains(rate), "{text}");
        assert!(refused(&text.replace(rate, "\"kernelized.naive.coffee\"")).contains("coffee"));
        let without: String =
            text.lines().filter(|line| !line.starts_with(rate)).map(|line| format!("{line}\n")).collect();
        assert!(refused(&without).contains("kernelized.naive.flop"));
        assert!(refused(&format!("{without}{rate} = [1.0, -1.0]\n")).contains("not negative"));
        assert!(refused(&format!("{without}{rate} = 1.0\n")).contains("not a calibration"));
        assert!(refused(&format!("{without}{rate} = [nan, 1.0]\n")).contains("finite"));
    }

    #[test]
    fn the_usual_place_is_where_settings_are() {
        let with = |pairs: &'static [(&'static str, &'static str)]| {
            usual(|name| pairs.iter().find(|pair| pair.0 == name).map(|pair| pair.1.into()))
        };
        let file = |folder: &str| Some(PathBuf::from(folder).join("longspan").join("calibration.toml"));
        if cfg!(unix) {
            assert_eq!(with(&[("XDG_CONFIG_HOME", "/settings"), ("HOME", "/home/me")]), file("/settings"));
            assert_eq!(with(&[("XDG_CONFIG_HOME", ""), ("HOME", "/home/me")]), file("/home/me/.config"));
        }
        assert_eq!(with(&[]), None);
    }
}
