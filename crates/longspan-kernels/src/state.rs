//! The state of a prefix: all that later tokens need to know of earlier ones, of a size that does not grow.

use crate::error::{Error, expect};
use crate::real::Real;

/// Sizes of a [`State`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StateShape {
    /// Independent sequences.
    pub batch: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Features of a key, `m`; 0 where the content term is absent.
    pub features: usize,
    /// Numbers in one value, `dv`.
    pub value_dim: usize,
    /// Rows of the ring of recent values: the radius of the relative positions, 0 where they are absent.
    pub ring: usize,
    /// Whether there is a sum of the values that fell out of the ring.
    pub far: bool,
}

/// The state of a prefix, a plain value: clone it for beam search, store its [`numbers`](State::numbers), send it.
///
/// For each batch entry and key/value head it holds, one after the other,
/// `S = Σ φ(k_j) v_jᵀ` (`features × value_dim`), `z = Σ φ(k_j)` (`features`), the exponent that [`FeatureMap::Exp`]
/// subtracted from the keys (1), the far sum `Σ v⁺_j` (`value_dim + 1`) and the ring of the last values
/// `v⁺ = [v, 1]`, oldest first (`ring × (value_dim + 1)`; rows before the first token and of ignored keys are 0).
///
/// [`FeatureMap::Exp`]: crate::FeatureMap::Exp
#[derive(Debug, Clone, PartialEq)]
pub struct State<T> {
    shape: StateShape,
    numbers: Vec<T>,
}

/// The parts of one head's state.
#[derive(Debug)]
pub(crate) struct HeadState<'a, T> {
    /// `features × value_dim`.
    pub sum: &'a mut [T],
    /// `features`.
    pub keys: &'a mut [T],
    /// The exponent subtracted from the keys so far.
    pub shift: &'a mut T,
    /// `value_dim + 1`, or empty.
    pub far: &'a mut [T],
    /// `ring × (value_dim + 1)`, oldest first.
    pub ring: &'a mut [T],
}

impl StateShape {
    /// Numbers for one batch entry and head.
    pub fn head_len(&self) -> usize {
        self.features * (self.value_dim + 1) + 1 + (usize::from(self.far) + self.ring) * (self.value_dim + 1)
    }
}

impl<T: Real> State<T> {
    /// The state before the first token, with `shift` as the exponent subtracted from keys.
    pub(crate) fn empty(shape: StateShape, shift: T) -> Self {
        let mut state = Self { shape, numbers: vec![T::ZERO; shape.batch * shape.kv_heads * shape.head_len()] };
        for batch in 0..shape.batch {
            for head in 0..shape.kv_heads {
                *state.head_mut(batch, head).shift = shift;
            }
        }
        state
    }

    /// The sizes.
    pub fn shape(&self) -> StateShape {
        self.shape
    }

    /// All numbers, in the order that [`State`] describes.
    pub fn numbers(&self) -> &[T] {
        &self.numbers
    }

    /// A state from numbers that [`State::numbers`] gave, perhaps in another process.
    pub fn from_numbers(shape: StateShape, numbers: Vec<T>) -> Result<Self, Error> {
        let expected = shape.batch * shape.kv_heads * shape.head_len();
        expect(
            numbers.len() == expected,
            "state",
            "numbers",
            || format!("{expected} for {shape:?}"),
            || numbers.len().to_string(),
        )?;
        Ok(Self { shape, numbers })
    }

    /// The states of the batch entries `indices`, in that order; an entry may come several times (beam search).
    pub fn select(&self, indices: &[usize]) -> Result<Self, Error> {
        let entry = self.shape.kv_heads * self.shape.head_len();
        let mut numbers = Vec::with_capacity(indices.len() * entry);
        for &index in indices {
            expect(
                index < self.shape.batch,
                "state",
                "batch index",
                || format!("less than {}", self.shape.batch),
                || index.to_string(),
            )?;
            numbers.extend_from_slice(&self.numbers[index * entry..][..entry]);
        }
        Ok(Self { shape: StateShape { batch: indices.len(), ..self.shape }, numbers })
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        std::mem::size_of_val(self.numbers.as_slice())
    }

    /// Splits one head's numbers.
    pub(crate) fn head_mut(&mut self, batch: usize, head: usize) -> HeadState<'_, T> {
        let len = self.shape.head_len();
        let start = (batch * self.shape.kv_heads + head) * len;
        split(&self.shape, &mut self.numbers[start..start + len])
    }

    /// Every head's numbers, each a task's own.
    pub(crate) fn heads_mut(&mut self) -> impl Iterator<Item = HeadState<'_, T>> {
        let shape = self.shape;
        self.numbers.chunks_exact_mut(shape.head_len()).map(move |numbers| split(&shape, numbers))
    }
}

fn split<'a, T>(shape: &StateShape, numbers: &'a mut [T]) -> HeadState<'a, T> {
    let width = shape.value_dim + 1;
    let (sum, rest) = numbers.split_at_mut(shape.features * shape.value_dim);
    let (keys, rest) = rest.split_at_mut(shape.features);
    let (shift, rest) = rest.split_at_mut(1);
    let (far, ring) = rest.split_at_mut(if shape.far { width } else { 0 });
    HeadState { sum, keys, shift: &mut shift[0], far, ring }
}
