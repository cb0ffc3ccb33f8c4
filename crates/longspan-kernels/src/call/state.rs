//! The state of a prefix: all that later tokens need to know of earlier ones, of a size that does not grow.

use std::fmt;
use std::hash::{Hash, Hasher};

use super::{Dims, Lines};
use crate::error::{Error, expect};
use crate::simd::Real;
use crate::simd::rows::line;

/// Parts that one head's state may have.
pub(crate) const PARTS: usize = 6;

/// The layout of states. It rises with every change of what their numbers mean.
const VERSION: u32 = 1;

/// Whose state it is, and its sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StateShape {
    /// The mechanism's name; a state of one means nothing to another.
    pub mechanism: &'static str,
    /// The version of the layout, for states that are stored.
    pub version: u32,
    /// A fingerprint of the options that made it: those on which the meaning of its numbers depends, such as feature map and
    /// decay. Options that only read a state, such as `normalize`, don't count. The same on every machine.
    pub options: u64,
    /// Independent sequences.
    pub batch: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Numbers in each part of one head's state, in the order that the mechanism's page gives; unused ones are 0.
    pub parts: [usize; PARTS],
}

/// The state of a prefix, a plain value: clone it for beam search, store its [`numbers`](State::numbers), send it.
///
/// It holds the [parts](StateShape::parts) of each batch entry and key/value head, one after the other; what they mean
/// is said by the mechanism, for one in [`kernelized`](crate::kernelized).
#[derive(Debug, PartialEq)]
pub struct State<T> {
    shape: StateShape,
    numbers: Lines<T>,
}

impl<T: Real> Clone for State<T> {
    fn clone(&self) -> Self {
        Self { shape: self.shape, numbers: self.numbers.clone() }
    }
}

impl StateShape {
    /// The sizes of a state for calls of these sizes, made with options of this fingerprint.
    pub(crate) fn new(mechanism: &'static str, options: u64, dims: &Dims, parts: [usize; PARTS]) -> Self {
        Self { mechanism, version: VERSION, options, batch: dims.batch, kv_heads: dims.kv_heads, parts }
    }

    /// Gives one part so many numbers more, which mean nothing, that the numbers of each head take whole cache lines. Loads and
    /// stores of its sums then cross none; those that did made a step's pass over them take a third longer.
    pub(crate) fn in_lines(mut self, part: usize) -> Self {
        let len = self.parts.iter().try_fold(0usize, |sum, &part| sum.checked_add(part));
        if let Some((len, whole)) = len.and_then(|len| Some((len, len.checked_next_multiple_of(line::<f32>())?))) {
            self.parts[part] += whole - len;
        }
        self
    }

    /// The sizes of a call of no tokens with such a state, and heads of these widths.
    pub(crate) fn dims(&self, head_dim: usize, value_dim: usize) -> Dims {
        let Self { batch, kv_heads, .. } = *self;
        Dims { batch, heads: kv_heads, kv_heads, queries: 0, keys: 0, head_dim, value_dim }
    }

    /// Numbers for one batch entry and head.
    pub fn head_len(&self) -> usize {
        self.parts.iter().sum()
    }
}

/// In the words of errors.
impl fmt::Display for StateShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mechanism, batch, kv_heads, parts, .. } = self;
        write!(f, "a state of {mechanism}, batch {batch}, key/value heads {kv_heads}, parts {parts:?}")
    }
}

/// Whether a mark of a state is a whole number from 0 on, below a limit.
pub(crate) fn is_count<T: Real>(mark: T, below: usize) -> bool {
    let mark = mark.to_f64();
    mark >= 0.0 && mark < below as f64 && mark.fract() == 0.0
}

/// The fingerprint of options: the same on every machine, unlike the standard library's hashes.
pub(crate) fn fingerprint(options: &impl Hash) -> u64 {
    let mut hasher = Fingerprint(0xcbf2_9ce4_8422_2325);
    options.hash(&mut hasher);
    hasher.finish()
}

struct Fingerprint(u64);

impl Hasher for Fingerprint {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }

    fn write_u8(&mut self, x: u8) {
        self.write_u64(x.into());
    }

    fn write_u64(&mut self, x: u64) {
        // The multiplier of SplitMix64: each number reaches all bits of the product, and the rotation brings the high ones down.
        self.0 = (self.0 ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }

    fn write_usize(&mut self, x: usize) {
        self.write_u64(x as u64);
    }

    fn write_isize(&mut self, x: isize) {
        self.write_u64(x as u64);
    }
}

impl<T: Real> State<T> {
    /// A state of zeros.
    pub(crate) fn zeros(shape: StateShape) -> Result<Self, Error> {
        let head = shape.parts.iter().fold(0usize, |sum, &part| sum.saturating_add(part));
        let len = head.saturating_mul(shape.batch).saturating_mul(shape.kv_heads);
        Ok(Self { shape, numbers: Lines::zeros(len)? })
    }

    /// A clone, or an error where the machine has not the memory.
    pub fn try_clone(&self) -> Result<Self, Error> {
        Ok(Self { shape: self.shape, numbers: Lines::copy(&self.numbers)? })
    }

    /// Whose state it is, and its sizes.
    pub fn shape(&self) -> StateShape {
        self.shape
    }

