//! States: what a step keeps of all earlier tokens, for any mechanism on any device.

use std::sync::Arc;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use longspan_kernels::Kernel;
use longspan_kernels::StateShape;
use serde::{Deserialize, Serialize};

use super::flex::PrefixState;
use super::{Layer, Running, foreign_state, place};
use crate::attention::index_tensor;
use crate::error::{Error, Result, argument};

/// The state of a prefix under any mechanism, a plain value: clone it to try two continuations, store it with
/// [`Attention::store`](crate::attention::Attention::store). The default is the state before the first token.
///
/// Its size does not grow, except under softmax attention without a window. On other devices than the CPU, and where a step on a training
/// device has begun it, which gradients then follow through all steps, mechanisms with a table of positions (`aft-full`, `toeplitz` with
/// a table) keep the keys and values so far, of at most as many tokens as the table has places.
#[derive(Debug, Clone, Default)]
pub struct AttentionState {
    pub(super) inner: Option<Inner>,
    /// The mechanism and options that made one of tensors; the kernels' own say it themselves.
    pub(super) made_by: Arc<str>,
}

impl From<longspan_kernels::State<f32>> for AttentionState {
    fn from(state: longspan_kernels::State<f32>) -> Self {
        Some(Inner::Kernels(Arc::new(PrefixState::F32(state)))).into()
    }
}

impl AttentionState {
    /// Where it lies, if it is one of tensors.
    pub(super) fn device(&self) -> Option<Device> {
        match &self.inner {
            Some(Inner::Tensors(state)) => state.device(),
            _ => None,
        }
    }

    /// Whether it is one of tensors, which autodiff may follow.
    pub(crate) fn is_followed(&self) -> bool {
        matches!(self.inner, Some(Inner::Tensors(_)))
    }

    /// The kernels' state in `f32`, made where it is that before the first token; none of another kind.
    pub(crate) fn in_kernels(
        &mut self,
        empty: impl FnOnce() -> Result<longspan_kernels::State<f32>>,
    ) -> Result<Option<&mut longspan_kernels::State<f32>>> {
        if self.inner.is_none() {
            *self = empty()?.into();
        }
        Ok(match &mut self.inner {
            Some(Inner::Kernels(state)) => Arc::make_mut(state).as_f32(),
            _ => None,
        })
    }
}

impl From<Option<Inner>> for AttentionState {
    fn from(inner: Option<Inner>) -> Self {
        Self { inner, made_by: Arc::default() }
    }
}

/// The mechanism, options and heads of a layer, as the states and memories of tensors that it makes say them.
pub(crate) fn maker(layer: &dyn Layer) -> Arc<str> {
    format!("{:?} {:?}", layer.kernel(), layer.heads()).into()
}

/// The fingerprints of the options of a layer, as the kernels' states have them; none where there are no such states.
fn fingerprints(layer: &dyn Layer) -> impl Iterator<Item = u64> {
    let dims = layer.heads().dims(1, 0, 0);
    [Some(layer.kernel()), layer.kernel_at_positions()].into_iter().flatten().filter_map(move |kernel| {
        let kernel: &dyn Kernel<f32> = &*kernel;
        kernel.empty_state(&dims).ok().map(|state| state.shape().options)
    })
}

#[derive(Debug, Clone)]
pub(super) enum Inner {
    /// Shared until it is changed, as tensors are: what is kept of it costs nothing.
    Kernels(Arc<PrefixState>),
    Tensors(TensorState),
}

/// A state in tensors, which autodiff can follow.
#[derive(Debug, Clone)]
pub(crate) enum TensorState {
    /// Of kernelized attention.
    Sums(Box<Running>),
    /// The keys and values that later tokens see, `[batch, kv_heads, tokens, ·]` each.
    Past(Box<[Tensor<4>; 2]>),
}

/// A state as numbers, for any format that serde writes. Made by
/// [`Attention::store`](crate::attention::Attention::store).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredState {
    mechanism: String,
    form: Form,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    options: Option<u64>,
    tensors: Vec<TensorData>,
}

impl StoredState {
    /// How many numbers it holds.
    pub fn len(&self) -> usize {
        self.tensors.iter().map(TensorData::num_elements).sum()
    }

