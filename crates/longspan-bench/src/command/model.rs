//! `longspan-bench --model`: a whole language model beside the machine's own products and copies.
//!
//! 4 pre-norm blocks of width 256 with 4 heads, GELU and an inner width of 1,024, over 256 symbols: a training step with AdamW on
//! one sequence, a prompt, and one token after it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::ControlFlow;
use std::time::Instant;

use anyhow::{Context, Result};
use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor, TensorData};
use longspan::attention::AttentionConfig;
use longspan::layers::{Activation, FusedAdamW};
use longspan::models::{BlockConfig, LanguageModel, LanguageModelConfig, LanguageState};
use longspan::profile::profile;
use longspan_bench::machine::{Limits, Machine, product_seconds};
use longspan_bench::statistics::Spread;
use longspan_bench::table::Table;
use serde::Serialize;

const WIDTH: usize = 256;
const HEADS: usize = 4;
const INNER: usize = 1024;
const LAYERS: usize = 4;
const SYMBOLS: usize = 256;

/// Tokens decoded in one measurement.
const DECODED: usize = 64;

/// What is measured.
pub struct Plan {
    /// Mechanisms by name.
    pub attention: Vec<(String, AttentionConfig)>,
    pub lengths: Vec<usize>,
    /// Seconds for each mechanism, length and kind of call.
    pub seconds: f64,
    /// Whether the backward forms again what it needs.
    pub recompute: bool,
}

/// Who is told what is measured next, and may ask to stop.
pub type Next<'a> = &'a mut dyn FnMut(&str) -> ControlFlow<()>;

/// What was found.
#[derive(Serialize)]
pub struct Report {
    machine: Machine,
    parameters: usize,
    /// Flops a second of one product of 1024³.
    product_rate: f64,
    /// Bytes a second, read and written, of a copy as large as the weights.
    copy_rate: f64,
    rows: Vec<Row>,
}

/// One mechanism at one length. Times are medians in seconds.
#[derive(Serialize)]
struct Row {
    attention: String,
    tokens: usize,
    step: f64,
    forward: f64,
    /// Of the step's products with weights, in their own sizes, alone.
    products: f64,
    /// Their flops.
    flops: f64,
    prompt: f64,
    token: Option<f64>,
    /// Seconds of one step by operation.
    operations: BTreeMap<String, f64>,
}

/// Measures; the rows found until then if someone asks to stop.
pub fn measure(plan: &Plan, next: Next<'_>) -> Result<Report> {
    let mut rows = Vec::new();
    let parameters = model(AttentionConfig::kernelized(), plan.recompute)?.num_params();
    let mut limits = Limits::new(2 * parameters * size_of::<f32>());
    'all: for &tokens in &plan.lengths {
        for (name, attention) in &plan.attention {
            if next(&format!("{name}, {tokens} tokens")).is_break() {
                break 'all;
            }
            rows.push(row(plan, name, attention, tokens)?);
            (0..5).for_each(|_| limits.measure_all());
        }
    }
    if rows.is_empty() {
        limits.measure_all();
    }
    let rates = limits.rates().context("the machine's rates were measured")?;
    let product_rate = rates.large.context("the machine's products were measured")?;
    Ok(Report { machine: Machine::here(), parameters, product_rate, copy_rate: rates.copy, rows })
}

fn model(attention: AttentionConfig, recompute: bool) -> Result<LanguageModel> {
    let device = Device::flex().autodiff();
    Device::flex().seed(1);
    let block = BlockConfig::new()
        .with_d_model(WIDTH)
        .with_heads(HEADS)
        .with_d_ff(INNER)
        .with_dropout(0.0)
        .with_activation(Activation::Gelu)
        .with_recompute(recompute);
    Ok(LanguageModelConfig::new(SYMBOLS)
        .with_block(block)
        .with_layers(LAYERS)
        .with_tied(false)
        .with_attention(vec![attention])
        .init(&device)?)
}

