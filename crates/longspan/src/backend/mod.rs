//! How one operation, attention over whole sequences, reaches the machine.
//!
//! [`attend`] checks shapes and chooses.

mod tensor;

pub(crate) use tensor::repeat_heads;

use burn::tensor::Tensor;
use longspan_kernels::KernelizedAttention;

use crate::attention::AttentionMask;
use crate::error::Result;

/// Kernelized attention, with relative positions if `options` has them.
///
/// # Shapes
/// - `q`: `[batch, heads, queries, head_dim]`; `k`: `[batch, kv_heads, keys, head_dim]`;
///   `v`: `[batch, kv_heads, keys, value_dim]`, all before the feature map
/// - `table`: `[heads, 2R+1, head_dim]`, or `[1, 2R+1, head_dim]` if shared; `None` without relative positions
/// - output: `[batch, heads, queries, value_dim]`
///
/// # Errors
/// Shapes or options that do not fit together.
pub fn attend(
    options: &KernelizedAttention,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    table: Option<Tensor<3>>,
    mask: &AttentionMask,
) -> Result<Tensor<4>> {
    Ok(tensor::attend(options, q, k, v, table, mask))
}