    /// Whether it is the state before the first token.
    pub fn is_empty(&self) -> bool {
        self.form == Form::Empty
    }

    /// What it is, and its numbers: for formats that keep tensors apart from text.
    pub fn into_parts(self) -> (StateForm, Vec<TensorData>) {
        (StateForm { mechanism: self.mechanism, form: self.form, options: self.options }, self.tensors)
    }

    /// The opposite of [`into_parts`](Self::into_parts). What does not fit is refused where the state is restored.
    pub fn from_parts(form: StateForm, tensors: Vec<TensorData>) -> Self {
        Self { mechanism: form.mechanism, form: form.form, options: form.options, tensors }
    }
}

/// What the numbers of a [`StoredState`] are. Made by [`StoredState::into_parts`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StateForm {
    mechanism: String,
    form: Form,
    /// The [fingerprint](fingerprints) of what made a state in tensors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    options: Option<u64>,
}

/// What the numbers of a [`StoredState`] are.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Form {
    /// The state before the first token.
    Empty,
    /// One tensor in the kernels' order.
    Kernels { version: u32, options: u64, batch: usize, kv_heads: usize, parts: [usize; PARTS] },
    /// The tensors of [`Running`].
    Sums {
        batch: usize,
        heads: usize,
        value_dim: usize,
        #[serde(default)]
        tokens: usize,
    },
    /// All keys and values.
    Past,
    /// Those that later tokens see, at most `sees`.
    Latest { sees: usize },
}

/// Parts of a kernel's state.
const PARTS: usize = 6;

const NAME: &str = "attention state";

impl AttentionState {
    /// Cut from the graph: no gradient reaches the tokens so far.
    pub(super) fn detach(&mut self) {
        if let Some(Inner::Tensors(state)) = &mut self.inner {
            state.tensors().into_iter().for_each(|x| *x = x.clone().detach());
        }
    }

    /// The states of the batch entries `indices`, in that order; an entry may come several times (beam search).
    ///
    /// # Errors
    /// An index beyond the batch.
    pub fn select(&self, indices: &[usize]) -> Result<Self> {
        let inner = match &self.inner {
            None => None,
            Some(Inner::Kernels(state)) => Some(Inner::Kernels(Arc::new(state.select(indices)?))),
            Some(Inner::Tensors(state)) => {
                let batch = state.batch();
                let holds = indices.iter().all(|&index| index < batch);
                argument(holds, NAME, "indices", || format!("indices below {batch}"), || format!("{indices:?}"))?;
                let device = state.device().unwrap_or_default();
                Some(Inner::Tensors(state.select(&index_tensor(indices, &device))))
            }
        };
        Ok(Self { inner, made_by: self.made_by.clone() })
    }

    /// The states of several batches as those of one, in that order. All must be before their first token, or none.
    ///
    /// # Errors
    /// States of different mechanisms, sizes or numbers of tokens.
    pub fn join(states: &[&Self]) -> Result<Self> {
        let unlike = || Error::Argument {
            operation: NAME,
            argument: "states",
            expected: "states of one mechanism and size".into(),
            got: "different ones".into(),
        };
        if states.iter().all(|state| state.inner.is_none()) {
            return Ok(Self::default());
        }
        {
            let kernels = states.iter().map(|state| match &state.inner {
                Some(Inner::Kernels(state)) => Some(&**state),
                _ => None,
            });
            if let Some(kernels) = kernels.collect::<Option<Vec<_>>>() {
                let joined = PrefixState::join(&kernels).ok_or_else(unlike)??;
                return Ok(Some(Inner::Kernels(Arc::new(joined))).into());
            }
        }
        let own = states.iter().map(|state| match &state.inner {
            Some(Inner::Tensors(own)) => Some(own.clone()),
            _ => None,
        });
        let mut own = own.collect::<Option<Vec<_>>>().ok_or_else(unlike)?;
        let sizes = |x: &mut Tensor<4>| ([x.dims()[1], x.dims()[2], x.dims()[3]], place(x));
        let alike: Vec<Vec<_>> = own.iter_mut().map(|one| one.tensors().into_iter().map(sizes).collect()).collect();
        let (made_by, batch) = (states[0].made_by.clone(), own.iter().map(TensorState::batch).sum());
        let uneven = own.iter().any(|one| one.counted() != own[0].counted());
        if uneven || states.iter().any(|state| state.made_by != made_by) || alike.iter().any(|one| *one != alike[0]) {
            return Err(unlike());
        }
        let mut joined = own[0].clone();
        for (n, to) in joined.tensors().into_iter().enumerate() {
            *to = Tensor::cat(own.iter_mut().map(|one| one.tensors()[n].clone()).collect(), 0);
        }
        if let TensorState::Sums(sums) = &mut joined {
            sums.shape[0] = batch;
        }
        Ok(Self { inner: Some(Inner::Tensors(joined)), made_by })
    }

