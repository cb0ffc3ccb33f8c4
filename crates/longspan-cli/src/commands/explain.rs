//! `longspan explain`: the cost model's answer for attention of given sizes.

use std::io::Write;

use anyhow::{Result, bail};
use burn::tensor::Device;
use clap::Args;
use longspan_kernels::{Algorithm, Dims, Estimate, FeatureMap, Kernel, Mask, Plan, Purpose};
use serde_json::{Map, Value, json};

use super::Outcome;
use crate::tasks::attention;

/// Sizes of the attention to explain.
#[derive(Args)]
pub struct Arguments {
    /// Query tokens
    #[arg(long, default_value_t = 4096)]
    length: usize,
    /// Key tokens; as many as queries if not given
    #[arg(long)]
    keys: Option<usize>,
    /// Independent sequences
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Attention heads
    #[arg(long, default_value_t = 8)]
    heads: usize,
    /// Numbers in one query or key of one head
    #[arg(long, default_value_t = 64)]
    head_dim: usize,
    /// Numbers in one value of one head; head_dim if not given
    #[arg(long)]
    value_dim: Option<usize>,
    #[arg(long, value_name = "NAME", help = format!("The mechanism: {}; kernelized by default, shaw with a radius", attention::names()))]
    attention: Option<String>,
    /// Options of the mechanism, such as relative={shared=true}
    #[arg(long, value_name = "OPTIONS")]
    options: Option<String>,
    /// How far Shaw's relative positions reach
    #[arg(long)]
    radius: Option<usize>,
    /// Every query sees only the keys up to its own place
    #[arg(long)]
    causal: bool,
    #[arg(long, help = format!("For mechanisms that have one: {}", FeatureMap::ALL.map(FeatureMap::name).join(", ")))]
    feature_map: Option<String>,
    #[arg(long, default_value = "auto", help = format!("To force one that the mechanism has: {}", Algorithm::ALL.map(Algorithm::name).join(", ")))]
    algorithm: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Prints the plan.
pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let keys = arguments.keys.unwrap_or(arguments.length);
    let dims = Dims {
        batch: arguments.batch,
        heads: arguments.heads,
        kv_heads: arguments.heads,
        queries: arguments.length,
        keys,
        head_dim: arguments.head_dim,
        value_dim: arguments.value_dim.unwrap_or(arguments.head_dim),
    };
    let sizes = [("--batch", dims.batch), ("--heads", dims.heads), ("--head-dim", dims.head_dim)];
    if let Some((flag, _)) = sizes.iter().find(|(_, size)| *size == 0) {
        bail!("{flag} 0: expected at least 1");
    }
    let name = arguments.attention.as_deref();
    let name = name.unwrap_or(if arguments.radius.is_some() { "shaw" } else { "kernelized" });
    let algorithm: Algorithm = arguments.algorithm.parse()?;
    let options = arguments.options.as_deref().map_or(Ok(Map::new()), attention::options)?;
    let mut flags: Vec<(&str, &[&str], Value)> = Vec::new();
    if let Some(map) = &arguments.feature_map {
        flags.push((
            "--feature-map",
            &["/kernel/feature_map", "/feature_map"],
            json!(map.parse::<FeatureMap>()?.to_string()),
        ));
    }
    if let Some(radius) = arguments.radius {
        flags.push(("--radius", &["/relative/radius"], json!(radius)));
    }
    if algorithm != Algorithm::Auto {
        flags.push(("--algorithm", &["/kernel/algorithm", "/algorithm"], json!(algorithm.name())));
    }
    let defaults = serde_json::to_value(attention::named(name, &[], &Map::new())?)?;
    let mut everywhere = Vec::new();
    for (flag, paths, value) in flags {
        let Some(path) = paths.iter().find(|path| defaults.pointer(path).is_some()) else {
            bail!("{flag}: {name} has no such option; leave it out, or choose another mechanism with --attention");
        };
        everywhere.push((*path, value));
    }
    let config = attention::named(name, &everywhere, &options)?;
    let kernel = config.init(dims.heads, dims.heads, dims.head_dim, &Device::flex())?.kernel();
    let kernel: &dyn Kernel<f32> = &*kernel;
    if algorithm != Algorithm::Auto && !kernel.algorithms().contains(&algorithm) {
        let known: Vec<&str> = kernel.algorithms().iter().map(|algorithm| algorithm.name()).collect();
        bail!("--algorithm {algorithm}: {name} has only {}; leave it out to take the fastest", known.join(", "));
    }
    let mask = if arguments.causal { Mask::causal() } else { Mask::bidirectional() };
    let plan = kernel.plan(&dims, &mask)?;
    let options = serde_json::to_value(&config)?;
    let mut out = std::io::stdout().lock();
    if arguments.json {
        writeln!(out, "{}", as_json(arguments, &options, &dims, &plan))?;
    } else {
        write!(out, "{}", as_table(arguments, &options, &dims, &plan))?;
    }
    Ok(Outcome::Done)
}

fn as_json(arguments: &Arguments, options: &Value, dims: &Dims, plan: &Plan) -> serde_json::Value {
    let estimates: Vec<_> = plan
        .estimates
        .iter()
        .map(|estimate| {
            json!({
                "algorithm": estimate.algorithm.name(),
                "flops": estimate.flops,
                "published_elements_per_head": estimate.published_elements,
                "scratch_bytes_per_head": estimate.scratch_bytes,
                "seconds_one_thread": estimate.seconds(Purpose::Inference),
                "seconds_one_thread_with_backward": estimate.seconds(Purpose::Training),
                "automatic": estimate.automatic,
                "work": work(estimate),
            })
        })
        .collect();
    json!({
        "batch": dims.batch,
        "heads": dims.heads,
        "queries": dims.queries,
        "keys": dims.keys,
        "head_dim": dims.head_dim,
        "value_dim": dims.value_dim,
        "attention": options,
        "radius": options.pointer("/relative/radius"),
        "causal": arguments.causal,
        "algorithm": plan.algorithm(Purpose::Inference).name(),
        "reason": plan.reason(Purpose::Inference),
        "algorithm_with_backward": plan.algorithm(Purpose::Training).name(),
        "reason_with_backward": plan.reason(Purpose::Training),
        "estimates": estimates,
    })
}

