//! The state of kernelized attention: what each part of a [`State`] means here.

use super::KernelizedAttention;
use super::layout::FeatureLayout;
use crate::call::{
    CombineGradients, Dims, Mechanism, PARTS, State, StateShape, Stateful, check_count, check_log_decays_of, is_count,
};
use crate::error::{Error, expect};
use crate::fourier::Positions;
use crate::fourier::rotation::angles_after;
use crate::simd::Real;
use crate::simd::block::{add_scaled, dot};

#[derive(Debug, Clone, Copy)]
pub(super) struct Head<S> {
    /// `S = Σ φ(k_j) v_jᵀ`, `features × value_dim`.
    pub sum: S,
    /// `z = Σ φ(k_j)`, `features`.
    pub keys: S,
    /// At least [`MARKS`] numbers that no gradient has a meaning for: the exponent subtracted from the keys so far, which row of
    /// the ring is the oldest, and the number of tokens.
    pub marks: S,
    /// The sum of the values `v⁺ = [v, 1]` that fell out of the ring, `value_dim + 1`, or empty.
    pub far: S,
    /// The last values `v⁺`, `radius × (value_dim + 1)`, in a circle; rows before the first token and of ignored keys
    /// are 0. Under gates the 1 falls with each later token, for which `v` stays as it is.
    pub ring: S,
    /// Under gates the sum of all log decays so far, one number.
    pub passed: S,
}

/// Places of [`Head::marks`].
pub(super) const SHIFT: usize = 0;
pub(super) const OLDEST: usize = 1;
/// The number of tokens is `marks[TOKENS] + TOKENS_CARRY · marks[TOKENS + 1]`: `f32` counts no further than 2²⁴.
const TOKENS: usize = 2;
const TOKENS_CARRY: u64 = 1 << 20;
const MARKS: usize = 4;
const MARKS_PART: usize = 2;
const PASSED_PART: usize = 5;

impl<S> From<[S; PARTS]> for Head<S> {
    fn from([sum, keys, marks, far, ring, passed]: [S; PARTS]) -> Self {
        Self { sum, keys, marks, far, ring, passed }
    }
}

impl<T: Real> Head<&mut [T]> {
    /// Notes the number of tokens that the state holds.
    pub fn set_tokens(&mut self, tokens: u64) {
        self.marks[TOKENS] = T::from_f64((tokens % TOKENS_CARRY) as f64);
        self.marks[TOKENS + 1] = T::from_f64((tokens / TOKENS_CARRY) as f64);
    }

    pub fn tokens(&self) -> u64 {
        tokens(self.marks)
    }

    pub fn count_token(&mut self) {
        self.set_tokens(tokens(self.marks) + 1);
    }
}

fn tokens<T: Real>(marks: &[T]) -> u64 {
    marks[TOKENS].to_f64() as u64 + TOKENS_CARRY * marks[TOKENS + 1].to_f64() as u64
}

impl<'a, T: Real> Head<&'a [T]> {
    pub fn tokens(&self) -> u64 {
        tokens(self.marks)
    }

    /// Rows whose sum is that of the values `v⁺` of all tokens, without decay.
    pub fn values(&self, value_dim: usize) -> impl Iterator<Item = &'a [T]> {
        self.far.chunks_exact(value_dim + 1).chain(self.ring.chunks_exact(value_dim + 1))
    }

    /// The ring's row of `back` tokens ago (1 is the last one), if it reaches that far.
    pub fn ring_row(&self, back: usize, width: usize) -> Option<&'a [T]> {
        self.ring_place(back, width).map(|place| &self.ring[place])
    }

    pub fn ring_place(&self, back: usize, width: usize) -> Option<std::ops::Range<usize>> {
        let rows = self.ring.len() / width;
        let row = (1..=rows).contains(&back).then(|| (self.marks[OLDEST].to_f64() as usize + rows - back) % rows)?;
        Some(row * width..(row + 1) * width)
    }
}

/// The same for a map of `mapped` features, whatever `dims` say.
fn mapped_shape<T: Real>(attention: &KernelizedAttention, dims: &Dims, mapped: usize) -> StateShape {
    let radius = attention.score.shaw().map(|shaw| shaw.radius);
    let layout = FeatureLayout::new::<T>(mapped, &attention.score);
    let (features, weighed) = if attention.score.content() { layout.counts() } else { (0, 0) };
    let width = dims.value_dim + 1;
    let far = if radius.is_some() { width } else { 0 };
    let parts = [features * dims.value_dim, weighed, MARKS, far, radius.unwrap_or(0) * width, attention.gate.into()];
    StateShape::new(attention.name(), attention.fingerprint(), dims, parts).in_lines(MARKS_PART)
}

