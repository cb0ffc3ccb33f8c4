//! How much memory there is, and whether sizes fit it before it is asked for.

use std::fs;
use std::path::Path;

use anyhow::{Result, bail};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor};

use super::workers::Workers;
use crate::run::config::TrainingSettings;

/// Assumed where the system does not say how much memory is free.
const UNKNOWN_MACHINE: f64 = 64e9;

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
pub fn check_model(numbers: f64, settings: &TrainingSettings, device: &Device, help: &str) -> Result<()> {
    let copies = if device.is_autodiff() {
        // Weights, two moments, the gradient, that of each worker, and the checkpoint as it is written.
        4 + settings.workers.unwrap_or(Workers::usual_count()) + 3
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

/// Free memory in bytes: of the machine, or of a control group that the process is in where that has less.
pub fn available() -> f64 {
    available_below(Path::new("/"))
}

/// As [`available`], from the files of the system below a folder.
fn available_below(root: &Path) -> f64 {
    let read = |path: &str| fs::read_to_string(root.join(path)).ok();
    let machine = read("proc/meminfo").and_then(|text| Some(1024.0 * field(&text, "MemAvailable:")?));
    let groups = read("proc/self/cgroup").unwrap_or_default();
    // `0::/a/b` of version 2, `4:memory:/a/b` of version 1. Within a container the path may be that of the host: then the limits
    // stand at the top.
    let groups = groups.lines().filter_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let version_2 = controllers.is_empty();
        let memory = controllers.split(',').any(|one| one == "memory");
        (version_2 || memory)
            .then(|| (if version_2 { "sys/fs/cgroup" } else { "sys/fs/cgroup/memory" }, path.to_owned()))
    });
    let free = groups.chain([("sys/fs/cgroup", "/".into())]).flat_map(|(top, path)| {
        let [most, used, inactive] = match top {
            "sys/fs/cgroup" => ["memory.max", "memory.current", "inactive_file"],
            _ => ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"],
        };
        // A limit holds for all groups within.
        let free = Path::new(&path).ancestors().filter_map(|group| {
            let folder = format!("{top}/{}", group.strip_prefix("/").unwrap_or(group).display());
            let bytes = |name: &str| read(&format!("{folder}/{name}"))?.trim().parse::<f64>().ok();
            let most = bytes(most)?;
            // Cached files that nobody reads give way.
            let cached = read(&format!("{folder}/memory.stat")).and_then(|text| field(&text, inactive)).unwrap_or(0.0);
            Some((most - bytes(used)? + cached).clamp(0.0, most))
        });
        free.collect::<Vec<_>>()
    });
    machine.into_iter().chain(free).reduce(f64::min).unwrap_or(UNKNOWN_MACHINE)
}

/// The number after a name at the beginning of a line.
fn field(text: &str, name: &str) -> Option<f64> {
    let mut lines = text.lines().map(str::split_whitespace);
    let mut line = lines.find(|line| line.clone().next() == Some(name))?;
    line.nth(1)?.parse().ok()
}

/// Bytes as `1.5 GB`.
pub fn size(bytes: f64) -> String {
    const UNITS: [&str; 7] = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];
    let step = (bytes.max(1.0).log10() / 3.0).floor().min(6.0);
    let value = bytes / 1000f64.powf(step);
    let decimals = if value >= 100.0 || step == 0.0 { 0 } else { 1 };
    format!("{value:.decimals$} {}", UNITS[step as usize])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well_and_too_much_is_refused() {
        assert_eq!([size(12.0), size(1.5e9), size(2e11), size(4e21)], ["12 B", "1.5 GB", "200 GB", "4000 EB"]);
        assert!(available() > 1e6);
        check(1.0, || unreachable!(), "").unwrap();
        let error = check(1e18, || "this".into(), "lower it").unwrap_err().to_string();
        assert!(
            error.starts_with("this would take about 1.0 EB of memory, ") && error.ends_with("lower it"),
            "{error}"
        );
    }

    #[test]
    fn the_least_of_machine_and_control_groups_counts_without_cached_files() {
        let system = |files: &[(&str, &str)]| {
            let place = tempfile::tempdir().unwrap();
            for (name, contents) in files {
                let path = place.path().join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, contents).unwrap();
            }
            available_below(place.path())
        };
        let machine = ("proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable:    8000000 kB\n");
        assert_eq!(system(&[machine]), 8_192_000_000.0);
        assert_eq!(system(&[]), UNKNOWN_MACHINE);
        // In a container, full of files that were read once.
        let full = [
            machine,
            ("proc/self/cgroup", "0::/system.slice/docker-1.scope\n"),
            ("sys/fs/cgroup/memory.max", "2147483648\n"),
            ("sys/fs/cgroup/memory.current", "2147000000\n"),
            ("sys/fs/cgroup/memory.stat", "anon 147000000\nfile 2000000000\nactive_file 0\ninactive_file 2000000000\n"),
        ];
        assert_eq!(system(&full), 2_000_483_648.0);
        // A limit of a slice that the process is within, and none at the top.
        let slice = [
            machine,
            ("proc/self/cgroup", "0::/user.slice/run.scope/inner\n"),
            ("sys/fs/cgroup/user.slice/memory.max", "max\n"),
            ("sys/fs/cgroup/user.slice/memory.current", "5\n"),
            ("sys/fs/cgroup/user.slice/run.scope/memory.max", "1000000\n"),
            ("sys/fs/cgroup/user.slice/run.scope/memory.current", "400000\n"),
        ];
        assert_eq!(system(&slice), 600_000.0);
        let first = [
            machine,
            ("proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/a/b\n"),
            ("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/a/b/memory.usage_in_bytes", "700000\n"),
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1000000\n"),
            ("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "900000\n"),
            ("sys/fs/cgroup/memory/a/memory.stat", "inactive_file 1\ntotal_inactive_file 300000\n"),
        ];
        assert_eq!(system(&first), 400_000.0);
    }
}
