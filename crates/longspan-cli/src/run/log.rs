//! `metrics.jsonl`: a line for every step and every measurement, and the curves that are drawn from it.

use std::fs::{self, File};
use std::io::Write;

use anyhow::Result;
use serde_json::{Value, json};

use super::folder::{CURVE, RunFolder};
use super::seal::LOG;
use super::write::{cannot_write, write_pictures};
use crate::terminal::plot::{LossCurve, Point};

pub struct MetricsLog {
    folder: RunFolder,
    file: File,
    pub training: Vec<Point>,
    pub development: Vec<Point>,
}

impl MetricsLog {
    /// Opens the log at a checkpoint: lines beyond `step` and a line cut short are removed.
    pub fn open(folder: &RunFolder, step: usize) -> Result<Self> {
        let path = folder.file(LOG);
        // A damaged line beyond the checkpoint is dropped with the others there.
        let text = String::from_utf8_lossy(&fs::read(&path).unwrap_or_default()).into_owned();
        let lines: Vec<(&str, Value)> = text
            .lines()
            .filter_map(|line| Some((line, serde_json::from_str::<Value>(line).ok()?)))
            .filter(|(_, value)| value["step"].as_u64().is_some_and(|at| at <= step as u64))
            .collect();
        let kept: String = lines.iter().flat_map(|(line, _)| [line, "\n"]).collect();
        if kept != text {
            folder.replace(&[(LOG, kept.as_bytes())])?;
        }
        let curve = |key: &str| {
            let point = |value: &Value| Some((value["step"].as_f64()?, value[key].as_f64()?));
            lines.iter().filter_map(|(_, value)| point(value)).collect()
        };
        let file = File::options().create(true).append(true).open(&path).map_err(|error| cannot_write(&path, error))?;
        Ok(Self { folder: folder.clone(), file, training: curve("loss"), development: curve("development_loss") })
    }

    pub fn write(&mut self, value: &Value) -> Result<()> {
        let line = format!("{value}\n");
        self.file.write_all(line.as_bytes()).map_err(|error| cannot_write(&self.folder.file(LOG), error))
    }

    pub fn step(&mut self, step: usize, loss: f64, learning_rate: f64, gradient_norm: f64, seconds: f64) -> Result<()> {
        self.training.push((step as f64, loss));
        self.write(&json!({
            "step": step, "loss": loss, "learning_rate": learning_rate, "gradient_norm": gradient_norm,
            "seconds": (seconds * 1e3).round() / 1e3,
        }))
    }

    pub fn development(&mut self, step: usize, loss: f64) -> Result<()> {
        self.development.push((step as f64, loss));
        self.write(&json!({ "step": step, "development_loss": loss }))
    }

    pub fn draw(&self, title: &str, measure: &str) -> Result<()> {
        let curve = LossCurve { training: &self.training, development: &self.development, title, measure };
        write_pictures(&self.folder.file(CURVE), &curve)
    }
}
