//! The folder of a run: its files, how it appears, and the lock that keeps a second process out.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::config::{Config, RunConfig, TaskKind, TaskSettings, compresses};
use super::keys::{self, KEYS, Key};
use super::seal::{self, LOG};
use super::write::{help, write_atomic};

/// A folder that holds a run, or is about to.
#[derive(Debug, Clone)]
pub struct RunFolder {
    path: PathBuf,
    /// Whether its files are compared with its seal.
    sealed: bool,
}

/// The weights, and weights with optimiser and progress.
pub const MODEL: &str = "model.safetensors";
pub const CHECKPOINT: &str = "checkpoint.safetensors";
pub const CONFIG: &str = "config.json";

/// The loss curve; beside it is a `.png`.
pub const CURVE: &str = "loss.svg";

/// The file of a tokenizer; `side` is what it reads, such as `source`.
pub fn tokenizer(side: &str) -> String {
    format!("{side}_tokenizer.json")
}

pub const LOCK: &str = ".lock";

/// Keeps other processes from training in the same folder. The system releases it when the process ends.
pub type Lock = File;

impl RunFolder {
    /// The folder at a path, whatever it holds; `sealed` if its files are compared with its seal.
    pub fn at(path: &Path, sealed: bool) -> Self {
        Self { path: path.to_path_buf(), sealed }
    }

    /// An existing run. Its files are compared with its seal as they are read.
    pub fn open(path: &Path) -> Result<Self> {
        Ok(Self { sealed: true, ..Self::open_changed(path)? })
    }

    /// An existing run, some files of which a person may have changed.
    pub fn open_changed(path: &Path) -> Result<Self> {
        let name = path.display();
        match fs::metadata(path) {
            Err(error) => bail!("cannot open the run folder {name}: {error}; check the name, or train one with --out"),
            Ok(data) if !data.is_dir() => bail!("{name} is not a folder; give the folder that `longspan train` made"),
            Ok(_) => {}
        }
        let folder = Self::at(path, false);
        if !folder.file(CONFIG).exists() {
            bail!("{name} is not a run folder: it has no config.json; give the folder that `longspan train` made");
        }
        Ok(folder)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        write_atomic(&self.file(name), bytes)
    }

    /// That a file holds something else than a run writes into it.
    pub fn damaged(&self, name: &str, what: &str) -> anyhow::Error {
        anyhow!("{}: {what}; the file is damaged: restore it or train again", self.file(name).display())
    }

    /// Reads all settings, once they and the tokenizers are what the seal says.
    pub fn load_config(&self) -> Result<RunConfig> {
        self.verify(|name| ![MODEL, CHECKPOINT, LOG].contains(&name))?;
        RunConfig::parse(&self.file(CONFIG), &self.read(CONFIG)?)
    }

    pub fn save_config<S: TaskSettings>(&self, config: &Config<S>) -> Result<()> {
        self.replace(&[(CONFIG, stored(config)?.as_bytes())])
    }

    /// The bytes of a file, which are those that the seal allows.
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        let sealed = if self.sealed { seal::verify(&self.path, |file| file == name)? } else { None };
        // The seal lists what training wrote; another program may have added a file.
        sealed.map_or_else(|| seal::read(&self.path.join(name)), Ok)
    }

    pub fn verify(&self, wanted: impl Fn(&str) -> bool) -> Result<()> {
        if self.sealed { seal::verify(&self.path, wanted).map(drop) } else { Ok(()) }
    }

    /// What was measured up to the last checkpoint: the sealed lines of the log.
    pub fn sealed_metrics(&self) -> Result<String> {
        let bytes = if self.sealed {
            seal::verify(&self.path, |name| name == LOG)?.unwrap_or_default()
        } else {
            // A person may have removed it: nothing but the curves depends on it.
            fs::read(self.file(LOG)).unwrap_or_default()
        };
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    pub fn replace(&self, files: &[(&str, &[u8])]) -> Result<()> {
        seal::replace(&self.path, files)
    }

    pub fn lock(&self) -> Result<Lock> {
        let name = self.path.display();
        let failed = |error| anyhow!("cannot write to the run folder {name}: {error}; {}", help(&error));
        self.try_lock().map_err(failed)?.ok_or_else(|| {
            anyhow!("another process is training in {name}; wait for it, or choose another folder with --out")
        })
    }

    /// As [`lock`](Self::lock); `None` if another process has it.
    pub fn try_lock(&self) -> io::Result<Option<Lock>> {
        let file = File::options().create(true).truncate(false).write(true).open(self.path.join(LOCK))?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => Ok(None),
            // Some network file systems have no locks; training alone there is safe.
            Ok(()) | Err(TryLockError::Error(_)) => Ok(Some(file)),
        }
    }
}

