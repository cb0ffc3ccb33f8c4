//! Every pair of query and key, forward and backward, in dense tiles: O(queries · keys) work, memory linear in the keys.
//!
//! A task takes one key/value head of one sequence with all its query heads, so that the gradients of keys and values
//! have one writer. Rows are taken in blocks, and each block meets the keys in tiles whose borders depend on the keys
//! alone: a row's sums run over the keys in order, whatever the number of threads and whatever the other rows hold.
//!
//! A tile that not all rows of a block see fully has weights of 0 where they do not, and 0 · NaN is NaN: a block is cut
//! to single rows where a number that it could carry that way is not finite.
//!
//! Under an exponential map a key is stored relative to its own largest entry, and every row counts its weights from
//! the largest entry among the keys that it sees and the table: no weight exceeds the head's width, and keys that a row
//! does not see have no influence on its rounding. Denominators are relative to that exponent and the query's own, and
//! the backward forms the same exponents anew.

mod backward;
mod forward;
mod keys;

pub(super) use backward::backward;
pub(super) use forward::forward;
pub(super) use keys::TILE;
