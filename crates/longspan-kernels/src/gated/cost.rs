//! What a call takes.

use super::GatedAttention;
use super::problem::CHUNK;
use crate::call::Dims;
use crate::plan::{Algorithm, Estimate, Plan, Rate, Work};

/// Of a call that passes over the tokens `passes` times.
pub(super) fn plan(attention: &GatedAttention, dims: &Dims, passes: f64) -> Plan {
    let [heads, d, dv] = [dims.batch * dims.heads, dims.head_dim, dims.value_dim].map(|n| n as f64);
    let tokens = dims.keys as f64;
    let within = CHUNK as f64 / 2.0 * (d + dv);
    let corrected = if attention.is_delta() { d * dv + within } else { 0.0 };
    let flops = passes * 2.0 * tokens * (2.0 * d * dv + within + corrected);
    let estimate = Estimate {
        algorithm: Algorithm::Chunked,
        flops: heads * flops,
        published_elements: tokens * d * dv,
        scratch_bytes: 4.0 * (d * dv + CHUNK as f64 * (4.0 * d + 3.0 * dv)),
        work: Work::new(
            heads,
            Rate::ChunkedCall,
            [(Rate::ChunkedNumber, passes * 2.0 * tokens * (d + dv)), (Rate::ChunkedFlop, flops)],
        ),
        automatic: true,
    };
    Plan::new(Algorithm::Auto, vec![estimate])
}
