//! Every mechanism by name: the one list that a new mechanism joins.

use std::fmt::Debug;
use std::sync::Arc;

use crate::cpu::{FlexTensor, to_flex};
use burn::config::Config;
use burn::module::Module;
use burn::tensor::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};

use super::{
    AftAttention, AftConvOptions, AftFullOptions, AftLocalOptions, AftSimpleOptions, AttentionMask, AttentionState,
    DeltaOptions, FourierAttention, FourierOptions, GatedAttention, GatedDeltaOptions, GatedOptions, Heads,
    KernelizedAttention, KernelizedOptions, KeyMask, ShawOptions, ShortConvolution, ShortConvolutionOptions,
    SoftmaxAttention, SoftmaxOptions, SoftmaxWindowOptions, StoredState, ToeplitzAttention, ToeplitzOptions,
    index_tensor,
};
use crate::backend::{self, AnyKernel, Layer, Total};
use crate::error::{Result, argument, fits};
use longspan_kernels::Dims;

/// What the options of every mechanism implement.
pub(super) trait Options: Default {
    /// The mechanism as a module.
    type Module;

    /// Makes the module.
    fn init(&self, heads: Heads, device: &Device) -> Result<Self::Module>;
}

/// The public methods of a mechanism's module, the same for all.
macro_rules! attention_module {
    ($module:ident) => {
        impl $module {
            /// Attention over whole sequences.
            ///
            /// # Shapes
            /// - `q`: `[batch, heads, queries, head_dim]`
            /// - `k`: `[batch, kv_heads, keys, head_dim]`; for AFT-conv `[batch, kv_heads, keys, 1]`, and wider by what gates are made of
            /// - `v`: `[batch, kv_heads, keys, value_dim]`
            /// - output: `[batch, heads, queries, value_dim]`; a row that sees no key gives 0
            ///
            /// # Errors
            /// Shapes that do not fit each other, the module or the mask.
            pub fn forward(
                &self,
                q: ::burn::tensor::Tensor<4>,
                k: ::burn::tensor::Tensor<4>,
                v: ::burn::tensor::Tensor<4>,
                mask: &$crate::attention::AttentionMask,
            ) -> $crate::Result<::burn::tensor::Tensor<4>> {
                $crate::backend::attend(self, q, k, v, mask)
            }

            /// Takes one token into `state` and gives its output: the row that `forward` gives under a causal mask.
            ///
            /// # Shapes
            /// As in `forward`, with one query and one key.
            ///
            /// # Errors
            /// Shapes that do not fit each other, the module or the state.
            pub fn step(
                &self,
                q: ::burn::tensor::Tensor<4>,
                k: ::burn::tensor::Tensor<4>,
                v: ::burn::tensor::Tensor<4>,
                state: &mut $crate::attention::AttentionState,
            ) -> $crate::Result<::burn::tensor::Tensor<4>> {
                $crate::backend::step(self, q, k, v, state)
            }
        }
    };
}
pub(super) use attention_module;