fn empty_of<T: Real>(attention: &KernelizedAttention, shape: StateShape) -> Result<State<T>, Error> {
    let mut state = State::zeros(shape)?;
    if attention.feature_map.is_exponential() {
        for head in state.heads_mut().map(Head::from) {
            head.marks[SHIFT] = T::NEG_INFINITY;
        }
    }
    Ok(state)
}

/// Two states of one mechanism, one after the other.
struct Pair<'a, T> {
    attention: &'a KernelizedAttention,
    shape: StateShape,
    value_dim: usize,
    /// Of counted Fourier positions: radians a token, so many for each head. None of others.
    rates: Option<(&'a [T], usize)>,
}

/// How one head's numbers of both states enter the sum.
struct Weights<T> {
    /// What a constant decay takes a token; 1 without.
    gamma: f64,
    /// What the gates of all later tokens take; 1 without.
    gates: T,
    /// The exponent of the sum.
    shift: T,
    /// What the sums of the earlier state, and of the later one, are multiplied by.
    before: T,
    since: T,
    /// The angles by which the later features turn.
    turn: Option<[Vec<T>; 2]>,
}

impl<T: Real> Weights<T> {
    /// What is left of the earlier state's numbers, if a constant decay counts so many tokens.
    fn decay(&self, tokens: u64) -> T {
        if self.gamma == 1.0 { self.gates } else { T::from_f64(self.gamma.powf(tokens as f64)) }
    }
}

impl<'a, T: Real> Pair<'a, T> {
    /// Checked.
    fn new(
        attention: &'a KernelizedAttention,
        earlier: &State<T>,
        later: &State<T>,
        parameters: &[&'a [T]],
    ) -> Result<Self, Error> {
        let operation = attention.name();
        let given @ StateShape { kv_heads, parts: [sum, features, _, far, ..], .. } = earlier.shape();
        let (mut weighed, mut mapped) = (features, features);
        if let Some(fourier) = attention.score.fourier() {
            let (blocks, weigh) = fourier.blocks();
            mapped = features / if weigh < blocks { blocks - weigh } else { weigh };
            weighed = mapped * weigh;
        }
        let value_dim = sum.checked_div(weighed).unwrap_or_else(|| far.saturating_sub(1));
        let shape = mapped_shape::<T>(attention, &given.dims(mapped, value_dim), mapped);
        for (state, argument) in [(earlier, "earlier state"), (later, "later state")] {
            state.check(operation, argument, shape)?;
            attention.check_marks(state, argument)?;
        }
        attention.check_decay(kv_heads)?;
        let counted = attention.score.fourier().filter(|fourier| fourier.positions == Positions::Counted);
        let rates = counted.map(|fourier| (parameters.first().copied().unwrap_or_default(), fourier.angles(mapped)));
        if let Some((rates, angles)) = rates {
            let expected = || format!("shape {:?}, so {} elements", [kv_heads, angles, 1], kv_heads * angles);
            expect(rates.len() == kv_heads * angles, operation, "a", expected, || format!("{} elements", rates.len()))?;
        }
        Ok(Self { attention, shape, value_dim, rates })
    }

    fn weights(&self, index: usize, first: &Head<&[T]>, second: &Head<&[T]>) -> Weights<T> {
        let kv_heads = self.shape.kv_heads;
        let gamma = self.attention.decay.as_ref().map_or(1.0, |decay| decay[index % kv_heads]);
        let gates = second.passed.first().map_or(T::ONE, |g| g.exp());
        let shift = first.marks[SHIFT].max(second.marks[SHIFT]);
        let scale = |state: &Head<&[T]>| {
            let own = state.marks[SHIFT];
            if own.is_finite() { (own - shift).exp() } else { T::ZERO }
        };
        let turn = self
            .rates
            .filter(|_| first.tokens() > 0)
            .map(|(rates, angles)| angles_after(&rates[index % kv_heads * angles..][..angles], first.tokens() as f64));
        let mut weights = Weights { gamma, gates, shift, before: scale(first), since: scale(second), turn };
        weights.before = weights.decay(second.tokens()) * weights.before;
        weights
    }

    /// Rows of sums that turn, with their width. Denominators of their own are sums of features that do not turn.
    fn turning<S>(&self, sum: S, keys: S) -> impl Iterator<Item = (S, usize)> {
        let turns = self.attention.score.fourier().is_some_and(|fourier| {
            let (blocks, weigh) = fourier.blocks();
            weigh == blocks
        });
        std::iter::once((sum, self.value_dim)).chain(turns.then_some((keys, 1)))
    }
}

impl Stateful for KernelizedAttention {
    fn state_shape<T: Real>(&self, dims: &Dims) -> Result<StateShape, Error> {
        let radius = self.score.shaw().map_or(0, |shaw| shaw.radius);
        check_count::<T>(self.name(), "radius", radius)?;
        Ok(mapped_shape::<T>(self, dims, self.feature_map.features(dims.head_dim)))
    }