    /// The state as numbers; nothing is rounded.
    ///
    /// # Errors
    /// A state of another layer, and a device that gives no numbers back.
    pub(crate) fn to_stored(&self, layer: &dyn Layer) -> Result<StoredState> {
        let own = match &self.inner {
            None => true,
            Some(Inner::Kernels(state)) => {
                let StateShape { mechanism, options, kv_heads, .. } = state.shape();
                let sizes = (mechanism, kv_heads) == (layer.name(), layer.heads().kv_heads);
                sizes && fingerprints(layer).any(|own| own == options)
            }
            Some(Inner::Tensors(_)) => self.made_by == maker(layer),
        };
        if !own {
            return Err(foreign_state(layer));
        }
        let read = |x: &Tensor<4>| x.clone().try_into_data().map_err(|error| Error::Device(format!("{error:?}")));
        let (form, tensors) = match &self.inner {
            None => (Form::Empty, Vec::new()),
            Some(Inner::Kernels(state)) => {
                let StateShape { version, options, batch, kv_heads, parts, .. } = state.shape();
                (Form::Kernels { version, options, batch, kv_heads, parts }, vec![state.numbers()])
            }
            Some(Inner::Tensors(TensorState::Sums(sums))) => {
                let [batch, heads, value_dim] = sums.shape;
                let tensors = sums.tensors.iter().map(read).collect::<Result<_>>()?;
                (Form::Sums { batch, heads, value_dim, tokens: sums.tokens }, tensors)
            }
            Some(Inner::Tensors(TensorState::Past(past))) => {
                let form = layer.sees().map_or(Form::Past, |sees| Form::Latest { sees });
                (form, past.iter().map(read).collect::<Result<_>>()?)
            }
        };
        let options = if self.is_followed() { fingerprints(layer).next() } else { None };
        Ok(StoredState { mechanism: layer.name().into(), form, options, tensors })
    }