/// What an algorithm does, how often, and the seconds that each takes.
fn work(estimate: &Estimate) -> Value {
    let counts = estimate.work.counts().iter();
    counts
        .map(|&(rate, count)| {
            let seconds = |purpose| count * rate.seconds(purpose);
            json!({
                "rate": rate.name(),
                "count": count,
                "seconds": seconds(Purpose::Inference),
                "seconds_with_backward": seconds(Purpose::Training),
            })
        })
        .collect()
}

/// The most shares of a time that are listed.
const SHARES: usize = 3;

/// What takes an algorithm's time: its largest shares.
fn shares(estimate: &Estimate, purpose: Purpose) -> String {
    let counts = estimate.work.counts().iter();
    let total = estimate.seconds(purpose).max(f64::MIN_POSITIVE);
    let mut shares: Vec<(f64, String)> = counts
        .map(|&(rate, count)| {
            let each = rate.seconds(purpose);
            let share = count * each / total;
            let name = rate.name().rsplit('.').next().unwrap_or_default();
            (share, format!("{:.0} % {name} ({} × {})", 100.0 * share, scaled(count, ""), seconds(each)))
        })
        .filter(|(share, _)| *share >= 0.005)
        .collect();
    shares.sort_by(|a, b| b.0.total_cmp(&a.0));
    shares.truncate(SHARES);
    shares.into_iter().map(|(_, text)| text).collect::<Vec<_>>().join(", ")
}

fn as_table(arguments: &Arguments, options: &Value, dims: &Dims, plan: &Plan) -> String {
    let order = if arguments.causal { "causal" } else { "bidirectional" };
    let mut text = format!(
        "{order} {}: batch {} × {} heads, {} queries × {} keys, head_dim {}, value_dim {}\n",
        options["mechanism"].as_str().unwrap_or_default(),
        dims.batch,
        dims.heads,
        dims.queries,
        dims.keys,
        dims.head_dim,
        dims.value_dim
    );
    let mut given = options.clone();
    if let Some(table) = given.as_object_mut() {
        table.remove("mechanism");
    }
    text.push_str(&format!("options {given}\n\n"));
    text.push_str(&format!("{:<11} {:>18}", "algorithm", "flops, all heads"));
    text.push_str("   working memory a head   published count a head   time, one thread      with backward\n");
    for estimate in &plan.estimates {
        text.push_str(&format!(
            "{:<11} {:>18} {:>23} {:>24}",
            estimate.algorithm.name(),
            scaled(estimate.flops, ""),
            bytes(estimate.scratch_bytes),
            scaled(estimate.published_elements, ""),
        ));
        for purpose in Purpose::ALL {
            let mark = if estimate.algorithm == plan.algorithm(purpose) { "→ " } else { "" };
            text.push_str(&format!(" {:>18}", format!("{mark}{}", seconds(estimate.seconds(purpose)))));
        }
        text.push('\n');
    }
    for (purpose, heading) in Purpose::ALL.into_iter().zip(["forward alone", "with a backward"]) {
        let algorithm = plan.algorithm(purpose).name();
        text.push_str(&format!("\n{heading}, {algorithm}: {}\n", plan.reason(purpose)));
        for estimate in &plan.estimates {
            let only = if estimate.automatic { "" } else { "; only if forced" };
            text.push_str(&format!("  {:<9} {}{only}\n", estimate.algorithm.name(), shares(estimate, purpose)));
        }
    }
    text
}

/// A count with a decimal prefix.
fn scaled(x: f64, unit: &str) -> String {
    let (value, prefix) = match x {
        x if x >= 1e12 => (x / 1e12, "T"),
        x if x >= 1e9 => (x / 1e9, "G"),
        x if x >= 1e6 => (x / 1e6, "M"),
        x if x >= 1e3 => (x / 1e3, "k"),
        x => return format!("{x:.0} {unit}").trim_end().to_string(),
    };
    format!("{value:.2} {prefix}{unit}")
}

/// Bytes in binary units.
fn bytes(x: f64) -> String {
    match x {
        x if x >= 1024f64.powi(3) => format!("{:.1} GiB", x / 1024f64.powi(3)),
        x if x >= 1024f64.powi(2) => format!("{:.1} MiB", x / 1024f64.powi(2)),
        x if x >= 1024.0 => format!("{:.1} KiB", x / 1024.0),
        x => format!("{x:.0} B"),
    }
}

fn seconds(x: f64) -> String {
    match x {
        x if x >= 1.0 => format!("{x:.2} s"),
        x if x >= 1e-3 => format!("{:.2} ms", x * 1e3),
        x if x >= 1e-6 => format!("{:.1} µs", x * 1e6),
        x if x >= 1e-9 => format!("{:.1} ns", x * 1e9),
        x => format!("{:.2} ps", x * 1e12),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_carry_their_units() {
        assert_eq!(scaled(12.0, ""), "12");
        assert_eq!(scaled(2.5e9, ""), "2.50 G");
        assert_eq!(bytes(1536.0), "1.5 KiB");
        assert_eq!(seconds(2e-5), "20.0 µs");
        assert_eq!(seconds(3.5e-12), "3.50 ps");
    }
}