    fn empty_state<T: Real>(&self, dims: &Dims) -> Result<State<T>, Error> {
        dims.check(self.name())?;
        self.check_feature_map(dims)?;
        empty_of(self, self.state_shape::<T>(dims)?)
    }

    fn check_marks<T: Real>(&self, state: &State<T>, argument: &'static str) -> Result<(), Error> {
        let operation = self.name();
        let rows = self.score.shaw().map_or(0, |shaw| shaw.radius).max(1);
        for marks in state.each(MARKS_PART) {
            let counts = &marks[TOKENS..MARKS];
            let holds = counts.iter().all(|&n| is_count(n, TOKENS_CARRY as usize));
            let expected = || format!("whole numbers below {TOKENS_CARRY} as the count of tokens");
            expect(holds, operation, argument, expected, || format!("{counts:?}"))?;
            let oldest = marks[OLDEST];
            let expected = || format!("a whole number below {rows} as the index of the ring's oldest row");
            expect(is_count(oldest, rows), operation, argument, expected, || oldest.to_string())?;
        }
        check_log_decays_of(operation, argument, state, PASSED_PART)
    }

    /// The state of the tokens of `earlier` and then those of `later`, which began with none before it.
    ///
    /// With `n` later tokens, everything earlier has fallen by `γⁿ`, or by their gates: `S = γⁿ S₁ + S₂`, and `z` and the far sum likewise, each
    /// brought to the larger exponent. The later ring holds its last `min(n, R)` tokens; before them come the earlier
    /// ring's, and those that no longer fit become far. Under counted positions the later keys, which counted from 0, turn by
    /// the angles of as many steps as there are earlier tokens.
    fn combine<T: Real>(&self, earlier: &State<T>, later: &State<T>, parameters: &[&[T]]) -> Result<State<T>, Error> {
        let pair = Pair::new(self, earlier, later, parameters)?;
        let mut state = empty_of(self, pair.shape)?;
        for (index, mut to) in state.heads_mut().map(Head::from).enumerate() {
            let [first, mut second] = [earlier, later].map(|state| Head::from(state.head(0, index)));
            let weights = pair.weights(index, &first, &second);
            let tokens = second.tokens();
            let (mut sum, mut keys);
            if let Some(turn) = &weights.turn {
                (sum, keys) = (second.sum.to_vec(), second.keys.to_vec());
                pair.turning(&mut sum, &mut keys).for_each(|(rows, width)| turn_rows(rows, width, turn));
                (second.sum, second.keys) = (&sum, &keys);
            }
            add(to.sum, (weights.before, first.sum), (weights.since, second.sum));
            add(to.keys, (weights.before, first.keys), (weights.since, second.keys));
            add(to.far, (weights.decay(tokens), first.far), (T::ONE, second.far));
            to.marks[SHIFT] = weights.shift;

            let width = pair.value_dim + 1;
            let rows = to.ring.len() / width;
            for (slot, row) in to.ring.chunks_exact_mut(width).enumerate() {
                let back = rows - slot;
                let from = match (back as u64).checked_sub(tokens) {
                    Some(back) if back > 0 => first.ring_row(back as usize, width),
                    _ => second.ring_row(back, width),
                };
                row.copy_from_slice(from.unwrap_or_default());
                if (back as u64) > tokens {
                    row[width - 1] *= weights.gates;
                }
            }
            for back in (1..=rows).filter(|&back| back as u64 + tokens > rows as u64) {
                add_row(to.far, weights.decay(back as u64 + tokens), first.ring_row(back, width).unwrap_or_default());
            }
            to.passed.iter_mut().zip(first.passed).zip(second.passed).for_each(|((to, &a), &b)| *to = a + b);
            to.set_tokens(first.tokens() + tokens);
        }
        Ok(state)
    }

