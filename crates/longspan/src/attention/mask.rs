//! Masks that own their lengths, so that a backward pass can keep them.

use std::sync::Arc;

use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use longspan_kernels::{Keys, Mask, Order};

use super::index_tensor;
use crate::cpu::is_flex;
use crate::error::{Error, Result, argument};

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
    /// [`Padding`](Self::Padding) as a tensor, `[batch, keys]`, which is read on the CPU backend alone.
    OnDevice(DeviceMask),
    /// Several sequences packed end to end on the token axis, each attending to itself; the batch must be 1. Both lists
    /// are cumulative, `[0, end of the first, …, number of tokens]`, and equally long (`cu_seqlens`).
    Packed {
        /// Boundaries on the query axis.
        queries: Arc<[usize]>,
        /// Boundaries on the key axis.
        keys: Arc<[usize]>,
    },
    /// Those that take part in each of these.
    Together(Arc<[KeyMask]>),
}

/// A mask of keys on a device. Made by [`AttentionMask::with_padding_mask`].
#[derive(Debug, Clone)]
pub struct DeviceMask(Arc<Tensor<2, Bool>>);

impl PartialEq for DeviceMask {
    /// Reads both back.
    fn eq(&self, other: &Self) -> bool {
        self.0.to_data() == other.0.to_data()
    }
}

impl Eq for DeviceMask {}

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

impl KeyMask {
    /// Its sizes, for an error.
    fn sizes(&self) -> String {
        match self {
            Self::All => "all keys".into(),
            Self::Lengths(lengths) => format!("lengths {lengths:?}"),
            Self::Padding(ignored) => format!("{} entries", ignored.len()),
            Self::OnDevice(DeviceMask(ignored)) => format!("a tensor {:?}", ignored.dims()),
            Self::Packed { .. } => "packed sequences".into(),
            Self::Together(masks) => masks.iter().map(Self::sizes).collect::<Vec<_>>().join(" and "),
        }
    }

    /// Whether it is one of so many texts and keys.
    fn fits(&self, [batch, keys]: [usize; 2]) -> bool {
        match self {
            Self::All => true,
            Self::Lengths(lengths) => lengths.len() == batch && lengths.iter().all(|&length| length <= keys),
            Self::Padding(ignored) => ignored.len() == batch * keys,
            Self::OnDevice(DeviceMask(ignored)) => ignored.dims() == [batch, keys],
            Self::Packed { .. } => false,
            Self::Together(masks) => masks.iter().all(|mask| mask.fits([batch, keys])),
        }
    }

    /// Whether each key is ignored, of a mask that [fits](Self::fits).
    fn list(&self, [batch, keys]: [usize; 2]) -> Result<Vec<bool>> {
        let all = 0..batch * keys;
        Ok(match self {
            Self::All | Self::Packed { .. } => vec![false; all.len()],
            Self::Lengths(lengths) => all.map(|n| n % keys >= lengths[n / keys]).collect(),
            Self::Padding(ignored) => ignored.to_vec(),
            Self::OnDevice(DeviceMask(ignored)) => {
                let ignored = (**ignored).clone().try_into_data().map_err(|error| Error::Device(error.to_string()))?;
                ignored.iter().collect()
            }
            Self::Together(masks) => {
                let lists = masks.iter().map(|mask| mask.list([batch, keys])).collect::<Result<Vec<_>>>()?;
                all.map(|n| lists.iter().any(|list| list[n])).collect()
            }
        })
    }

    fn select(&self, indices: &[usize], keys: usize) -> Self {
        match self {
            Self::All | Self::Packed { .. } => self.clone(),
            Self::Lengths(lengths) => Self::Lengths(indices.iter().map(|&b| lengths[b]).collect()),
            Self::Padding(ignored) => {
                Self::Padding(indices.iter().flat_map(|&b| &ignored[b * keys..][..keys]).copied().collect())
            }
            Self::OnDevice(DeviceMask(ignored)) => {
                let indices = index_tensor(indices, &ignored.device());
                Self::OnDevice(DeviceMask(Arc::new((**ignored).clone().select(0, indices))))
            }
            Self::Together(masks) => Self::Together(masks.iter().map(|mask| mask.select(indices, keys)).collect()),
        }
    }

