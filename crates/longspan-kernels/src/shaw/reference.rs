//! Which row of the table a distance reads, by the definition.

use super::Shaw;

/// `r_{clip(δ, −R, R) + R}` of one head, before `ρ`.
pub(crate) fn row<'a>(shaw: &Shaw, table: &'a [f64], head: usize, row_len: usize, delta: isize) -> &'a [f64] {
    let radius = shaw.radius as isize;
    let index = (delta.clamp(-radius, radius) + radius) as usize;
    let head = if shaw.shared { 0 } else { head };
    &table[(head * shaw.rows() + index) * row_len..][..row_len]
}
