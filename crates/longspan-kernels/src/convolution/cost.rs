//! What a call takes.

use super::ShortConvolution;
use super::problem::ROWS;
use crate::call::Dims;
use crate::plan::{Algorithm, Estimate, Plan, Rate, Work};

pub(super) fn plan(convolution: &ShortConvolution, dims: &Dims) -> Plan {
    let (heads, width) = ((dims.batch * dims.heads) as f64, dims.value_dim as f64);
    let taps = dims.queries as f64 * convolution.width as f64 * width;
    let counts =
        [(Rate::ConvolutionNumber, (2 * dims.queries + 2 * dims.keys) as f64 * width), (Rate::ConvolutionTap, taps)];
    let estimate = Estimate {
        algorithm: Algorithm::Chunked,
        flops: heads * (2.0 * taps + 2.0 * dims.queries as f64 * width),
        published_elements: dims.queries as f64 * width,
        scratch_bytes: 4.0 * (2 * ROWS + 3 * convolution.width) as f64 * width,
        work: Work::new(heads, Rate::ConvolutionCall, counts),
        automatic: true,
    };
    Plan::new(Algorithm::Auto, vec![estimate])
}