    /// Rebuilds the state of `layer` on `device` from its numbers.
    pub(crate) fn from_stored(layer: &dyn Layer, stored: &StoredState, device: &Device) -> Result<Self> {
        let name = layer.name();
        let expected = || format!("a state of {name}");
        argument(stored.mechanism == name, NAME, "mechanism", expected, || format!("one of {}", stored.mechanism))?;
        let options = match stored.form {
            Form::Kernels { options, .. } => Some(options),
            _ => stored.options,
        };
        if options.is_some_and(|options| fingerprints(layer).all(|own| own != options)) {
            return Err(foreign_state(layer));
        }
        let float = |x: &TensorData| matches!(x.dtype(), DType::F64 | DType::F32 | DType::F16 | DType::BF16);
        let broken = |got: String| Error::Argument {
            operation: NAME,
            argument: "numbers",
            expected: format!("those of a {:?} state of {name}", stored.form),
            got,
        };
        if !stored.tensors.iter().all(float) {
            return Err(broken("tensors that hold no floating-point numbers".into()));
        }
        let read = |x: &TensorData| Tensor::<4>::from_data(x.clone(), (device, x.dtype()));
        let inner = match (stored.form, stored.tensors.as_slice()) {
            (Form::Empty, []) => None,
            (Form::Kernels { version, options, batch, kv_heads, parts }, [numbers]) => {
                let shape = StateShape { mechanism: name, version, options, batch, kv_heads, parts };
                let counted = parts.iter().try_fold(0_usize, |sum, &part| sum.checked_add(part));
                let counted = counted.and_then(|n| n.checked_mul(batch)).and_then(|n| n.checked_mul(kv_heads));
                let heads = layer.heads().kv_heads;
                let expected = || format!("{heads} key/value heads");
                argument(kv_heads == heads, NAME, "heads", expected, || kv_heads.to_string())?;
                if counted != Some(numbers.num_elements()) {
                    return Err(broken(format!("{} numbers", numbers.num_elements())));
                }
                Some(Inner::Kernels(Arc::new(PrefixState::from_numbers(shape, numbers)?)))
            }
            (Form::Sums { batch, heads, value_dim, tokens }, tensors) => {
                let sizes = layer.heads();
                let first = tensors.first().map(TensorData::dtype);
                // Numbers of more are not whole ones any more.
                let fits = heads == sizes.heads && tokens < 1 << 53;
                let fits = fits && tensors.iter().all(|x| x.rank() == 4 && Some(x.dtype()) == first);
                let limit = tensors.iter().map(TensorData::num_elements).sum::<usize>();
                let least = batch.checked_mul(heads).and_then(|n| n.checked_mul(value_dim));
                let (true, Some(dtype)) = (fits && least.is_some_and(|least| least <= limit), first) else {
                    return Err(broken(shapes_of(tensors)));
                };
                let like = Tensor::zeros([batch, heads, 1, sizes.head_dim], (device, dtype));
                let Some(mut sums) = layer.sums().map(|sums| sums.empty(&like, value_dim)) else {
                    return Err(broken("sums, which this mechanism does not keep".into()));
                };
                let wanted = &mut sums.tensors;
                if !wanted.iter().map(|x| x.dims()).eq(tensors.iter().map(|x| x.shape().dims::<4>())) {
                    return Err(broken(shapes_of(tensors)));
                }
                for (to, from) in wanted.iter_mut().zip(tensors) {
                    *to = read(from);
                }
                sums.tokens = tokens;
                Some(Inner::Tensors(TensorState::Sums(Box::new(sums))))
            }
            (Form::Past | Form::Latest { .. }, [k, v])
                if layer.sums().is_none() && k.rank() == 4 && v.rank() == 4 && k.dtype() == v.dtype() =>
            {
                if let Form::Latest { sees } = stored.form {
                    let expected = || format!("the latest keys and values of {:?}", layer.sees());
                    argument(layer.sees() == Some(sees), NAME, "window", expected, || sees.to_string())?;
                }
                let ([batch, _, tokens, _], v_shape) = (k.shape().dims::<4>(), v.shape().dims::<4>());
                let expected = [batch, layer.heads().kv_heads, tokens, layer.key_dim()];
                if v_shape[..3] != expected[..3] || k.shape().dims::<4>() != expected {
                    return Err(broken(shapes_of(&stored.tensors)));
                }
                Some(Inner::Tensors(TensorState::Past(Box::new([read(k), read(v)]))))
            }
            (_, tensors) => return Err(broken(shapes_of(tensors))),
        };
        Ok(Self { inner, made_by: maker(layer) })
    }
}

fn shapes_of(tensors: &[TensorData]) -> String {
    format!("{:?}", tensors.iter().map(|x| (x.shape().to_vec(), x.dtype())).collect::<Vec<_>>())
}

impl TensorState {
    fn batch(&self) -> usize {
        match self {
            Self::Sums(sums) => sums.shape[0],
            Self::Past(past) => past[0].dims()[0],
        }
    }

    fn device(&self) -> Option<Device> {
        let first = match self {
            Self::Sums(sums) => sums.tensors.first(),
            Self::Past(past) => past.first(),
        };
        first.map(Tensor::device)
    }

    /// The tokens that sums count.
    fn counted(&self) -> usize {
        match self {
            Self::Sums(sums) => sums.tokens,
            Self::Past(_) => 0,
        }
    }

    /// All its tensors, in one order.
    fn tensors(&mut self) -> Vec<&mut Tensor<4>> {
        match self {
            Self::Sums(sums) => sums.tensors.iter_mut().collect(),
            Self::Past(past) => past.iter_mut().collect(),
        }
    }

    fn select(&self, indices: &Tensor<1, Int>) -> Self {
        let take = |x: &Tensor<4>| x.clone().select(0, indices.clone());
        match self {
            Self::Sums(sums) => Self::Sums(Box::new(sums.select(indices))),
            Self::Past(past) => Self::Past(Box::new(past.each_ref().map(take))),
        }
    }
}