/// The sizes of all products with weights of a step: forward, by the inputs, by the weights.
fn products(tokens: usize) -> Vec<[usize; 3]> {
    let block = [[WIDTH, 3 * WIDTH], [WIDTH, WIDTH], [WIDTH, INNER], [INNER, WIDTH]];
    let layers = block.iter().cycle().take(LAYERS * block.len()).chain(&[[WIDTH, SYMBOLS]]);
    layers.flat_map(|&[k, n]| [[tokens, k, n], [tokens, n, k], [k, tokens, n]]).collect()
}

fn row(plan: &Plan, name: &str, attention: &AttentionConfig, tokens: usize) -> Result<Row> {
    let mut model = model(attention.clone(), plan.recompute)?;
    let mut optimizer = ModuleOptimizer::from(FusedAdamW::new(0.9, 0.98, 1e-9, 0.01));
    let ids: Vec<i64> = (0..tokens as i64).map(|n| n * n % SYMBOLS as i64).collect();
    let next: Vec<Option<u32>> = (1..=tokens).map(|n| ids.get(n).map(|&id| id as u32)).collect();
    let text = |device: &Device| Tensor::<2, Int>::from_data(TensorData::new(ids.clone(), [1, tokens]), device);
    let (training, plain) = (Device::flex().autodiff(), Device::flex());
    let mut forward = Vec::new();
    let mut step = |model: LanguageModel| -> Result<LanguageModel> {
        let start = Instant::now();
        let loss = model.loss(text(&training), next.clone(), 0.0)?;
        forward.push(start.elapsed().as_secs_f64());
        let gradients = loss.smoothed.div_scalar(tokens as f64).backward();
        let gradients = GradientsParams::from_grads(gradients, &model);
        Ok(optimizer.step(1e-3, model, gradients))
    };
    // The first step makes the weights and the optimizer's moments.
    model = step(model)?;
    let mut steps = Vec::new();
    let started = Instant::now();
    while steps.len() < 3 || started.elapsed().as_secs_f64() < plan.seconds {
        let start = Instant::now();
        model = step(model)?;
        steps.push(start.elapsed().as_secs_f64());
    }
    let start = Instant::now();
    let (stepped, seconds) = profile(|| step(model));
    let profiled = start.elapsed().as_secs_f64();
    let model = stepped?.valid();
    let mut operations: BTreeMap<String, f64> = seconds.into_iter().map(|(name, s)| (name.to_owned(), s)).collect();
    let named: f64 = operations.values().sum();
    operations.insert("the rest".into(), (profiled - named).max(0.0));

    let mut prompts = Vec::new();
    let mut state = LanguageState::default();
    let started = Instant::now();
    while prompts.len() < 3 || started.elapsed().as_secs_f64() < plan.seconds / 2.0 {
        state = LanguageState::default();
        let start = Instant::now();
        model.prefill(text(&plain), &mut state)?;
        prompts.push(start.elapsed().as_secs_f64());
    }
    let token = if model.keeps_past() { None } else { Some(token(&model, &state, plan.seconds / 4.0)?) };
    let sizes = products(tokens);
    let flops = sizes.iter().map(|[m, k, n]| 2.0 * (m * k * n) as f64).sum();
    Ok(Row {
        attention: name.to_owned(),
        tokens,
        step: median(&steps)?,
        forward: median(&forward)?,
        products: product_seconds(&sizes),
        flops,
        prompt: median(&prompts)?,
        token,
        operations,
    })
}

/// Seconds for a token after a prompt.
fn token(model: &LanguageModel, state: &LanguageState, seconds: f64) -> Result<f64> {
    let mut decoder = model.decoder(state, 1)?;
    let mut times = Vec::new();
    let started = Instant::now();
    while times.len() < 3 || started.elapsed().as_secs_f64() < seconds {
        let start = Instant::now();
        for n in 0..DECODED {
            decoder.step(&[n * 7 % SYMBOLS])?;
        }
        times.push(start.elapsed().as_secs_f64() / DECODED as f64);
    }
    median(&times)
}

