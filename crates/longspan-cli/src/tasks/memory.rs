//! How much memory there is, and whether sizes fit it before it is asked for.

use std::fs;

use anyhow::{Result, bail};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor};

use super::workers::Workers;
use crate::run::config::RunConfig;

/// Assumed where the system does not say how much memory is free.
const UNKNOWN_MACHINE: f64 = 64e9;

/// Bytes of a number of a model.
pub const NUMBER: f64 = 4.0;

/// Refuses what needs more memory than there is. `what` begins the error, `help` ends it.
pub fn check(bytes: f64, what: impl FnOnce() -> String, help: &str) -> Result<()> {
    let free = available();
    if bytes <= free {
        return Ok(());
    }
    bail!("{} would take about {} of memory, {} are free; {help}", what(), size(bytes), size(free))
}

/// Refuses a model of so many numbers that the memory has no room for, in training on a device that does. `help` says what to lower.
pub fn check_model(numbers: f64, config: &RunConfig, device: &Device, help: &str) -> Result<()> {
    let copies = if device.is_autodiff() {
        // Weights, two moments, the gradient, that of each worker, and the checkpoint as it is written.
        4 + config.workers.unwrap_or(Workers::usual_count()) + 3
    } else {
        // Weights and the file that they are read from.
        2
    };
    check(numbers * copies as f64 * NUMBER, || format!("a model of {numbers:.0} parameters"), help)
}

/// The numbers of a module's parameters, none of which is made for it.
pub fn numbers(module: &impl Module) -> f64 {
    struct Count(f64);
    impl ModuleVisitor for Count {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0 += param.lazy_shape().iter().map(|&length| length as f64).product::<f64>();
        }
    }
    let mut count = Count(0.0);
    module.visit(&mut count);
    count.0
}

/// Free memory in bytes: of the machine, or of the control group that the process is in where that has less.
pub fn available() -> f64 {
    let read = |path: &str| fs::read_to_string(path).ok();
    let bytes = |path: &str| read(path)?.trim().parse::<f64>().ok();
    let machine = read("/proc/meminfo").and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        Some(1024.0 * line.trim().strip_suffix("kB")?.trim().parse::<f64>().ok()?)
    });
    let group =
        bytes("/sys/fs/cgroup/memory.max").and_then(|most| Some(most - bytes("/sys/fs/cgroup/memory.current")?));
    [machine, group].into_iter().flatten().reduce(f64::min).unwrap_or(UNKNOWN_MACHINE)
}

/// Bytes as `1.5 GB`.
pub fn size(bytes: f64) -> String {
    const UNITS: [&str; 7] = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];
    let step = (bytes.max(1.0).log10() / 3.0).floor().min(6.0);
    let value = bytes / 1000f64.powf(step);
    let decimals = if value >= 100.0 { 0 } else { 1 };
    format!("{value:.decimals$} {}", UNITS[step as usize])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well_and_too_much_is_refused() {
        assert_eq!([size(12.0), size(1.5e9), size(2e11), size(4e21)], ["12.0 B", "1.5 GB", "200 GB", "4000 EB"]);
        assert!(available() > 1e6);
        check(1.0, || unreachable!(), "").unwrap();
        let error = check(1e18, || "this".into(), "lower it").unwrap_err().to_string();
        assert!(
            error.starts_with("this would take about 1.0 EB of memory, ") && error.ends_with("lower it"),
            "{error}"
        );
    }
}
