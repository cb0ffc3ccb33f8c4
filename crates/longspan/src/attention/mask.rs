//! Masks that own their lengths, so that a backward pass can keep them.

use std::sync::Arc;

use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use longspan_kernels::{Keys, Mask, Order};

use super::index_tensor;
use crate::error::{Error, Result};

/// Which keys take part.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum KeyMask {
    /// All of them.
    #[default]
    All,
    /// The first `lengths[b]` of each batch entry; `[batch]`.
    Lengths(Arc<[usize]>),
    /// Those whose entry is `false`; `[batch, keys]`, row-major. `true` means *ignored*, as in PyTorch.
    Padding(Arc<[bool]>),
    /// Several sequences packed end to end on the token axis, each attending to itself; the batch must be 1. Both lists
    /// are cumulative, `[0, end of the first, …, number of tokens]`, and equally long (`cu_seqlens`).
    Packed {
        /// Boundaries on the query axis.
        queries: Arc<[usize]>,
        /// Boundaries on the key axis.
        keys: Arc<[usize]>,
    },
}

/// What a query sees. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AttentionMask {
    /// Bidirectional or causal.
    pub order: Order,
    /// Query `i` has the position of key `i + offset`: a causal query sees the keys `j ≤ i + offset`, and relative
    /// distances are `j − (i + offset)`. 0 by default.
    pub offset: isize,
    /// Which keys take part.
    pub keys: KeyMask,
}

impl AttentionMask {
    /// Every query sees every key.
    pub fn bidirectional() -> Self {
        Self::default()
    }

    /// Query `i` sees the keys `j ≤ i`.
    pub fn causal() -> Self {
        Self { order: Order::Causal, ..Self::default() }
    }

    /// The same mask with query `i` at the position of key `i + offset`.
    pub fn with_offset(self, offset: isize) -> Self {
        Self { offset, ..self }
    }

    /// The same mask over the first `lengths[b]` keys of each batch entry, and under any padding that it has.
    pub fn with_lengths(self, lengths: &[usize]) -> Self {
        self.and(KeyMask::Lengths(lengths.into()))
    }

    /// The same mask over the keys whose entry is `false`, `[batch, keys]`, row-major, and within any lengths that it has.
    pub fn with_padding(self, ignored: &[bool]) -> Self {
        self.and(KeyMask::Padding(ignored.into()))
    }

    /// [`with_padding`](Self::with_padding) of a tensor, `[batch, keys]`, as Burn's `generate_padding_mask` gives: `true` where a key is
    /// padding.
    ///
    /// # Errors
    /// A device that gives no truth values back.
    pub fn with_padding_mask(self, ignored: Tensor<2, Bool>) -> Result<Self> {
        let ignored = ignored.try_into_data().map_err(|error| Error::Device(error.to_string()))?;
        Ok(self.with_padding(&ignored.iter().collect::<Vec<bool>>()))
    }

    /// With both key masks. What does not fit together becomes a padding that no call takes.
    fn and(self, other: KeyMask) -> Self {
        let keys = match (&self.keys, &other) {
            (KeyMask::All, _) => other,
            (KeyMask::Lengths(a), KeyMask::Lengths(b)) if a.len() == b.len() => {
                KeyMask::Lengths(a.iter().zip(&**b).map(|(&a, &b)| a.min(b)).collect())
            }
            (KeyMask::Padding(a), KeyMask::Padding(b)) if a.len() == b.len() => {
                KeyMask::Padding(a.iter().zip(&**b).map(|(a, b)| a | b).collect())
            }
            (KeyMask::Lengths(lengths), KeyMask::Padding(ignored))
            | (KeyMask::Padding(ignored), KeyMask::Lengths(lengths))
                if !lengths.is_empty() && ignored.len().is_multiple_of(lengths.len()) =>
            {
                let keys = ignored.len() / lengths.len();
                let beyond = |n: usize| n % keys.max(1) >= lengths[n / keys.max(1)];
                KeyMask::Padding(ignored.iter().enumerate().map(|(n, &ignored)| ignored || beyond(n)).collect())
            }
            _ => KeyMask::Padding([].into()),
        };
        Self { keys, ..self }
    }

    /// The same mask within each of several sequences of `lengths` tokens that are packed end to end; the batch must be
    /// 1.
    pub fn with_packed(self, lengths: &[usize]) -> Self {
        let ends = lengths.iter().scan(0, |end, &length| {
            *end += length;
            Some(*end)
        });
        let bounds: Arc<[usize]> = std::iter::once(0).chain(ends).collect();
        self.and(KeyMask::Packed { queries: bounds.clone(), keys: bounds })
    }

    /// The kernels' view of this mask.
    pub fn as_kernel(&self) -> Mask<'_> {
        let keys = match &self.keys {
            KeyMask::All => Keys::All,
            KeyMask::Lengths(lengths) => Keys::Lengths(lengths),
            KeyMask::Padding(ignored) => Keys::Padding(ignored),
            KeyMask::Packed { queries, keys } => Keys::Packed { queries, keys },
        };
        Mask { order: self.order, offset: self.offset, keys }
    }

    /// The mask of the batch entries `indices` over `keys` keys.
    pub(crate) fn select(&self, indices: &[usize], keys: usize) -> Self {
        let keys = match &self.keys {
            KeyMask::All | KeyMask::Packed { .. } => self.keys.clone(),
            KeyMask::Lengths(lengths) => KeyMask::Lengths(indices.iter().map(|&b| lengths[b]).collect()),
            KeyMask::Padding(ignored) => {
                KeyMask::Padding(indices.iter().flat_map(|&b| &ignored[b * keys..][..keys]).copied().collect())
            }
        };
        Self { keys, ..*self }
    }

    /// Whether each key is ignored, `[batch, 1, keys, 1]`; `None` where none is.
    pub(crate) fn ignored(&self, batch: usize, keys: usize, device: &Device) -> Option<Tensor<4, Bool>> {
        let shape = [batch, 1, keys, 1];
        match &self.keys {
            KeyMask::All | KeyMask::Packed { .. } => None,
            KeyMask::Lengths(lengths) => lengths.iter().any(|&n| n < keys).then(|| {
                let lengths = index_tensor(lengths, device).reshape([batch, 1, 1, 1]).expand(shape);
                let places = Tensor::<1, Int>::arange(0..keys as i64, device).reshape([1, 1, keys, 1]).expand(shape);
                places.greater_equal(lengths)
            }),
            KeyMask::Padding(ignored) => {
                let whole = || Tensor::from_data(TensorData::new(ignored.to_vec(), shape), device);
                ignored.contains(&true).then(whole)
            }
        }
    }
}