fn median(times: &[f64]) -> Result<f64> {
    Ok(Spread::of(times).context("a time was measured")?.median)
}

impl Report {
    /// For people.
    pub fn to_text(&self) -> Result<String> {
        let Self { machine, parameters, product_rate, copy_rate, rows } = self;
        let read = (parameters * size_of::<f32>()) as f64 / copy_rate;
        let mut text = format!(
            "{}, {} cores, {}\na model of {:.1} million parameters: {LAYERS} blocks of width {WIDTH}, {HEADS} heads, GELU, inner width \
             {INNER}, {SYMBOLS} symbols\nproducts of 1024³ at {:.0} Gflop/s; copies at {:.1} GB/s, the weights read in {:.2} ms\n\n",
            machine.processor,
            machine.cores,
            machine.instructions,
            *parameters as f64 / 1e6,
            product_rate / 1e9,
            copy_rate / 1e9,
            1e3 * read,
        );
        let head = [
            "attention",
            "tokens",
            "step ms",
            "tokens/s",
            "own products",
            "1024³",
            "prompt tok/s",
            "token µs",
            "× read",
        ];
        let cells = rows.iter().map(|row| {
            let token = |f: &dyn Fn(f64) -> String| row.token.map_or("–".into(), f);
            vec![
                row.attention.clone(),
                row.tokens.to_string(),
                format!("{:.1}", 1e3 * row.step),
                format!("{:.0}", row.tokens as f64 / row.step),
                format!("{:.0} %", 100.0 * row.products / row.step),
                format!("{:.0} %", 100.0 * row.flops / product_rate / row.step),
                format!("{:.0}", row.tokens as f64 / row.prompt),
                token(&|seconds| format!("{:.0}", 1e6 * seconds)),
                token(&|seconds| format!("{:.1}", seconds / read)),
            ]
        });
        text.push_str(&Table::new(1, &head, cells).to_text());
        text.push_str("\nShares of a step:\n");
        for row in rows {
            let whole: f64 = row.operations.values().sum();
            let shares = row.operations.iter().map(|(name, seconds)| (name, 100.0 * seconds / whole));
            let mut shares: Vec<_> = shares.filter(|&(_, share)| share >= 0.5).collect();
            shares.sort_by(|a, b| b.1.total_cmp(&a.1));
            let shares = shares.iter().map(|(name, share)| format!("{} {share:.0} %", name.trim_end_matches(" parts")));
            writeln!(text, "{}, {}: {}", row.attention, row.tokens, shares.collect::<Vec<_>>().join(", "))?;
        }
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_model_is_measured_whole() {
        let attention = vec![("shaw".into(), AttentionConfig::shaw()), ("softmax".into(), AttentionConfig::softmax())];
        let plan = Plan { attention, lengths: vec![32], seconds: 0.0, recompute: true };
        let report = measure(&plan, &mut |_| ControlFlow::Continue(())).unwrap();
        assert_eq!(report.rows.len(), 2);
        let [shaw, softmax] = &report.rows[..] else { panic!("two rows") };
        assert!(shaw.token.is_some_and(|seconds| seconds > 0.0) && softmax.token.is_none());
        assert!(shaw.operations["attention parts"] > 0.0 && shaw.operations["feed-forward parts"] > 0.0);
        // 19.3 million a token: three products of each weight.
        assert!((shaw.flops - 32.0 * 19.27e6).abs() < 32.0 * 0.1e6, "{}", shaw.flops);
        let text = report.to_text().unwrap();
        assert!(text.contains("own products") && text.lines().all(|line| line.chars().count() <= 110), "{text}");
        let stopped = measure(&plan, &mut |_| ControlFlow::Break(())).unwrap();
        assert!(stopped.rows.is_empty());
    }
}
