//! Settings as they are gathered. Sources from weakest to strongest: defaults, `--config`, `--set`, flags.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Result, anyhow, bail};
use serde_json::{Map, Value};

use super::config::{RunConfig, TaskKind};
use super::keys::KEYS;
use super::words::{nearest, plain};

/// Settings as they are gathered, one source over the other.
#[derive(Debug, Clone)]
pub struct Settings {
    values: Map<String, Value>,
    /// The keys that a person set, and where.
    given: BTreeMap<String, String>,
}

impl Settings {
    /// The defaults.
    pub fn new() -> Result<Self> {
        Self::of(&RunConfig::default())
    }

    /// The settings of a run.
    pub fn of(config: &RunConfig) -> Result<Self> {
        match serde_json::to_value(config)? {
            Value::Object(values) => Ok(Self { values, given: BTreeMap::new() }),
            other => bail!("settings are {other}, not a table; this is a bug: report it"),
        }
    }

    /// The defaults of the task whose data they name, if it has its own.
    pub fn defaults_of_task(&self) -> Option<RunConfig> {
        let named = |key: &str| self.values.get(key).unwrap_or(&Value::Null);
        if named("text").as_array().is_some_and(|paths| !paths.is_empty()) {
            return Some(RunConfig::of_text());
        }
        if named("synthetic").is_string() {
            return Some(RunConfig::of_synthetic());
        }
        if named("series").is_string() {
            let forecasts = named("forecast").is_number();
            return Some(if forecasts { RunConfig::of_forecast() } else { RunConfig::of_series() });
        }
        if named("labelled").is_string() {
            return Some(RunConfig::of_labelled());
        }
        named("pairs").is_null().then(RunConfig::of_dictionary)
    }

    /// The keys whose values differ from those of `config`.
    pub fn changed(&self, config: &RunConfig) -> Result<Vec<String>> {
        let other = serde_json::to_value(config)?;
        // Not the raw values: `2` and `2.0` are the same number.
        let own = serde_json::to_value(self.build()?)?;
        Ok(self.values.keys().filter(|key| own[*key] != other[*key]).cloned().collect())
    }

    /// Sets one key; `origin` names where it comes from in errors.
    pub fn set(&mut self, key: &str, value: Value, origin: &str) -> Result<()> {
        if !self.values.contains_key(key) {
            let known: Vec<&str> = self.values.keys().map(String::as_str).collect();
            let nearest = nearest(key, &known).map(|name| format!("did you mean `{name}`? ")).unwrap_or_default();
            bail!("{origin}: unknown key `{key}`; {nearest}known are {}", known.join(", "));
        }
        let old = self.values.insert(key.to_string(), value.clone());
        if let Err(error) = self.build() {
            if let Some(old) = old {
                self.values.insert(key.to_string(), old);
            }
            bail!("{origin}: `{key}` = {value}: {}; see the table of keys in `longspan train --help`", plain(&error));
        }
        self.given.insert(key.to_string(), origin.to_string());
        Ok(())
    }

    /// Sets those entries of a table that `values` has.
    pub fn merge(&mut self, key: &str, values: &Value, origin: &str) -> Result<()> {
        let Some(values) = values.as_object().filter(|values| !values.is_empty()) else { return Ok(()) };
        let mut table = self.values.get(key).and_then(Value::as_object).cloned().unwrap_or_default();
        table.extend(values.clone());
        self.set(key, Value::Object(table), origin)
    }

    /// Whether a person set one of these keys.
    pub fn gives(&self, keys: &[&str]) -> bool {
        keys.iter().any(|key| self.given.contains_key(*key))
    }

