//! What a call takes.

use super::SoftmaxAttention;
use super::problem::{KEYS, ROWS};
use crate::call::{Dims, Mask};
use crate::plan::{Algorithm, Estimate, Plan, Rate, Work};

pub(super) fn plan(attention: &SoftmaxAttention, dims: &Dims, mask: &Mask<'_>) -> Plan {
    let widths = (dims.head_dim + dims.value_dim) as f64;
    let heads = (dims.batch * dims.heads) as f64;
    let pairs = mask.visible_pairs_within(dims, attention.window);
    let flops = heads * pairs * 2.0 * widths;
    let counts = [
        (Rate::SoftmaxNumber, (dims.queries + dims.keys) as f64 * widths),
        (Rate::SoftmaxWeight, pairs),
        (Rate::SoftmaxFlop, pairs * 2.0 * widths),
    ];
    let work = Work::new(heads, Rate::SoftmaxCall, counts);
    let estimate = Estimate {
        algorithm: Algorithm::Tiled,
        flops,
        published_elements: dims.queries as f64 * dims.keys as f64,
        scratch_bytes: 4.0 * ROWS as f64 * (3.0 * widths + KEYS as f64),
        work,
        automatic: true,
    };
    Plan::new(Algorithm::Auto, vec![estimate])
}