    /// All numbers, in the order that [`State`] describes.
    pub fn numbers(&self) -> &[T] {
        &self.numbers
    }

    /// A state from numbers that [`State::numbers`] gave, perhaps in another process. The mechanism that takes it looks
    /// at the numbers themselves.
    pub fn from_numbers(shape: StateShape, numbers: Vec<T>) -> Result<Self, Error> {
        let head = shape.parts.iter().fold(0usize, |sum, &part| sum.saturating_add(part));
        let expected = head.saturating_mul(shape.batch).saturating_mul(shape.kv_heads);
        let got = || numbers.len().to_string();
        expect(numbers.len() == expected, "state", "numbers", || format!("{expected} for {shape}"), got)?;
        Ok(Self { shape, numbers: Lines::copy(&numbers)? })
    }

    /// The states of the batch entries `indices`, in that order; an entry may come several times (beam search).
    pub fn select(&self, indices: &[usize]) -> Result<Self, Error> {
        let StateShape { batch, kv_heads, .. } = self.shape;
        for &index in indices {
            expect(index < batch, "state", "batch index", || format!("less than {batch}"), || index.to_string())?;
        }
        let entry = kv_heads * self.shape.head_len();
        let entries = indices.iter().map(|&index| &self.numbers[index * entry..][..entry]);
        let numbers = Lines::gather(indices.len().saturating_mul(entry), entries)?;
        Ok(Self { shape: StateShape { batch: indices.len(), ..self.shape }, numbers })
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        std::mem::size_of_val(&*self.numbers)
    }

    /// All numbers, to be changed: the heads of each batch entry one after the other.
    pub(crate) fn numbers_mut(&mut self) -> &mut [T] {
        &mut self.numbers
    }

    /// Checks that the state was made with the options, and has the sizes, that `operation` wants for `argument`.
    pub(crate) fn check(
        &self,
        operation: &'static str,
        argument: &'static str,
        expected: StateShape,
    ) -> Result<(), Error> {
        let own = self.shape;
        let holds = own.version == expected.version;
        let got = || format!("one of layout {}, made by another version of longspan: make it anew", own.version);
        expect(holds, operation, argument, || format!("a state of layout {}", expected.version), got)?;
        let holds = own.mechanism != expected.mechanism || own.options == expected.options;
        let got = || "one made with others: another feature map, decay, or table of positions".into();
        expect(holds, operation, argument, || "a state that was made with the same options".into(), got)?;
        expect(own == expected, operation, argument, || expected.to_string(), || own.to_string())
    }

    /// One part of every head's state, batch entry after batch entry.
    pub(crate) fn each(&self, part: usize) -> impl Iterator<Item = &[T]> {
        let from: usize = self.shape.parts[..part].iter().sum();
        let to = from + self.shape.parts[part];
        self.numbers.chunks_exact(self.shape.head_len().max(1)).map(move |head| &head[from..to])
    }

    /// The parts of one head's state.
    pub(crate) fn head(&self, batch: usize, head: usize) -> [&[T]; PARTS] {
        let len = self.shape.head_len();
        let mut rest = &self.numbers[(batch * self.shape.kv_heads + head) * len..][..len];
        self.shape.parts.map(|part| {
            let (first, others) = rest.split_at(part);
            rest = others;
            first
        })
    }

    /// The parts of every head's state, to be read.
    pub(crate) fn heads(&self) -> impl Iterator<Item = [&[T]; PARTS]> {
        let StateShape { batch, kv_heads, .. } = self.shape;
        (0..batch * kv_heads).map(|head| self.head(0, head))
    }

    /// The parts of every head's state, batch entry after batch entry.
    pub(crate) fn heads_mut(&mut self) -> impl Iterator<Item = [&mut [T]; PARTS]> {
        let parts = self.shape.parts;
        // A state of no numbers has no heads to change. Written out: a loop over the parts took a twelfth of a short step.
        self.numbers.chunks_exact_mut(self.shape.head_len().max(1)).map(move |head| {
            let [a, b, c, d, e, _] = parts;
            let (a, rest) = head.split_at_mut(a);
            let (b, rest) = rest.split_at_mut(b);
            let (c, rest) = rest.split_at_mut(c);
            let (d, rest) = rest.split_at_mut(d);
            let (e, f) = rest.split_at_mut(e);
            [a, b, c, d, e, f]
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Bias, FeatureMap, Toeplitz};

    #[test]
    fn fingerprints_are_the_same_on_every_machine() {
        // Recorded: stored states are refused if one of these changes without a new version.
        assert_eq!(fingerprint(&(FeatureMap::EluPlusOne, 7usize)), RECORDED);
    }

    /// Of `elu+1` and 7.
    const RECORDED: u64 = 7_435_369_552_699_073_851;

    #[test]
    fn options_tell_states_apart() {
        let maps: Vec<u64> = FeatureMap::ALL.iter().map(fingerprint).collect();
        for (n, own) in maps.iter().enumerate() {
            assert!(!maps[n + 1..].contains(own), "{:?}", FeatureMap::ALL[n]);
        }
        let biases = [Bias::clipped(3), Bias::clipped(4), Bias::symmetric(4)].map(Toeplitz::new);
        let biases = biases.map(|toeplitz| fingerprint(&toeplitz.bias));
        assert!(biases[0] != biases[1] && biases[1] != biases[2]);
    }
}