    /// Takes all keys of a TOML file.
    pub fn read_file(&mut self, path: &Path) -> Result<()> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|error| anyhow!("cannot read {name}: {error}; check the name, and that it is UTF-8 text"))?;
        let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
            let at = error.span().map_or(0, |span| span.start.min(text.len()));
            let line = text.as_bytes()[..at].iter().filter(|&&byte| byte == b'\n').count() + 1;
            anyhow!("{name}, line {line}: {}; write lines such as `steps = 500`", error.message().replace('\n', " "))
        })?;
        for (key, value) in table {
            self.set(&key, serde_json::to_value(value)?, &name)?;
        }
        Ok(())
    }

    /// Takes one `key=value`; the value is read as TOML, and as text where it is none.
    pub fn set_text(&mut self, assignment: &str) -> Result<()> {
        let Some((key, value)) = assignment.split_once('=') else {
            bail!("--set {assignment}: no `=` in it; write --set key=value");
        };
        let (key, value) = (key.trim(), value.trim());
        let value = match format!("value = {value}").parse::<toml::Table>() {
            Ok(mut table) => match table.remove("value") {
                Some(toml::Value::Float(number)) if !number.is_finite() => {
                    bail!("--set {key}={value}: expected a finite number")
                }
                // A name, as all texts that look like a date are here.
                Some(toml::Value::Datetime(_)) => Value::String(value.to_string()),
                Some(value) => serde_json::to_value(value)?,
                None => Value::String(value.to_string()),
            },
            Err(_) => Value::String(value.to_string()),
        };
        self.set(key, value, "--set")
    }

    /// Refuses a key that a person set and that a run of this kind does not use.
    pub fn check_use(&self, kind: TaskKind) -> Result<()> {
        for (key, tasks, _) in KEYS {
            if let Some(origin) = self.given.get(key).filter(|_| !tasks.contains(&kind)) {
                let others: Vec<&str> = tasks.iter().map(|task| task.flag()).collect();
                bail!(
                    "{origin}: `{key}` is not used by {}; it belongs to {}: leave it out",
                    kind.flag(),
                    others.join(", ")
                );
            }
        }
        Ok(())
    }

    fn build(&self) -> Result<RunConfig, serde_json::Error> {
        serde_json::from_value(Value::Object(self.values.clone()))
    }

    /// The settings, checked against each other.
    pub fn finish(&self) -> Result<RunConfig> {
        let config = self.build()?;
        config.check()?;
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_sources_win_and_types_are_checked() {
        let mut settings = Settings::new().unwrap();
        settings.set_text("steps=7").unwrap();
        settings.set_text("attention = kernelized").unwrap();
        settings.set_text("learning_rate=1e-4").unwrap();
        settings.set_text("steps=8").unwrap();
        let config = settings.finish().unwrap();
        assert_eq!((config.steps, config.attention.as_str(), config.learning_rate), (Some(8), "kernelized", 1e-4));
        let error = settings.set_text("steps=many").unwrap_err().to_string();
        assert!(error.contains("`steps` = \"many\""), "{error}");
        assert_eq!(settings.finish().unwrap().steps, Some(8), "a refused value leaves the old one");
    }

    #[test]
    fn every_key_is_explained() {
        let settings = Settings::new().unwrap();
        let mut known: Vec<&str> = settings.values.keys().map(String::as_str).collect();
        let mut explained: Vec<&str> = KEYS.iter().map(|(key, _, _)| *key).collect();
        known.sort_unstable();
        explained.sort_unstable();
        assert_eq!(explained, known);
    }

    #[test]
    fn a_file_whose_name_is_a_date_is_a_file() {
        let mut settings = Settings::new().unwrap();
        settings.set_text("pairs=2024-01-31").unwrap();
        assert_eq!(settings.finish().unwrap().pairs.unwrap(), Path::new("2024-01-31"));
    }

    #[test]
    fn keys_that_a_task_does_not_use_are_refused() {
        for (kind, assignment, others) in [
            (TaskKind::Pairs, "pooling=nonsense", "--labelled, --series"),
            (TaskKind::Pairs, "segment=3", "--text"),
            (TaskKind::Text, "source_tokens=bytes", "--pairs"),
            (TaskKind::Labelled, "vocabulary=300", "--text"),
            (TaskKind::Series, "context=3", "--series with --forecast"),
            (TaskKind::Forecast, "label_smoothing=0.1", "--pairs, --text, --labelled, --series, --synthetic"),
            (TaskKind::Synthetic, "missing=refuse", "--series, --series with --forecast"),
        ] {
            let mut settings = Settings::new().unwrap();
            settings.set_text(assignment).unwrap();
            let error = settings.check_use(kind).unwrap_err().to_string();
            let key = assignment.split('=').next().unwrap();
            let expected =
                format!("--set: `{key}` is not used by {}; it belongs to {others}: leave it out", kind.flag());
            assert_eq!(error, expected);
        }
        let mut settings = Settings::new().unwrap();
        settings.set_text("steps=3").unwrap();
        settings.check_use(TaskKind::Forecast).unwrap();
    }

    #[test]
    fn a_whole_number_serves_where_a_fraction_is_wanted() {
        let mut settings = Settings::new().unwrap();
        settings.set_text("clip_norm=2").unwrap();
        settings.set_text("minutes=3").unwrap();
        assert_eq!(settings.finish().unwrap().minutes, Some(3.0));
    }

    #[test]
    fn senseless_values_are_named() {
        for (assignment, part) in [
            ("heads=3", "not a multiple of heads = 3"),
            ("dropout=1.0", "dropout = 1"),
            ("batch_size=0", "batch_size = 0"),
            ("steps=0", "steps = 0"),
            ("radius=100000000000", "radius = 100000000000: expected at most"),
            ("workers=100000", "workers = 100000: expected 1 to 1024"),
            ("workers=0", "workers = 0"),
            ("learning_rate=-1.0", "learning_rate = -1"),
            ("clip_norm=nan", "--set clip_norm=nan: expected a finite number"),
            ("text=novel.txt", "expected a list such as [\"novel.txt\"]"),
            ("minutes=0.0", "minutes = 0"),
        ] {
            let mut settings = Settings::new().unwrap();
            let result = settings.set_text(assignment).and_then(|()| settings.finish().map(drop));
            let error = result.unwrap_err().to_string();
            assert!(error.contains(part), "{assignment}: {error}");
        }
    }
}
