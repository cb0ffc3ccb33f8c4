//! `longspan info --mechanisms`: what every mechanism can do and what it costs, asked of the mechanisms themselves.
//!
//! Nothing here is written by hand. What a mechanism can do is tried on a few tokens; what it learns is what its kernel lists
//! as parameters; the size of its state is counted; the growth of its time comes from its cost model.

use std::io::Write;

use anyhow::{Result, anyhow};
use burn::tensor::{Device, Tensor};
use longspan::attention::{Attention, AttentionConfig, AttentionMask, AttentionState};
use longspan_kernels::{Call, Dims, Kernel, Mask, Purpose, View};
use serde::Serialize;
use serde_json::Value;

use crate::commands::Outcome;

/// Sizes at which the mechanisms are asked.
const HEADS: usize = 8;
const HEAD_DIM: usize = 64;

/// The length up to which growth is asked for: long enough that constant terms do not show.
const LONGEST: usize = 1 << 22;

#[derive(Serialize)]
struct Facts {
    name: &'static str,
    /// With their defaults.
    options: Value,
    causal: bool,
    bidirectional: bool,
    cross: bool,
    packed: bool,
    grouped: bool,
    learned: Vec<Learned>,
    /// Numbers in the state of one head after a token, and whether they are more after two.
    state_numbers_per_head: Option<usize>,
    state_grows: Option<bool>,
    causal_time: String,
    bidirectional_time: String,
    algorithms: Vec<&'static str>,
}

#[derive(Serialize)]
struct Learned {
    name: &'static str,
    shape: Vec<usize>,
}

pub fn run(json: bool) -> Result<Outcome> {
    let facts: Vec<Facts> = AttentionConfig::NAMES.iter().map(|name| Facts::of(name)).collect::<Result<_>>()?;
    let mut out = std::io::stdout().lock();
    if json {
        writeln!(out, "{}", serde_json::to_value(&facts)?)?;
    } else {
        write!(out, "{}", table(&facts))?;
    }
    Ok(Outcome::Done)
}

/// Whether the mechanism computes a call of so many queries and keys.
fn takes(attention: &Attention, queries: usize, keys: usize, mask: &AttentionMask) -> bool {
    let heads = attention.heads();
    let zeros = |heads, tokens, width| Tensor::zeros([1, heads, tokens, width], &Device::flex());
    let q = zeros(heads.heads, queries, heads.head_dim);
    let k = zeros(heads.kv_heads, keys, attention.key_dim());
    let v = zeros(heads.kv_heads, keys, heads.head_dim);
    attention.forward(q, k, v, mask).is_ok()
}

/// Numbers in the state of one head after one token and after two; `None` if there is no state.
fn state(attention: &Attention) -> Option<[usize; 2]> {
    let heads = attention.heads();
    let token = |heads, width| Tensor::zeros([1, heads, 1, width], &Device::flex());
    let mut state = AttentionState::default();
    let mut step = || {
        let q = token(heads.heads, heads.head_dim);
        let (k, v) = (token(heads.kv_heads, attention.key_dim()), token(heads.kv_heads, heads.head_dim));
        attention.step(q, k, v, &mut state).ok()?;
        attention.store(&state).ok().map(|stored| stored.len() / HEADS)
    };
    Some([step()?, step()?])
}

/// How the operations of the algorithm that `auto` chooses grow, by the cost model, up to the longest sequence that the
/// mechanism's tables have room for. Operations rather than seconds: they do not depend on the machine.
fn growth(kernel: &dyn Kernel<f32>, mask: Mask<'_>) -> String {
    let sizes = |length| Dims::square(1, HEADS, length, HEAD_DIM);
    let Some(longest) = (3..=LONGEST.ilog2()).rev().map(|n| 1 << n).find(|&n| has_room(kernel, sizes(n), mask)) else {
        return "-".into();
    };
    let lengths = [longest / 4, longest];
    let flops = lengths.map(|length| {
        let plan = kernel.plan(&sizes(length), &mask).ok();
        plan.and_then(|plan| plan.chosen(Purpose::Inference).map(|estimate| estimate.flops)).unwrap_or(f64::NAN)
    });
    let growth = match (flops[1] / flops[0]).ln() / 4f64.ln() {
        e if (e - 1.0).abs() < 0.02 => "L".into(),
        e if e > 1.0 && e < 1.2 => "L log L".into(),
        // Where tables are short the linear parts still show.
        e if (e - 2.0).abs() < 0.1 => "L²".into(),
        e => format!("L^{e:.2}"),
    };
    if longest < LONGEST { format!("{growth}, L ≤ {longest}") } else { growth }
}

