//! How one operation, attention over whole sequences or token by token, reaches the machine.
//!
//! [`attend`] checks shapes and chooses. On Burn's CPU backend (Flex) the kernels run on the tensors' own numbers, without a
//! copy, with a backward of their own that keeps no more than the outputs and the denominators. On every other backend the
//! same mathematics runs in plain tensor operations, chunk by chunk, which Burn differentiates.

#[cfg(feature = "flex")]
mod autodiff;
#[cfg(feature = "flex")]
mod flex;
mod tensor;
#[cfg(test)]
mod tests;

#[cfg(feature = "flex")]
use burn::backend::DispatchDevice;
#[cfg(feature = "flex")]
use burn::tensor::FloatDType;
use burn::tensor::{Device, Tensor};
use longspan_kernels::{KernelizedAttention, Order};

pub(crate) use tensor::{Total, repeat_heads};

use crate::attention::{AttentionMask, KeyMask, index_tensor};
use crate::error::{Result, argument};

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
    check(options, &q, &k, &v, table.as_ref(), mask)?;
    check_mask(mask, &k)?;
    #[cfg(feature = "flex")]
    if is_flex(&q) {
        let dtype = q.dtype();
        // Half-width numbers are widened: the kernels have no arithmetic for them, nor has the CPU.
        let (q, k, v, table) = if flex::supports(dtype) {
            (q, k, v, table)
        } else {
            let wide = FloatDType::F32;
            (q.cast(wide), k.cast(wide), v.cast(wide), table.map(|table| table.cast(wide)))
        };
        let settings = flex::Settings { options: options.clone(), mask: mask.clone() };
        let out = autodiff::attend(settings, q, k, v, table)?;
        return Ok(if out.dtype() == dtype { out } else { out.cast(dtype) });
    }
    Ok(tensor::attend(options, q, k, v, table, mask, tensor::CHUNK))
}

/// Whether a tensor lies on the CPU backend, with or without autodiff.
#[cfg(feature = "flex")]
fn is_flex(x: &Tensor<4>) -> bool {
    matches!(x.device().inner().as_dispatch(), DispatchDevice::Flex(_))
}

/// The state of a prefix: all that later tokens need to know of earlier ones. Its size does not grow.
#[derive(Debug, Clone)]
pub struct KernelizedState {
    inner: Option<Inner>,
}

#[derive(Debug, Clone)]
enum Inner {
    Tensors(tensor::Running),
}

impl KernelizedState {
    /// Before the first token.
    pub fn empty() -> Self {
        Self { inner: None }
    }

    /// The states of the batch entries `indices`, in that order; an entry may come several times (beam search).
    ///
    /// # Errors
    /// An index beyond the batch.
    pub fn select(&self, indices: &[usize], device: &Device) -> Result<Self> {
        Ok(Self {
            inner: match &self.inner {
                None => None,
                Some(Inner::Tensors(running)) => Some(Inner::Tensors(running.select(&index_tensor(indices, device)))),
            },
        })
    }
}

/// Takes one token into `state` and gives its output: the row that [`attend`] gives under a causal mask.
///
/// # Shapes
/// As in [`attend`] with one query and one key.
///
/// # Errors
/// Shapes or options that do not fit together or the state.
pub fn step(
    options: &KernelizedAttention,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    table: Option<Tensor<3>>,
    state: &mut KernelizedState,
) -> Result<Tensor<4>> {
    check(options, &q, &k, &v, table.as_ref(), &AttentionMask::causal())?;
    argument(
        q.dims()[2] == 1 && k.dims()[2] == 1,
        NAME,
        "tokens",
        || "1 query and 1 key in a step".into(),
        || format!("{} and {}", q.dims()[2], k.dims()[2]),
    )?;
    let inner = state.inner.get_or_insert_with(|| Inner::Tensors(tensor::Running::empty(options, &q, v.dims()[3])));
    match inner {
        Inner::Tensors(running) => Ok(running.step(options, q, k, v, table)),
    }
}

const NAME: &str = "kernelized_attention";

fn check(
    options: &KernelizedAttention,
    q: &Tensor<4>,
    k: &Tensor<4>,
    v: &Tensor<4>,
    table: Option<&Tensor<3>>,
    mask: &AttentionMask,
) -> Result<()> {
    let [batch, heads, _, dim] = q.dims();
    let [k_batch, kv_heads, keys, k_dim] = k.dims();
    argument(
        kv_heads > 0 && heads.is_multiple_of(kv_heads),
        NAME,
        "k",
        || format!("a number of heads that divides the {heads} of q"),
        || kv_heads.to_string(),
    )?;
    argument(
        k_batch == batch && k_dim == dim,
        NAME,
        "k",
        || format!("[{batch}, kv_heads, keys, {dim}], like q"),
        || format!("{:?}", k.dims()),
    )?;
    let dtypes = [Some(q.dtype()), Some(k.dtype()), Some(v.dtype()), table.map(|table| table.dtype())];
    argument(
        dtypes.iter().flatten().all(|&dtype| dtype == q.dtype()),
        NAME,
        "number types",
        || format!("{:?} everywhere, like q", q.dtype()),
        || format!("{:?}", dtypes.iter().flatten().collect::<Vec<_>>()),
    )?;
    argument(
        v.dims()[..3] == [batch, kv_heads, keys],
        NAME,
        "v",
        || format!("[{batch}, {kv_heads}, {keys}, value_dim], like k"),
        || format!("{:?}", v.dims()),
    )?;
    let rows = options.score.shaw().map(|shaw| [if shaw.shared { 1 } else { heads }, shaw.rows(), dim]);
    argument(
        table.map(|table| table.dims()) == rows,
        NAME,
        "table",
        || rows.map_or("none without relative positions".into(), |rows| format!("{rows:?}")),
        || table.map_or("none".into(), |table| format!("{:?}", table.dims())),
    )?;
    if let Some(decay) = &options.decay {
        argument(
            mask.order == Order::Causal,
            NAME,
            "decay",
            || "a causal mask".into(),
            || "a bidirectional one, which has no direction in which to decay".into(),
        )?;
        argument(
            decay.len() == kv_heads,
            NAME,
            "decay",
            || format!("one factor for each of the {kv_heads} key/value heads"),
            || decay.len().to_string(),
        )?;
    }
    Ok(())
}

/// Whether a mask fits `k`, `[batch, kv_heads, keys, head_dim]`.
pub(crate) fn check_mask(mask: &AttentionMask, k: &Tensor<4>) -> Result<()> {
    let [batch, _, keys, _] = k.dims();
    match &mask.keys {
        KeyMask::All => Ok(()),
        KeyMask::Lengths(lengths) => argument(
            lengths.len() == batch && lengths.iter().all(|&n| n <= keys),
            NAME,
            "key lengths",
            || format!("{batch} lengths, each at most {keys}"),
            || format!("{lengths:?}"),
        ),
        KeyMask::Padding(ignored) => argument(
            ignored.len() == batch * keys,
            NAME,
            "key padding",
            || format!("batch × keys = {batch} × {keys} entries"),
            || ignored.len().to_string(),
        ),
    }
}
