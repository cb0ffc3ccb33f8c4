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
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head<S> {
    /// `features × value_dim`.
    pub sum: S,
    /// `features`.
    pub keys: S,
    /// The exponent subtracted from the keys so far; one number.
    pub shift: S,
    /// `value_dim + 1`, or empty.
    pub far: S,
    /// `ring × (value_dim + 1)`, oldest first.
    pub ring: S,
}

impl StateShape {
    /// Numbers for one batch entry and head.
    pub fn head_len(&self) -> usize {
        self.parts().iter().sum()
    }

    /// Numbers of the parts of [`Head`].
    fn parts(&self) -> [usize; 5] {
        let width = self.value_dim + 1;
        let far = if self.far { width } else { 0 };
        [self.features * self.value_dim, self.features, 1, far, self.ring * width]
    }
}

impl<T: Real> State<T> {
    /// The state before the first token, with `shift` as the exponent subtracted from keys.
    pub(crate) fn empty(shape: StateShape, shift: T) -> Self {
        let mut state = Self { shape, numbers: vec![T::ZERO; shape.batch * shape.kv_heads * shape.head_len()] };
        for head in state.heads_mut() {
            head.shift[0] = shift;
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

    /// One head's numbers.
    pub(crate) fn head(&self, batch: usize, head: usize) -> Head<&[T]> {
        let len = self.shape.head_len();
        let numbers = &self.numbers[(batch * self.shape.kv_heads + head) * len..][..len];
        let [sum, keys, shift, far, _] = self.shape.parts();
        let (sum, rest) = numbers.split_at(sum);
        let (keys, rest) = rest.split_at(keys);
        let (shift, rest) = rest.split_at(shift);
        let (far, ring) = rest.split_at(far);
        Head { sum, keys, shift, far, ring }
    }

    /// Every head's numbers, batch entry after batch entry.
    pub(crate) fn heads_mut(&mut self) -> impl Iterator<Item = Head<&mut [T]>> {
        let [sum, keys, shift, far, _] = self.shape.parts();
        self.numbers.chunks_exact_mut(self.shape.head_len()).map(move |numbers| {
            let (sum, rest) = numbers.split_at_mut(sum);
            let (keys, rest) = rest.split_at_mut(keys);
            let (shift, rest) = rest.split_at_mut(shift);
            let (far, ring) = rest.split_at_mut(far);
            Head { sum, keys, shift, far, ring }
        })
    }
}