    /// Whether each key is ignored, `[batch, 1, keys, 1]`; `None` where none is.
    pub(crate) fn ignored(&self, [batch, keys]: [usize; 2], device: &Device) -> Option<Tensor<4, Bool>> {
        let shape = [batch, 1, keys, 1];
        match self {
            Self::All | Self::Packed { .. } => None,
            Self::Lengths(lengths) => lengths.iter().any(|&n| n < keys).then(|| {
                let lengths = index_tensor(lengths, device).reshape([batch, 1, 1, 1]).expand(shape);
                let places = Tensor::<1, Int>::arange(0..keys as i64, device).reshape([1, 1, keys, 1]).expand(shape);
                places.greater_equal(lengths)
            }),
            Self::Padding(ignored) => {
                let whole = || Tensor::from_data(TensorData::new(ignored.to_vec(), shape), device);
                ignored.contains(&true).then(whole)
            }
            Self::OnDevice(DeviceMask(ignored)) => Some((**ignored).clone().to_device(device).reshape(shape)),
            Self::Together(masks) => {
                masks.iter().filter_map(|mask| mask.ignored([batch, keys], device)).reduce(Tensor::bool_or)
            }
        }
    }
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
    /// padding. It is read on the CPU backend alone.
    pub fn with_padding_mask(self, ignored: Tensor<2, Bool>) -> Self {
        self.and(KeyMask::OnDevice(DeviceMask(Arc::new(ignored))))
    }

    /// The same mask as the kernels of `operation` read it, of so many texts and keys.
    pub(crate) fn listed(&self, operation: &'static str, dims: [usize; 2]) -> Result<Self> {
        let read = || Ok(KeyMask::Padding(self.keys.list(dims)?.into()));
        self.with_lists(operation, dims, read)
    }

    /// The same mask where its sizes alone count, for kernels that read lists.
    pub(crate) fn unread(&self, operation: &'static str, dims: [usize; 2]) -> Result<Self> {
        self.with_lists(operation, dims, || Ok(KeyMask::All))
    }

    /// With a list in the place of what is none.
    fn with_lists(
        &self,
        operation: &'static str,
        dims: [usize; 2],
        list: impl FnOnce() -> Result<KeyMask>,
    ) -> Result<Self> {
        if !matches!(self.keys, KeyMask::OnDevice(_) | KeyMask::Together(_)) {
            return Ok(self.clone());
        }
        let [batch, keys] = dims;
        let expected = || format!("one of {batch} texts of {keys} keys, and none beside packed sequences");
        argument(self.keys.fits(dims), operation, "mask", expected, || self.keys.sizes())?;
        Ok(Self { keys: list()?, ..*self })
    }

    /// The same mask, made once for all layers on a device that has no kernels.
    pub(crate) fn on(self, [batch, keys]: [usize; 2], device: &Device) -> Self {
        match self.keys.ignored([batch, keys], device).filter(|_| !is_flex(device)) {
            Some(ignored) => {
                Self { keys: KeyMask::OnDevice(DeviceMask(Arc::new(ignored.reshape([batch, keys])))), ..self }
            }
            None => self,
        }
    }

    /// Whether it says nothing of queries.
    pub(crate) fn is_of_memory(&self) -> bool {
        self.order == Order::Bidirectional && self.offset == 0
    }

    /// With both key masks.
    fn and(self, other: KeyMask) -> Self {
        let keys = match &self.keys {
            KeyMask::All => other,
            one => KeyMask::Together([one.clone(), other].into()),
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

    /// The kernels' view of this mask; they refuse one of a tensor, or of several together.
    pub fn as_kernel(&self) -> Mask<'_> {
        let keys = match &self.keys {
            KeyMask::All => Keys::All,
            KeyMask::Lengths(lengths) => Keys::Lengths(lengths),
            KeyMask::Padding(ignored) => Keys::Padding(ignored),
            // One of no keys.
            KeyMask::OnDevice(_) | KeyMask::Together(_) => Keys::Padding(&[]),
            KeyMask::Packed { queries, keys } => Keys::Packed { queries, keys },
        };
        Mask { order: self.order, offset: self.offset, keys }
    }

    /// The mask of the batch entries `indices` over `keys` keys.
    pub(crate) fn select(&self, indices: &[usize], keys: usize) -> Self {
        Self { keys: self.keys.select(indices, keys), ..*self }
    }
}
