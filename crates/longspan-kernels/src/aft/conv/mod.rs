//! AFT-conv: one key a head, so that a pair's weight is one number for all channels, and kernels over distances in one or
//! two dimensions.

mod backward;
mod band;
mod convolution;
mod field;
mod forward;
mod geometry;
mod sources;
mod walk;
mod window;

pub(super) use backward::backward;
pub(super) use forward::forward;
pub(super) use geometry::Geometry;