macro_rules! mechanisms {
    ($($(#[$doc:meta])* $variant:ident = $make:ident $name:literal ($options:ident) -> $module:ident;)*) => {
        /// Names a mechanism and its options, without sizes: `{"mechanism": "shaw", "relative": {"radius": 8}}`.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "mechanism")]
        pub enum AttentionConfig {
            $($(#[$doc])* #[serde(rename = $name)] $variant($options),)*
        }

        $(
            impl Config for $options {}

            impl From<$options> for AttentionConfig {
                fn from(options: $options) -> Self {
                    Self::$variant(options)
                }
            }
        )*

        /// Any mechanism.
        #[derive(Module, Debug)]
        #[allow(clippy::large_enum_variant, reason = "a layer has one, beside tensors that are far larger")]
        pub enum Attention {
            $($(#[$doc])* $variant($module),)*
        }

        impl AttentionConfig {
            /// The names of all mechanisms, in the order in which they are listed to people.
            pub const NAMES: &[&str] = &[$($name),*];

            $(
                $(#[$doc])*
                ///
                /// With its default options.
                pub fn $make() -> Self {
                    Self::$variant($options::default())
                }
            )*

            /// The mechanism of this name with its default options, if there is one.
            pub fn by_name(name: &str) -> Option<Self> {
                match name {
                    $($name => Some(Self::$make()),)*
                    _ => None,
                }
            }

            /// The name of the mechanism in configurations and on the command line.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$variant(_) => $name,)*
                }
            }

            /// The mechanism over `heads` query heads and `kv_heads` key/value heads of `head_dim` numbers.
            ///
            /// # Errors
            /// Options or sizes that no mechanism can be made from.
            pub fn init(&self, heads: usize, kv_heads: usize, head_dim: usize, device: &Device) -> Result<Attention> {
                let heads = Heads::new("AttentionConfig", heads, Some(kv_heads), head_dim)?;
                let attention = match self {
                    $(Self::$variant(options) => options.init(heads, device).map(Attention::$variant)?,)*
                };
                // They are drawn when they are first used.
                let learned = attention.kernel().parameters(&heads.dims(1, 1, 1));
                learned.iter().try_for_each(|own| fits("AttentionConfig", "options", &[own.len()]))?;
                Ok(attention)
            }
        }

        impl Attention {
            /// The mechanism as the backends see it.
            pub(crate) fn layer(&self) -> &dyn Layer {
                match self {
                    $(Self::$variant(module) => module,)*
                }
            }
        }
    };
}

mechanisms! {
    /// Kernelized attention without positions (Katharopoulos et al. 2020).
    Kernelized = kernelized "kernelized" (KernelizedOptions) -> KernelizedAttention;
    /// Kernelized attention with Shaw's relative positions (the Linear Scalable Transformer).
    Shaw = shaw "shaw" (ShawOptions) -> KernelizedAttention;
    /// Kernelized attention whose weights are learned waves over the distance.
    Fourier = fourier "fourier" (FourierOptions) -> FourierAttention;
    /// Kernelized attention with a learned bias for every distance (Luo et al. 2021).
    Toeplitz = toeplitz "toeplitz" (ToeplitzOptions) -> ToeplitzAttention;
    /// AFT with a learned bias for each query and key, of quadratic cost.
    AftFull = aft_full "aft-full" (AftFullOptions) -> AftAttention;
    /// AFT with a learned bias for each query and the keys near it (Zhai et al. 2021).
    AftLocal = aft_local "aft-local" (AftLocalOptions) -> AftAttention;
    /// AFT without biases or positions.
    AftSimple = aft_simple "aft-simple" (AftSimpleOptions) -> AftAttention;
    /// AFT with one key a head and biases by distance.
    AftConv = aft_conv "aft-conv" (AftConvOptions) -> AftAttention;
    /// Gated short convolution: a few taps over the latest tokens, to stand between layers of attention.
    ShortConvolution = short_convolution "short-convolution" (ShortConvolutionOptions) -> ShortConvolution;
    /// Linear attention whose state decays by what each token says (GLA, Mamba-2's SSD).
    Gated = gated "gated" (GatedOptions) -> GatedAttention;
    /// The delta rule: a token corrects what the state holds for its key (DeltaNet).
    Delta = delta "delta" (DeltaOptions) -> GatedAttention;
    /// The delta rule on a state that decays by what each token says (gated DeltaNet, KDA).
    GatedDelta = gated_delta "gated-delta" (GatedDeltaOptions) -> GatedAttention;
    /// Scaled dot-product attention without positions: the baseline, of quadratic cost.
    Softmax = softmax "softmax" (SoftmaxOptions) -> SoftmaxAttention;
    /// The same over the keys within a window: sliding-window attention, of linear cost.
    SoftmaxWindow = softmax_window "softmax-window" (SoftmaxWindowOptions) -> SoftmaxAttention;
}

impl Config for AttentionConfig {}

impl AttentionConfig {
    /// Whether the mechanism itself sees the order of tokens under a bidirectional mask; where it does not, a model
    /// wants absolute positions.
    pub fn sees_order(&self) -> bool {
        match self {
            Self::Kernelized(_) | Self::AftSimple(_) | Self::Softmax(_) | Self::SoftmaxWindow(_) => false,
            // Read from both ends they see distances, but not which side a token stands on.
            Self::Gated(_) | Self::Delta(_) | Self::GatedDelta(_) => false,
            Self::Shaw(_) | Self::Fourier(_) | Self::Toeplitz(_) => true,
            Self::AftFull(_) | Self::AftLocal(_) | Self::AftConv(_) | Self::ShortConvolution(_) => true,
        }
    }

    /// The mechanism for the cross-attention of a decoder whose self-attention this is: the same one, except for those
    /// that cannot look anything up in another sequence, such as AFT, whose weights do not depend on the query: there it is `shaw`.
    pub fn cross_attention(&self) -> Self {
        match self {
            Self::AftFull(_) | Self::AftLocal(_) | Self::AftSimple(_) | Self::AftConv(_) => Self::shaw(),
            Self::ShortConvolution(_) | Self::Gated(_) | Self::Delta(_) | Self::GatedDelta(_) => Self::shaw(),
            // Places within a window mean nothing in another sequence.
            Self::SoftmaxWindow(_) => Self::softmax(),
            Self::Kernelized(_) | Self::Shaw(_) | Self::Fourier(_) | Self::Toeplitz(_) | Self::Softmax(_) => {
                self.clone()
            }
        }
    }

    /// Whether the mechanism takes positions with each call, real numbers such as times.
    pub fn takes_positions(&self) -> bool {
        matches!(self, Self::Fourier(_))
    }
}

impl Default for AttentionConfig {
    /// [`AttentionConfig::shaw`].
    fn default() -> Self {
        Self::shaw()
    }
}

impl Attention {
    /// Attention over whole sequences; shapes and errors as in [`KernelizedAttention::forward`].
    pub fn forward(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: &AttentionMask) -> Result<Tensor<4>> {
        backend::attend(self.layer(), q, k, v, mask)
    }

    /// Takes one token into `state`, which before the first is the default, and gives its output; shapes and errors as
    /// in [`KernelizedAttention::step`].
    pub fn step(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, state: &mut AttentionState) -> Result<Tensor<4>> {
        backend::step(self.layer(), q, k, v, state)
    }

    /// Takes several tokens into `state`, which before the first is the default, and gives their outputs: what
    /// [`Attention::step`] gives one after the other, in the parallel form. A gradient reaches these tokens, but not those
    /// before.
    ///
    /// # Shapes
    /// As in [`KernelizedAttention::forward`], with as many keys as queries.
    ///
    /// # Errors
    /// Shapes that do not fit each other, the module or the state.
    pub fn advance(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, state: &mut AttentionState) -> Result<Tensor<4>> {
        backend::advance(self.layer(), q, k, v, state)
    }

    /// Whether a state grows with every token: it holds all keys and values.
    pub fn keeps_past(&self) -> bool {
        self.layer().keeps_past()
    }

    /// The kernel behind it, with the module's options.
    pub fn kernel(&self) -> Arc<dyn AnyKernel> {
        self.layer().kernel()
    }

    /// Numbers of heads, and numbers in a query of one head.
    pub fn heads(&self) -> Heads {
        self.layer().heads()
    }

    /// Numbers in a key of one head: as many as in a query, but for mechanisms whose keys are narrower.
    pub fn key_dim(&self) -> usize {
        self.layer().key_dim()
    }

    /// `state` as numbers that can be saved. Nothing is rounded.
    ///
    /// # Errors
    /// A state of another mechanism, other options or heads, and a device that gives no numbers back.
    pub fn store(&self, state: &AttentionState) -> Result<StoredState> {
        state.to_stored(self.layer())
    }

    /// Rebuilds a state from what [`Attention::store`] returned, also in another process.
    ///
    /// # Errors
    /// Numbers of another mechanism or of other sizes.
    pub fn restore(&self, stored: &StoredState, device: &Device) -> Result<AttentionState> {
        AttentionState::from_stored(self.layer(), stored, device)
    }

    /// Prepares keys and values for queries that come one by one, as in a decoder's cross-attention.
    ///
    /// # Shapes
    /// - `k`: `[batch, kv_heads, keys, key_dim]`
    /// - `v`: `[batch, kv_heads, keys, value_dim]`
    ///
    /// # Errors
    /// Shapes that do not fit each other or the module, a mask of the wrong size, or one of packed sequences.
    pub fn remember(&self, k: Tensor<4>, v: Tensor<4>, mask: &AttentionMask) -> Result<MemoryState> {
        let layer = self.layer();
        let mask =
            &if backend::is_flex(&k) { mask.listed(layer.name(), [k.dims()[0], k.dims()[2]])? } else { mask.clone() };
        let holds = !matches!(mask.keys, KeyMask::Packed { .. }) && mask.is_of_memory();
        let expected = || {
            "a bidirectional one without an offset, since recall says where queries stand, with a batch entry for each memory and without packed sequences".into()
        };
        let got = || format!("{:?}, offset {}, {:?}", mask.order, mask.offset, mask.keys);
        argument(holds, layer.name(), "mask", expected, got)?;
        let Heads { heads, head_dim, .. } = layer.heads();
        let q = Tensor::zeros([k.dims()[0], heads, 1, head_dim], (&k.device(), k.dtype()));
        backend::check(layer, &q, &k, &v)?;
        backend::learned(layer, backend::place(&k))?;
        backend::check_by_kernel(layer, backend::dims_of(&q, &v), mask)?;
        // Nothing at all has no sums.
        let some = !v.dims().contains(&0);
        let remembered = match some.then(|| layer.total(k.clone(), v.clone(), mask)).flatten() {
            Some(total) => Remembered::Total(Box::new(total)),
            None => Remembered::Whole(Box::new((k, v, mask.clone()))),
        };
        Ok(MemoryState { made_by: backend::maker(layer), remembered })
    }

    /// What [`Attention::forward`] under a bidirectional mask gives for queries at the positions from `first` on:
    /// O(1) a query for kernelized attention without positions, O(keys) for the others.
    ///
    /// # Shapes
    /// `q`: `[batch, heads, queries, head_dim]`; output `[batch, heads, queries, value_dim]`.
    ///
    /// # Errors
    /// Shapes that do not fit the memory.
    pub fn recall(&self, q: Tensor<4>, first: usize, memory: &MemoryState) -> Result<Tensor<4>> {
        self.check_recall(q.dims(), backend::place(&q), first, memory)?;
        match &memory.remembered {
            Remembered::Total(total) => Ok(total.recall(q, &self.layer().learned())),
            Remembered::Whole(whole) => {
                let (k, v, mask) = whole.as_ref();
                self.forward(q, k.clone(), v.clone(), &mask.clone().with_offset(first as isize))
            }
            Remembered::Near(near) => {
                backend::attend_between(self.layer(), q, near.k.clone(), near.v.clone(), first, &near.outside)
            }
        }
    }

    /// Checks that queries of this shape at the positions from `first` on fit a memory, before anything is computed.
    pub(crate) fn check_recall(
        &self,
        q: [usize; 4],
        place: (Device, DType),
        first: usize,
        memory: &MemoryState,
    ) -> Result<()> {
        let (layer, [batch, _, queries, _]) = (self.layer(), q);
        let expected = || "a position below 2⁵³".into();
        argument(first < 1 << 53, layer.name(), "first", expected, || first.to_string())?;
        let (name, Heads { heads, kv_heads, head_dim }) = (layer.name(), layer.heads());
        let own = backend::maker(layer);
        argument(memory.made_by == own, name, "memory", || format!("one of {own}"), || memory.made_by.to_string())?;
        let kept = match &memory.remembered {
            Remembered::Total(total) => {
                let [batch, kept_heads, _, kept_dim] = total.query();
                let fits = q == [batch, kept_heads, queries, kept_dim] && total.takes(&place);
                let expected = || format!("[{batch}, {kept_heads}, queries, {kept_dim}], where and as the memory is");
                argument(fits, name, "q", expected, || format!("{q:?} on {place:?}"))?;
                return backend::learned(layer, place).map(drop);
            }
            Remembered::Whole(whole) => {
                let (k, v, mask) = whole.as_ref();
                let dims = Dims { value_dim: v.dims()[3], ..layer.heads().dims(batch, queries, k.dims()[2]) };
                backend::check_by_kernel(layer, dims, &mask.clone().with_offset(first as isize))?;
                k.dims()
            }
            Remembered::Near(near) => {
                let end = first + queries;
                let expected = || format!("queries before position {}, for which the memory was made", near.longest);
                argument(end <= near.longest, name, "first", expected, || format!("{first}..{end}"))?;
                near.k.dims()
            }
        };
        let fits = q == [batch, heads, queries, head_dim] && kept == [batch, kv_heads, kept[2], self.key_dim()];
        let expected = || format!("one of batch {batch} and {kv_heads} key/value heads, queries of {heads} heads");
        argument(fits, name, "memory", expected, || format!("keys {kept:?}, queries {q:?}"))
    }
}

/// Keys and values prepared for queries that come one by one. Made by [`Attention::remember`].
#[derive(Debug, Clone)]
pub struct MemoryState {
    /// The mechanism, options and heads that made it.
    made_by: Arc<str>,
    remembered: Remembered,
}

#[derive(Debug, Clone)]
enum Remembered {
    /// Their sums, which are enough for a mechanism without positions.
    Total(Box<Total>),
    /// Keys, values and their mask.
    Whole(Box<(Tensor<4>, Tensor<4>, AttentionMask)>),
    Near(Box<Near>),
}

/// A memory as the kernels read it.
pub(crate) struct MemoryRows<'a> {
    pub k: FlexTensor,
    pub v: FlexTensor,
    pub mask: &'a AttentionMask,
    pub outside: Option<&'a backend::Outside>,
    /// How many queries it is for.
    pub longest: usize,
}

/// The keys and values that the first queries see one by one, and the state of those behind.
#[derive(Debug, Clone)]
struct Near {
    k: Tensor<4>,
    v: Tensor<4>,
    mask: AttentionMask,
    outside: backend::Outside,
    /// How many queries.
    longest: usize,
}

impl MemoryState {
    /// Of the keys and values that `longest` queries see one by one, and the states of what is before and behind them.
    pub(super) fn near(
        attention: &Attention,
        [k, v]: [Tensor<4>; 2],
        outside: backend::Outside,
        longest: usize,
    ) -> Self {
        let near = Box::new(Near { k, v, mask: AttentionMask::bidirectional(), outside, longest });
        Self { made_by: backend::maker(attention.layer()), remembered: Remembered::Near(near) }
    }

    /// For calls without tensors, if it is one of a mechanism's keys and values on the CPU backend.
    pub(crate) fn rows(&self) -> Option<MemoryRows<'_>> {
        let (k, v, mask, outside, longest) = match &self.remembered {
            Remembered::Total(_) => return None,
            Remembered::Whole(whole) => (&whole.0, &whole.1, &whole.2, None, usize::MAX),
            Remembered::Near(near) => (&near.k, &near.v, &near.mask, Some(&near.outside), near.longest),
        };
        let numbers = |x: &Tensor<4>| to_flex(x.clone()).ok().map(backend::adjacent_rows);
        Some(MemoryRows { k: numbers(k)?, v: numbers(v)?, mask, outside, longest })
    }

    /// The memories of the batch entries `indices`, in that order; an entry may come several times.
    pub(crate) fn select(&self, indices: &[usize], device: &Device) -> Result<Self> {
        let rows = index_tensor(indices, device);
        let take = |x: &Tensor<4>| x.clone().select(0, rows.clone());
        let remembered = match &self.remembered {
            Remembered::Total(total) => Remembered::Total(Box::new(total.select(&rows))),
            Remembered::Whole(whole) => {
                let (k, v, mask) = whole.as_ref();
                let keys = k.dims()[2];
                Remembered::Whole(Box::new((take(k), take(v), mask.select(indices, keys))))
            }
            Remembered::Near(near) => {
                let (k, v) = (take(&near.k), take(&near.v));
                Remembered::Near(Box::new(Near {
                    k,
                    v,
                    outside: near.outside.select(indices)?,
                    ..near.as_ref().clone()
                }))
            }
        };
        Ok(Self { made_by: self.made_by.clone(), remembered })
    }
}