    /// The gradients of both states and of the parameters, from that of [`combine`]'s result: every step of it the other way round.
    fn combine_backward<T: Real>(
        &self,
        earlier: &State<T>,
        later: &State<T>,
        parameters: &[&[T]],
        d_combined: &State<T>,
    ) -> Result<CombineGradients<T>, Error> {
        let pair = Pair::new(self, earlier, later, parameters)?;
        d_combined.check(self.name(), "gradient of the combined state", pair.shape)?;
        let [mut d_earlier, mut d_later] = [State::zeros(pair.shape)?, State::zeros(pair.shape)?];
        let mut d_parameters: Vec<Vec<T>> = parameters.iter().map(|given| vec![T::ZERO; given.len()]).collect();
        let heads = d_earlier.heads_mut().map(Head::from).zip(d_later.heads_mut().map(Head::from));
        for (index, (d_first, d_second)) in heads.enumerate() {
            let [first, second, d] = [earlier, later, d_combined].map(|state| Head::from(state.head(0, index)));
            let weights = pair.weights(index, &first, &second);
            let tokens = second.tokens();
            for (to, weight, d) in [
                (&mut *d_first.sum, weights.before, d.sum),
                (&mut *d_first.keys, weights.before, d.keys),
                (&mut *d_second.sum, weights.since, d.sum),
                (&mut *d_second.keys, weights.since, d.keys),
                (&mut *d_first.far, weights.decay(tokens), d.far),
                (&mut *d_second.far, T::ONE, d.far),
            ] {
                add_scaled(to, weight, d);
            }
            if let (Some([cos, sin]), Some((_, angles))) = (&weights.turn, pair.rates) {
                let back = [cos.clone(), sin.iter().map(|&x| -x).collect()];
                let rates = &mut d_parameters[0][index % pair.shape.kv_heads * angles..][..angles];
                let turned = pair.turning(&mut *d_second.sum, &mut *d_second.keys);
                for ((d, width), (rows, _)) in turned.zip(pair.turning(second.sum, second.keys)) {
                    turn_rows(d, width, &back);
                    // A turn by dθ takes (x, y) to (x − y·dθ, y + x·dθ), before as well as after the whole turn.
                    let (x, y) = rows.split_at(angles * width);
                    let (dx, dy) = d.split_at(angles * width);
                    for n in 0..angles * width {
                        rates[n / width] += T::from_f64(first.tokens() as f64) * (x[n] * dy[n] - y[n] * dx[n]);
                    }
                }
            }

            let width = pair.value_dim + 1;
            let rows = d.ring.len() / width;
            for (slot, row) in d.ring.chunks_exact(width).enumerate() {
                let back = rows - slot;
                let (to, place) = match (back as u64).checked_sub(tokens) {
                    Some(back) if back > 0 => (&mut *d_first.ring, first.ring_place(back as usize, width)),
                    _ => (&mut *d_second.ring, second.ring_place(back, width)),
                };
                let Some(place) = place else { continue };
                to[place.clone()].copy_from_slice(row);
                if (back as u64) > tokens {
                    to[place.end - 1] *= weights.gates;
                }
            }
            for back in (1..=rows).filter(|&back| back as u64 + tokens > rows as u64) {
                let Some(place) = first.ring_place(back, width) else { continue };
                let (left, row, to) =
                    (weights.decay(back as u64 + tokens), &first.ring[place.clone()], &mut d_first.ring[place]);
                if self.gate {
                    let (v, weight) = row.split_at(width - 1);
                    add_scaled(&mut to[..width - 1], left * weight[0], d.far);
                    to[width - 1] += left * (dot(v, d.far) + d.far[width - 1]);
                } else {
                    add_scaled(to, left, d.far);
                }
            }
            if let (Some(to), [d_passed]) = (d_second.passed.first_mut(), d.passed) {
                // All that is left of the earlier state falls with the later tokens.
                let mut sum = d_passed.to_f64();
                let mut weigh =
                    |x: &[T], d: &[T]| sum += x.iter().zip(d).map(|(x, d)| x.to_f64() * d.to_f64()).sum::<f64>();
                weigh(first.sum, d_first.sum);
                weigh(first.keys, d_first.keys);
                weigh(first.far, d_first.far);
                for n in (width - 1..first.ring.len()).step_by(width) {
                    weigh(&first.ring[n..=n], &d_first.ring[n..=n]);
                }
                *to = T::from_f64(sum);
                d_first.passed[0] = *d_passed;
            }
        }
        Ok(CombineGradients { earlier: d_earlier, later: d_later, parameters: d_parameters })
    }
}

/// Adds a row of the ring, a value and what is left of its weight, to a far sum.
pub(super) fn add_row<T: Real>(far: &mut [T], factor: T, row: &[T]) {
    let Some((&weight, v)) = row.split_last() else { return };
    add_scaled(&mut far[..v.len()], factor * weight, v);
    far[v.len()] += factor * weight;
}

/// Turns the features of summed keys further: rows `k` and `k + angles` of a sum as a pair, each `width` numbers, by the
/// `k`-th of some angles. Both kinds of wave have their pairs there, and what does not turn after them.
fn turn_rows<T: Real>(sum: &mut [T], width: usize, [cos, sin]: &[Vec<T>; 2]) {
    let (first, second) = sum.split_at_mut(cos.len() * width);
    for (n, (x, y)) in first.iter_mut().zip(second).enumerate() {
        let (cos, sin) = (cos[n / width], sin[n / width]);
        (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
    }
}

fn add<T: Real>(to: &mut [T], (a, x): (T, &[T]), (b, y): (T, &[T])) {
    for (to, (&x, &y)) in to.iter_mut().zip(x.iter().zip(y)) {
        *to = a * x + b * y;
    }
}
