//! The state of a prefix: all that later tokens need to know of earlier ones, of a size that does not grow.

use std::fmt;

use super::{Dims, Lines, Mechanism};
use crate::error::{Error, expect};
use crate::simd::Real;
use crate::simd::rows::line;

/// Parts that one head's state may have.
pub(crate) const PARTS: usize = 6;

/// The layout of states. It rises with every change of what their numbers or fingerprints mean.
const VERSION: u32 = 2;

/// What the bytes of a state begin with.
const MAGIC: [u8; 8] = *b"longspan";

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

    /// Pads one part so that the numbers of each head take whole cache lines: loads and stores across lines made a step's pass over its
    /// sums take a third longer.
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

/// Refuses a state whose marks would count to `most` in numbers of type `T`, which hold whole numbers up to a limit alone: 2²⁴ in
/// `f32`, 2⁵³ in `f64`.
pub(crate) fn check_count<T: Real>(operation: &'static str, argument: &'static str, most: usize) -> Result<(), Error> {
    let limit = (2.0 / T::EPSILON.to_f64()) as usize;
    let expected = || format!("at most {limit}, since a state of {} counts no further", std::any::type_name::<T>());
    expect(most <= limit, operation, argument, expected, || most.to_string())
}

/// The fingerprint of options, given as numbers that never change their meaning: stored states carry it.
pub(crate) fn fingerprint(options: impl IntoIterator<Item = u64>) -> u64 {
    // The multiplier of SplitMix64: each number reaches all bits of the product, and the rotation brings the high ones down.
    let add = |all: u64, x: u64| (all ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    options.into_iter().fold(0xcbf2_9ce4_8422_2325, add)
}

/// The number by which a fingerprint stands for a size that may be missing.
pub(crate) fn optional_id(size: Option<usize>) -> u64 {
    size.map_or(0, |size| (size as u64).wrapping_add(1))
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

    /// The state as bytes, the same on every machine: what [`from_bytes`](Self::from_bytes) takes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let StateShape { mechanism, version, options, batch, kv_heads, parts } = self.shape;
        let mut bytes = MAGIC.to_vec();
        bytes.extend([size_of::<T>() as u8, mechanism.len() as u8]);
        bytes.extend(mechanism.as_bytes());
        bytes.extend(version.to_le_bytes());
        bytes.extend(options.to_le_bytes());
        [batch, kv_heads].into_iter().chain(parts).for_each(|size| bytes.extend((size as u64).to_le_bytes()));
        for &x in self.numbers.iter() {
            match size_of::<T>() {
                4 => bytes.extend((x.to_f64() as f32).to_le_bytes()),
                _ => bytes.extend(x.to_f64().to_le_bytes()),
            }
        }
        bytes
    }

    /// A state of a mechanism from the bytes that [`to_bytes`](Self::to_bytes) gave. The call that takes it looks at options, sizes and
    /// numbers.
    ///
    /// # Errors
    /// Bytes that are no state, of another mechanism or number type, or too few or too many.
    pub fn from_bytes(mechanism: &(impl Mechanism + ?Sized), bytes: &[u8]) -> Result<Self, Error> {
        let name = mechanism.name();
        let refuse =
            |expected: String, got: String| Error::Argument { operation: name, argument: "state", expected, got };
        let mut rest = bytes;
        let mut take = |len: usize| {
            let (part, others) = rest.split_at_checked(len)?;
            rest = others;
            Some(part)
        };
        let mut header = || {
            let (magic, [width, name_len]) = (take(MAGIC.len())?, [take(1)?[0], take(1)?[0]]);
            let own = take(name_len.into())?.to_vec();
            let version = u32::from_le_bytes(take(4)?.try_into().ok()?);
            let mut number = || Some(u64::from_le_bytes(take(8)?.try_into().ok()?));
            let options = number()?;
            let mut sizes = [0usize; 2 + PARTS];
            for size in &mut sizes {
                *size = usize::try_from(number()?).ok()?;
            }
            (magic == MAGIC).then_some((width, own, version, options, sizes))
        };
        let no_state = || refuse("the bytes of a state".into(), format!("{} bytes that are none", bytes.len()));
        let (width, own, version, options, [batch, kv_heads, parts @ ..]) = header().ok_or_else(no_state)?;
        if own != name.as_bytes() {
            return Err(refuse(format!("a state of {name}"), format!("one of {}", String::from_utf8_lossy(&own))));
        }
        if usize::from(width) != size_of::<T>() {
            let bits = |width: usize| format!("numbers of {} bits", 8 * width);
            return Err(refuse(bits(size_of::<T>()), bits(width.into())));
        }
        let (numbers, after) = rest.as_chunks::<4>();
        let numbers: Vec<T> = if width == 4 {
            numbers.iter().map(|&bytes| T::from_f64(f32::from_le_bytes(bytes).into())).collect()
        } else {
            rest.as_chunks::<8>().0.iter().map(|&bytes| T::from_f64(f64::from_le_bytes(bytes))).collect()
        };
        if !after.is_empty() || rest.len() != numbers.len() * usize::from(width) {
            return Err(no_state());
        }
        Self::from_numbers(StateShape { mechanism: name, version, options, batch, kv_heads, parts }, numbers)
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

    pub(crate) fn head(&self, batch: usize, head: usize) -> [&[T]; PARTS] {
        let len = self.shape.head_len();
        let mut rest = &self.numbers[(batch * self.shape.kv_heads + head) * len..][..len];
        self.shape.parts.map(|part| {
            let (first, others) = rest.split_at(part);
            rest = others;
            first
        })
    }

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
    use crate::{Bias, FeatureMap};

    /// Recorded: stored states are refused, or taken for others, if one of these changes without a new version.
    #[test]
    fn fingerprints_never_change() {
        let maps = FeatureMap::ALL.map(|map| fingerprint(map.state_id()));
        assert_eq!(maps, RECORDED);
    }

    const RECORDED: [u64; 10] = [
        10_503_129_088_700_852_409,
        6_342_557_989_662_952_870,
        4_118_896_678_497_993_264,
        11_114_080_345_882_286_197,
        8_890_419_034_717_326_591,
        4_729_847_936_216_297_964,
        13_337_741_657_047_245_803,
        6_683_006_617_190_434_504,
        11_741_280_497_238_658_416,
        11_130_329_239_520_353_716,
    ];

    #[test]
    fn options_tell_states_apart() {
        let biases = [
            Bias::clipped(3),
            Bias::clipped(4),
            Bias::symmetric(4),
            Bias::Buckets { buckets: 4, max_distance: 7, bidirectional: false },
            Bias::Buckets { buckets: 4, max_distance: 7, bidirectional: true },
            Bias::Grid { height: 4, width: 7 },
        ];
        let hedgehog = |name: &str| name.parse::<FeatureMap>().unwrap().state_id();
        let others = ["hedgehog:8", "hedgehog:8:exp", "prf:8", "prf:seed=8", "nprf:8", "dpfp:8"].map(hedgehog);
        let maps = FeatureMap::ALL.map(FeatureMap::state_id).into_iter().chain(others).map(fingerprint);
        let all: Vec<u64> = maps.chain(biases.map(|bias| fingerprint(bias.state_id()))).collect();
        for (n, own) in all.iter().enumerate() {
            assert!(!all[n + 1..].contains(own), "{n}");
        }
    }
}
