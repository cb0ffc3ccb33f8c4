//! Settings as they are given. Sources from weakest to strongest: defaults, `--config`, `--set`, flags.

use std::path::Path;

use anyhow::{Result, anyhow, bail};
use serde_json::{Map, Value};

use super::columns::Columns;
use super::config::{RunConfig, TaskKind};
use super::keys::{self, KEYS};
use super::words::{nearest, plain};

struct Given {
    key: &'static str,
    value: Value,
    /// Where it comes from, for errors.
    origin: String,
}

#[derive(Default)]
pub struct Settings(Vec<Given>);

impl Settings {
    /// Sets one key; `origin` names where it comes from in errors.
    pub fn set(&mut self, key: &str, value: Value, origin: &str) -> Result<()> {
        let Some(known) = keys::find(key) else {
            let known = KEYS.map(|key| key.name);
            bail!("{origin}: unknown key `{key}`; {}known are {}", nearest(key, &known), known.join(", "));
        };
        self.0.push(Given { key: known.name, value, origin: origin.into() });
        Ok(())
    }

    pub fn name_columns(&mut self, columns: &Columns) -> Result<()> {
        if *columns == Columns::default() {
            return Ok(());
        }
        self.set("columns", serde_json::to_value(columns)?, "--time, --id and their like")
    }

    pub fn gives(&self, keys: &[&str]) -> bool {
        self.0.iter().any(|given| keys.contains(&given.key))
    }

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
        let table = format!("value = {value}").parse::<toml::Table>();
        let value = match table.ok().and_then(|mut table| table.remove("value")) {
            Some(toml::Value::Float(number)) if !number.is_finite() => {
                bail!("--set {key}={value}: expected a finite number")
            }
            // A name, as all texts that look like a date are here.
            Some(toml::Value::Datetime(_)) | None => Value::String(value.to_string()),
            Some(value) => serde_json::to_value(value)?,
        };
        self.set(key, value, "--set")
    }

    pub fn resolve(&self) -> Result<RunConfig> {
        let mut values = keys::defaults();
        self.0.iter().for_each(|given| given.put(&mut values));
        let kind = TaskKind::of(&values)?;
        self.over(kind, kind.defaults(&values))
    }

    /// The settings of a run that exists, of which only those that `may` may change.
    pub fn change(&self, stored: &RunConfig, may: impl Fn(&str) -> Result<()>) -> Result<RunConfig> {
        let before = stored.to_map()?;
        let config = self.over(stored.kind(), before.clone())?;
        let after = config.to_map()?;
        before.keys().filter(|key| before[*key] != after[*key]).try_for_each(|key| may(key))?;
        Ok(config)
    }

    /// What is given over these values.
    fn over(&self, kind: TaskKind, mut values: Map<String, Value>) -> Result<RunConfig> {
        // First what has no default.
        let (first, rest): (Vec<_>, Vec<_>) =
            self.0.iter().partition(|given| ["forecast", "synthetic"].contains(&given.key));
        for given in first.into_iter().chain(rest) {
            given.check_use(kind)?;
            given.put(&mut values);
            if let Err(error) = RunConfig::of(kind, &values) {
                let Given { key, value, origin } = given;
                bail!(
                    "{origin}: `{key}` = {value}: {}; see the table of keys in `longspan train --help`",
                    plain(&error)
                );
            }
        }
        let config = RunConfig::of(kind, &values)?;
        config.check()?;
        Ok(config)
    }
}

impl Given {
    fn put(&self, values: &mut Map<String, Value>) {
        match (values.get_mut(self.key), &self.value) {
            (Some(Value::Object(old)), Value::Object(new)) if self.key == "columns" => old.extend(new.clone()),
            _ => drop(values.insert(self.key.into(), self.value.clone())),
        }
    }

    /// Refuses a key that a run of this kind does not have.
    fn check_use(&self, kind: TaskKind) -> Result<()> {
        let has = |task: TaskKind| task.keys().map(|keys| keys.iter().any(|key| key == self.key));
        if has(kind)? {
            return Ok(());
        }
        let others: Vec<&str> =
            TaskKind::ALL.into_iter().filter(|task| has(*task).unwrap_or(false)).map(TaskKind::flag).collect();
        bail!(
            "{}: `{}` is not used by {}; it belongs to {}: leave it out",
            self.origin,
            self.key,
            kind.flag(),
            others.join(", ")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::config::Optimizer;

    /// Settings given one after the other, in a run of pairs where none names another task.
    fn given(assignments: &[&str]) -> Result<RunConfig> {
        let mut settings = Settings::default();
        assignments.iter().try_for_each(|one| settings.set_text(one))?;
        settings.resolve()
    }

    #[test]
    fn every_task_has_its_settings_and_the_table_has_all() {
        let mut all: Vec<String> = TaskKind::ALL.iter().flat_map(|kind| kind.keys().unwrap()).collect();
        all.sort_unstable();
        all.dedup();
        let mut known = KEYS.map(|key| key.name);
        known.sort_unstable();
        assert_eq!(all, known);
    }

    #[test]
    fn a_file_whose_name_is_a_date_is_a_file() {
        let RunConfig::Pairs(config) = given(&["pairs=2024-01-31", "clip_norm=2"]).unwrap() else { panic!() };
        assert_eq!(config.data, [Path::new("2024-01-31")]);
        assert_eq!(config.training.clip_norm, 2.0, "a whole number serves where a fraction is wanted");
    }

    #[test]
    fn senseless_values_are_named() {
        for (assignment, part) in [
            ("batch_size=0", "batch_size = 0"),
            ("radius=100000000000", "radius = 100000000000: expected at most"),
            ("workers=0", "workers = 0"),
            ("learning_rate=-1.0", "learning_rate = -1"),
            ("clip_norm=nan", "--set clip_norm=nan: expected a finite number"),
            ("text=novel.txt", "expected a list such as [\"novel.txt\"]"),
            ("minutes=0.0", "minutes = 0"),
        ] {
            let error = given(&[assignment]).unwrap_err().to_string();
            assert!(error.contains(part), "{assignment}: {error}");
        }
    }

    #[test]
    fn runs_of_earlier_versions_have_keys_of_all_tasks_and_lack_some() {
        let mut stored = keys::defaults();
        stored.extend([("steps".into(), 3.into()), ("pooling".into(), "nonsense".into())]);
        stored.remove("split_version");
        stored.remove("optimizer");
        let RunConfig::Pairs(config) = RunConfig::parse(Path::new("c"), &serde_json::to_vec(&stored).unwrap()).unwrap()
        else {
            panic!("another task");
        };
        assert_eq!((config.task.files.split_version, config.training.steps), (1, Some(3)));
        assert_eq!(config.training.optimizer, Optimizer::AdamW);
        stored.insert("magic".into(), Value::Null);
        let error = RunConfig::parse(Path::new("c"), &serde_json::to_vec(&stored).unwrap()).unwrap_err().to_string();
        assert!(error.contains("c: unknown field `magic`"), "{error}");
    }
}