/// What `config.json` holds. Its first two keys let Hugging Face's transformers know the model, which the Python package has for
/// every kind of data but series and what is compressed.
fn stored<S: TaskSettings>(config: &Config<S>) -> Result<String> {
    let model = match S::KIND {
        TaskKind::Series | TaskKind::Forecast => None,
        // It answers with what a simple method gives beside it, which the Python package does not have.
        _ if config.common().base => None,
        TaskKind::Synthetic if config.common().drawn.is_some_and(compresses) => None,
        TaskKind::Labelled => Some("LongspanForSequenceClassification"),
        TaskKind::Pairs => Some("LongspanForSeq2SeqLM"),
        _ => Some("LongspanForCausalLM"),
    };
    let own = config.to_map()?;
    let names = model.map(|model| [("model_type", "longspan".into()), ("architectures", json!([model]))]);
    // The Python package reads the keys of other tasks too.
    let others = keys::defaults();
    let value = |key: &Key| (key.name, own.get(key.name).or(others.get(key.name)).cloned().unwrap_or_default());
    let all = Ordered(names.into_iter().flatten().chain(KEYS.iter().map(value)).collect());
    Ok(format!("{}\n", serde_json::to_string_pretty(&all)?))
}

/// A table whose keys keep their order.
struct Ordered(Vec<(&'static str, Value)>);

impl Serialize for Ordered {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, value)| (key, value)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::config::{LabelledSettings, PairsSettings, SeriesSettings, SyntheticSettings, TextSettings, with};
    use crate::run::settings::Settings;

    fn names_of<S: TaskSettings>(values: Value) -> (Value, Value) {
        let place = tempfile::tempdir().unwrap();
        let folder = RunFolder::at(place.path(), false);
        let mut config = with::<S>(values);
        config.training.steps = Some(1);
        folder.save_config(&config).unwrap();
        assert_eq!(folder.load_config().unwrap().to_map().unwrap(), config.to_map().unwrap());
        let text = fs::read_to_string(folder.file(CONFIG)).unwrap();
        let stored: Value = serde_json::from_str(&text).unwrap();
        // In the order of the table.
        let places: Vec<usize> =
            KEYS.iter().map(|key| text.find(&format!("\n  \"{}\": ", key.name)).unwrap()).collect();
        assert!(places.is_sorted());
        (stored["model_type"].clone(), stored["architectures"][0].clone())
    }

    #[test]
    fn transformers_finds_its_keys_and_the_command_passes_over_them() {
        let named = |name: &str| (Value::from("longspan"), Value::from(name));
        let none = (Value::Null, Value::Null);
        assert_eq!(names_of::<PairsSettings>(json!({})), named("LongspanForSeq2SeqLM"));
        assert_eq!(names_of::<TextSettings>(json!({ "text": ["a.txt"] })), named("LongspanForCausalLM"));
        assert_eq!(names_of::<SyntheticSettings>(json!({ "synthetic": "mqar" })), named("LongspanForCausalLM"));
        let labelled = json!({ "labelled": "a.tsv", "base": false });
        assert_eq!(names_of::<LabelledSettings>(labelled), named("LongspanForSequenceClassification"));
        assert_eq!(names_of::<LabelledSettings>(json!({ "labelled": "a.tsv" })), none);
        assert_eq!(names_of::<SeriesSettings>(json!({ "series": "a.csv" })), none);
        assert_eq!(names_of::<SyntheticSettings>(json!({ "synthetic": "compression:length=8" })), none);
        let error = Settings::default().set_text("model_type=x").unwrap_err().to_string();
        assert!(error.contains("unknown key `model_type`"), "{error}");
    }
}