/// Whether the mechanism takes sequences of this length.
fn has_room(kernel: &dyn Kernel<f32>, dims: Dims, mask: Mask<'_>) -> bool {
    // One row of zeros, read again for every row.
    let zeros = vec![0.0; dims.head_dim.max(kernel.key_dim(&dims))];
    let rows = || View::strided(&zeros, [0; 3]);
    let parameters: Vec<Vec<f32>> = kernel.parameters(&dims).iter().map(|p| vec![0.0; p.len()]).collect();
    let parameters: Vec<&[f32]> = parameters.iter().map(Vec::as_slice).collect();
    let call = Call::new(dims, rows(), rows(), rows()).with_parameters(&parameters).with_mask(mask);
    kernel.check(&call).is_ok()
}

impl Facts {
    fn of(name: &'static str) -> Result<Self> {
        let config = AttentionConfig::by_name(name)
            .ok_or_else(|| anyhow!("{name} is listed but not known; this is a bug: report it"))?;
        let attention = config.init(HEADS, HEADS, HEAD_DIM, &Device::flex())?;
        // Options may depend on the number of heads, so fewer key heads need a module of their own.
        let grouped = config.init(HEADS, HEADS / 4, HEAD_DIM, &Device::flex());
        let orders = [AttentionMask::causal(), AttentionMask::bidirectional()];
        let either = |attention: &Attention, keys, change: &dyn Fn(AttentionMask) -> AttentionMask| {
            orders.iter().any(|order| takes(attention, 4, keys, &change(order.clone())))
        };
        let kernel = attention.kernel();
        let kernel: &dyn Kernel<f32> = &*kernel;
        let sizes = Dims::square(1, HEADS, 4, HEAD_DIM);
        let learned =
            kernel.parameters(&sizes).iter().map(|p| Learned { name: p.name, shape: p.shape.to_vec() }).collect();
        let state = state(&attention);
        Ok(Self {
            name,
            options: serde_json::to_value(&config)?,
            causal: takes(&attention, 4, 4, &orders[0]),
            bidirectional: takes(&attention, 4, 4, &orders[1]),
            cross: takes(&attention, 4, 7, &orders[1]),
            packed: either(&attention, 4, &|mask| mask.with_packed(&[1, 3])),
            grouped: grouped.is_ok_and(|attention| either(&attention, 4, &|mask| mask)),
            learned,
            state_numbers_per_head: state.map(|[first, _]| first),
            state_grows: state.map(|[first, second]| second > first),
            causal_time: growth(kernel, Mask::causal()),
            bidirectional_time: growth(kernel, Mask::bidirectional()),
            algorithms: kernel.algorithms().iter().map(|algorithm| algorithm.name()).collect(),
        })
    }

    fn cells(&self) -> [(&'static str, String); 11] {
        let mark = |yes: bool| if yes { "yes" } else { "no" }.to_owned();
        let learned: Vec<String> = self.learned.iter().map(|p| format!("{} {:?}", p.name, p.shape)).collect();
        let state = match self.state_numbers_per_head {
            None => "none".into(),
            Some(numbers) if self.state_grows == Some(true) => format!("{numbers} a token"),
            Some(numbers) => numbers.to_string(),
        };
        [
            ("mechanism", self.name.to_owned()),
            ("causal", mark(self.causal)),
            ("both ways", mark(self.bidirectional)),
            ("Lq ≠ Lk", mark(self.cross)),
            ("packed", mark(self.packed)),
            ("grouped", mark(self.grouped)),
            ("state a head", state),
            ("time, causal", self.causal_time.clone()),
            ("both ways", self.bidirectional_time.clone()),
            ("algorithms", self.algorithms.join(", ")),
            ("learns", if learned.is_empty() { "nothing".into() } else { learned.join(", ") }),
        ]
    }
}

fn table(facts: &[Facts]) -> String {
    let cells: Vec<_> = facts.iter().map(Facts::cells).collect();
    let head = cells.iter().take(1).map(|row| row.each_ref().map(|(title, _)| *title));
    let rows: Vec<_> = head.chain(cells.iter().map(|row| row.each_ref().map(|(_, cell)| cell.as_str()))).collect();
    let width = |at: usize| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or(0);
    let mut text = format!("At {HEADS} heads of {HEAD_DIM}; default options. Time grows with the length as given.\n\n");
    for row in &rows {
        let line: String = row.iter().enumerate().map(|(at, cell)| format!("{cell:<0$}  ", width(at))).collect();
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}
